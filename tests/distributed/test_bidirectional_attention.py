"""bidirectional_attention of arrays sharded by heads: each device computes its heads, and nothing is gathered."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import bidirectional_cases, compare
from tests.distributed import devices
from tests.distributed.test_explicit_sharding import explicit, set_mesh
from tests.distributed.test_sharding import COLLECTIVES, P, partitioner

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
assert partitioner  # a fixture for all tests here: Shardy and GSPMD

CASE = bidirectional_cases.Case("sharded", (20, 1, 9), num_heads=8, num_kv_heads=4, head_dim=32)
BY_HEADS = ("query", "key", "value")


def attend(arrays, window=None):
    return xg.bidirectional_attention(**arrays, **CASE.options() | {"sliding_window": window})


def placed(mesh, arrays):
    return {name: devices.shard(mesh, x, *((None, "tp") if name in BY_HEADS else ())) for name, x in arrays.items()}


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_sharded_arrays_under_jit(platform, window):
    arrays = bidirectional_cases.build(CASE)
    want = np.asarray(jax.jit(attend, static_argnums=1)(arrays, window))
    sharded = placed(devices.mesh(platform, tp=4), arrays)
    program = jax.jit(attend, static_argnums=1).lower(sharded, window).compile()
    assert re.findall(COLLECTIVES, program.as_text()) == []
    got = program(sharded)
    assert got.sharding.shard_shape(got.shape) == (CASE.num_tokens, 2, 32)
    compare.assert_bitwise_equal(np.asarray(got), want)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_in_shard_map(platform):
    arrays = bidirectional_cases.build(CASE)
    mesh = devices.mesh(platform, tp=4)
    specs = {name: P(None, "tp") if name in BY_HEADS else P() for name in arrays}
    program = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=P(None, "tp")))
    compare.assert_bitwise_equal(np.asarray(program(placed(mesh, arrays))), np.asarray(attend(arrays)))


@pytest.mark.parametrize("jitted", [False, True])
def test_explicit_axes(jitted):
    arrays = bidirectional_cases.build(CASE)
    want = np.asarray(attend(arrays))
    mesh = explicit(devices.mesh("cpu", tp=4))
    with set_mesh(mesh):
        got = (jax.jit(attend) if jitted else attend)(placed(mesh, arrays))
        assert jax.typeof(got).sharding.spec == P(None, "tp", None)
    compare.assert_bitwise_equal(np.asarray(got), want)
