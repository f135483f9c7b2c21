"""What the tests of users' kernels share."""

from __future__ import annotations

import pytest

from xla_gpu._user_kernels import nvrtc
from xla_gpu.errors import CompatibilityError


@pytest.fixture(scope="session")
def compiler():
    """NVRTC; skips where it is missing."""
    try:
        nvrtc.load()
    except CompatibilityError as error:
        pytest.skip(str(error))
