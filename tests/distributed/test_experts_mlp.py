"""experts_mlp over devices: experts of each device's own inside jax.shard_map, and sharded arrays under jax.jit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import compare, experts_cases
from tests.distributed import devices
from tests.distributed.test_explicit_sharding import explicit, set_mesh
from tests.distributed.test_sharding import P, partitioner

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
assert partitioner  # a fixture for all tests here: Shardy and GSPMD

BY_ROW = ("x", "topk_weights", "topk_ids")


def experts_of_a_device(arrays):
    own = arrays["gate_up_weight"].shape[0]
    ids = arrays["topk_ids"] - jax.lax.axis_index("ep") * own
    return jax.lax.psum(xg.experts_mlp(**arrays | {"topk_ids": ids}), "ep")


@pytest.mark.parametrize("platform", devices.PLATFORMS)
@pytest.mark.parametrize("weight_format", ["plain", "int4-zero-point", "mxfp4"])
@pytest.mark.parametrize("rows", [5, 300])
def test_expert_parallel(platform, weight_format, rows):
    """Eight experts on four devices; rows are whole on each, and the result too."""
    mesh = devices.mesh(platform, ep=4)
    arrays = experts_cases.inputs(weight_format, rows, 8, 3, bias=True)
    arrays["topk_ids"][1] = -1  # a padding row, which on no device becomes an expert's
    arrays["topk_ids"][2] = [7, 7, 8]
    specs = {name: P() if name in BY_ROW else P("ep") for name in arrays}
    placed = {name: devices.shard(mesh, x, *specs[name]) for name, x in arrays.items()}
    program = jax.jit(jax.shard_map(experts_of_a_device, mesh=mesh, in_specs=(specs,), out_specs=P()))
    got = np.asarray(program(placed))
    want, rounded = experts_cases.expected(arrays), experts_cases.rounded(arrays)
    # Each device's part rounds to T, and their sum does.
    compare.assert_close(got, want, rounded, weight_format, floor=float(np.abs(want).max()) * 2**-8)
    compare.assert_bitwise_equal(got[1], np.zeros_like(got[1]))


@pytest.mark.parametrize("sharded", ["rows", "features", "experts"])
def test_sharded_arrays_under_jit(sharded):
    mesh = devices.mesh("cpu", x=4)
    arrays = experts_cases.inputs("int8", 8, 4, 2, bias=True)
    program = jax.jit(lambda arrays: xg.experts_mlp(**arrays))
    want = np.asarray(program(arrays))
    of_rows = ("x",) if sharded == "rows" else ()
    of_weights = {"features": (None, "x"), "experts": ("x",)}.get(sharded, ())
    placed = {name: devices.shard(mesh, x, *(of_rows if name in BY_ROW else of_weights)) for name, x in arrays.items()}
    compare.assert_bitwise_equal(np.asarray(program(placed)), want, sharded)


@pytest.mark.parametrize("jitted", [False, True])
def test_explicit_axes(jitted):
    """The result is divided as x's rows are."""
    arrays = experts_cases.inputs("plain", 8, 4, 2)
    want = np.asarray(xg.experts_mlp(**arrays))
    mesh = explicit(devices.mesh("cpu", x=4))
    with set_mesh(mesh):
        specs = {name: P("x") if name in BY_ROW else P() for name in arrays}
        placed = {name: devices.shard(mesh, x, *specs[name]) for name, x in arrays.items()}
        got = (jax.jit(xg.experts_mlp) if jitted else xg.experts_mlp)(**placed)
        assert jax.typeof(got).sharding.spec == P("x", None)
    compare.assert_bitwise_equal(np.asarray(got), want)
