"""ragged_paged_attention_v3 over sharded arrays: one device's bits, without a collective."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import cases, compare
from tests.distributed import devices
from tests.distributed.test_explicit_sharding import explicit, set_mesh
from tests.distributed.test_sharding import CASE, COLLECTIVES, P, partitioner
from tests.frontends import rpa_v3

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
assert partitioner  # a fixture for all tests here: Shardy and GSPMD

HEADS = dict.fromkeys(("queries", "keys", "values"), P(None, "tp")) | {
    "kv_cache": P(None, None, "tp"),
    "attention_sink": P("tp"),
}
VARIANTS = {
    "float32": ({}, 4, {"update_kv_cache": False}),
    "bfloat16": ({"dtype": "bfloat16", "sinks": True}, 4, {"return_lse": True}),
    # Two heads stand side by side in 32 bits of the cache.
    "float8": ({"dtype": "bfloat16", "cache_dtype": "float8_e4m3fn"}, 2, {"k_scale": 0.5, "v_scale": 2.0}),
}


def build(case: cases.AttentionCase) -> dict:
    return rpa_v3.build(case, poison=False)


def place(mesh, arrays: dict) -> dict:
    return {name: devices.shard(mesh, x, *HEADS.get(name, P())) for name, x in arrays.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_by_heads(types, variant):
    settings, count, options = VARIANTS[variant]
    mesh = devices.mesh("cpu", tp=count)
    arrays = build(CASE.but(**settings))

    def program(cache, others):
        results = xg.ragged_paged_attention_v3(kv_cache=cache, **others, sm_scale=0.1, **options)
        # The next layer's call, as in a model.
        return results, xg.ragged_paged_attention_v3(**{**others, "kv_cache": results[1]}, sm_scale=0.1, **options)

    def split(arrays):
        return arrays["kv_cache"], {name: x for name, x in arrays.items() if name != "kv_cache"}

    want = jax.tree.map(np.asarray, jax.jit(program)(*split(arrays)))
    with set_mesh(explicit(mesh) if types == "explicit" else mesh):
        mesh = explicit(mesh) if types == "explicit" else mesh
        compiled = jax.jit(program, donate_argnums=0).lower(*split(place(mesh, arrays))).compile()
        if types == "auto" or hasattr(jax.sharding, "use_abstract_mesh"):  # jax 0.7 gathers under explicit axes
            assert not re.findall(COLLECTIVES, compiled.as_text())
        got = compiled(*split(place(mesh, arrays)))
        eager = xg.ragged_paged_attention_v3(**place(mesh, arrays), sm_scale=0.1, **options)
    for cache in (got[1][1], eager[1]):
        assert cache.sharding.shard_shape(cache.shape)[2] == cache.shape[2] // count
    for one, expected in zip(jax.tree.leaves((got, eager)), jax.tree.leaves((want, want[0])), strict=True):
        compare.assert_bitwise_equal(np.asarray(one), expected)


def test_a_cache_that_devices_cannot_share_is_named():
    mesh = devices.mesh("cpu", tp=2)
    arrays = build(CASE)
    slots = place(mesh, arrays) | {"kv_cache": devices.shard(mesh, arrays["kv_cache"], None, "tp")}
    with pytest.raises(Exception, match="ragged_paged_attention_v3: kv_cache: expected no shards of an axis"):
        xg.ragged_paged_attention_v3(**slots)
    padded = build(CASE.but(dtype="bfloat16", cache_dtype="float8_e4m3fn", num_heads=3, num_kv_heads=3))
    whole = {name: devices.shard(mesh, x) for name, x in padded.items()}
    divided = whole | {"kv_cache": devices.shard(mesh, padded["kv_cache"], *HEADS["kv_cache"])}
    with pytest.raises(Exception, match="kv_cache: expected a number of shards that divides kv_heads = 1"):
        xg.ragged_paged_attention_v3(**divided)


def test_a_gradient_is_refused_by_the_calls_own_names():
    arrays = build(CASE)
    queries = arrays.pop("queries")
    with pytest.raises(ValueError, match="ragged_paged_attention_v3 has no gradient for queries, float32"):
        jax.grad(lambda queries: xg.ragged_paged_attention_v3(queries, **arrays)[0].sum())(queries)


def test_no_array_is_named():
    arrays = build(CASE) | {"keys": None}
    with pytest.raises(TypeError, match="ragged_paged_attention_v3: keys: expected a JAX or NumPy array, got NoneType"):
        xg.ragged_paged_attention_v3(**arrays)
