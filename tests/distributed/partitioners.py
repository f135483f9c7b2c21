"""What tests of plain jax.jit over sharded arrays share."""

from __future__ import annotations

import pytest

# In optimised HLO.
COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("


@pytest.fixture(params=["shardy", "gspmd"], autouse=True)
def partitioner(request):
    """JAX's two ways to divide a program, in modules that import this."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)
