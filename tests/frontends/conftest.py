"""Fixtures of the tests of the front ends."""

from __future__ import annotations

import pytest

from tests.common import frontends


@pytest.fixture(scope="session", autouse=True)
def devices_before_gradients() -> None:
    """Autograd counts the devices at a process's first backward pass, and refuses those that torch_xla adds later."""
    for name in ("torch_xla", "torch_xla-cuda"):
        if not frontends.ALL[name].unavailable():
            frontends.ALL[name].device()


@pytest.fixture(scope="session")
def ffi_targets(third_party) -> None:
    """Registers the handlers of ffi/testing."""
    from tests.frontends.third_party_handlers import register_all

    register_all(third_party)
