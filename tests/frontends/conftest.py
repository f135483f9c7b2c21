"""Fixtures of the tests of register_ffi_target and ffi_call."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def ffi_targets(third_party) -> None:
    """Registers the handlers of ffi/testing."""
    from tests.frontends.third_party_handlers import register_all

    register_all(third_party)
