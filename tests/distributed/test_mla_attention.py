"""mla_attention of queries sharded by heads beside whole caches, and concat_and_cache_mla on every device."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import compare, mla_cases
from tests.distributed import devices
from tests.distributed.test_explicit_sharding import explicit, set_mesh
from tests.distributed.test_sharding import COLLECTIVES, P, partitioner

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
assert partitioner  # a fixture for all tests here: Shardy and GSPMD

# 16 heads a device, which share the host's tiles: with fewer the bits would be others.
CASE = mla_cases.Case("sharded", ((1, 40), (5, 9), (1, 70)), num_heads=64, head_dim=192, value_dim=128)


def attend(arrays):
    return xg.mla_attention_with_lse(**arrays, **CASE.options())


def placed(mesh, arrays):
    return {name: devices.shard(mesh, x, *((None, "tp") if name == "query" else ())) for name, x in arrays.items()}


def assert_same(got, want) -> None:
    for name, mine, theirs in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(np.asarray(mine), np.asarray(theirs), name)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_sharded_arrays_under_jit(platform):
    arrays = mla_cases.build(CASE)
    want = jax.jit(attend)(arrays)
    sharded = placed(devices.mesh(platform, tp=4), arrays)
    program = jax.jit(attend).lower(sharded).compile()
    assert re.findall(COLLECTIVES, program.as_text()) == []
    out, lse = program(sharded)
    assert out.sharding.shard_shape(out.shape) == (len(arrays["query"]), 16, CASE.value_dim)
    assert lse.sharding.shard_shape(lse.shape) == (len(arrays["query"]), 16)
    assert_same((out, lse), want)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_in_shard_map(platform):
    arrays = mla_cases.build(CASE)
    mesh = devices.mesh(platform, tp=4)
    specs = {name: P(None, "tp") if name == "query" else P() for name in arrays}
    program = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=P(None, "tp")))
    assert_same(program(placed(mesh, arrays)), attend(arrays))


@pytest.mark.parametrize("jitted", [False, True])
def test_explicit_axes(jitted):
    arrays = mla_cases.build(CASE)
    want = attend(arrays)
    mesh = explicit(devices.mesh("cpu", tp=4))
    with set_mesh(mesh):
        got = (jax.jit(attend) if jitted else attend)(placed(mesh, arrays))
        assert jax.typeof(got[0]).sharding.spec == P(None, "tp", None)
    assert_same(got, want)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_sharded_cache_is_refused(axis):
    """Every device needs all of it: it is no share of heads, and too large to be gathered."""
    mesh = devices.mesh("cpu", tp=2)
    arrays = mla_cases.build(CASE.but(sequences=((1, 40), (1, 9))))
    assert len(arrays["kv_cache"]) % 2 == 0
    cache = devices.shard(mesh, arrays["kv_cache"], *(None,) * axis, "tp")
    sharded = placed(mesh, arrays) | {"kv_cache": cache}
    with pytest.raises(Exception, match=r"mla_attention_with_lse: kv_cache: expected no shards of an axis"):
        jax.jit(attend)(sharded)
    latents = mla_cases.build_latents(mla_cases.LatentCase("sharded", num_pages=10, kv_lora_rank=32, rope_dim=8))
    sharded = {name: devices.shard(mesh, x) for name, x in latents.items()}
    sharded["kv_cache"] = devices.shard(mesh, latents["kv_cache"], *(None,) * axis, "tp")
    with pytest.raises(Exception, match=r"concat_and_cache_mla: kv_cache: expected no shards of an axis"):
        jax.jit(lambda arrays: xg.concat_and_cache_mla(**arrays))(sharded)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_a_layer_over_devices(platform):
    """Queries by heads, and tokens by rows, which are gathered into each device's cache; that is donated."""
    mesh = devices.mesh(platform, tp=4)
    arrays = mla_cases.build(CASE.but(sequences=((8, 8),), padding_tokens=0))
    latents = np.arange(8 * 192, dtype=np.float32).reshape(8, 192) % 97 / 50 - 1
    new = {"kv_c": latents[:, :128].copy(), "k_pe": latents[:, 128:].copy()}
    slots = arrays["block_tables"][0, 0] * 8 + np.arange(8, dtype=np.int32)

    def layer(cache, arrays, new):
        cache = xg.concat_and_cache_mla(new["kv_c"], new["k_pe"], cache, slots)
        return attend(arrays | {"kv_cache": cache}), cache

    cache = arrays.pop("kv_cache")
    want, want_cache = jax.jit(layer)(cache, arrays, new)
    given = devices.shard(mesh, cache), placed(mesh, arrays), {n: devices.shard(mesh, x, "tp") for n, x in new.items()}
    program = jax.jit(layer, donate_argnums=0).lower(*given).compile()
    assert {kind for kind, *_ in re.findall(COLLECTIVES, program.as_text())} == {"all-gather"}
    got, got_cache = program(*given)
    assert_same(got, want)
    compare.assert_bitwise_equal(np.asarray(got_cache), np.asarray(want_cache), "cache")
