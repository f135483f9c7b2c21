"""A layer's operators beside attention in plain jax.jit over sharded arrays: each device computes its share, with the
bits of one device; the optimised HLO holds no collective."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import cases, compare, grouped_cases, layer_cases
from tests.distributed import devices
from tests.distributed.partitioners import COLLECTIVES, partitioner

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
assert partitioner  # a fixture for all tests here: Shardy and GSPMD


@pytest.mark.parametrize("spec", [("tp",), (None, "dp"), ("dp", "tp")], ids=str)
def test_norms_by_rows(spec):
    """rms_norm, silu_and_mul: rows over devices; the weight is everywhere."""
    mesh = devices.mesh("cpu", dp=2, tp=2)
    rng = cases.rng_for("norms")
    x, residual = (rng.standard_normal((4, 6, 16)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(16).astype(np.float32)

    def norm(x, weight, residual):
        return *xg.rms_norm(x, weight, eps=1e-6, residual=residual), xg.silu_and_mul(x)

    want = [np.asarray(y) for y in jax.jit(norm)(x, weight, residual)]
    sharded = devices.shard(mesh, x, *spec), devices.shard(mesh, weight), devices.shard(mesh, residual, *spec)
    compiled = jax.jit(norm).lower(*sharded).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    for got, expected in zip(compiled(*sharded), want, strict=True):
        compare.assert_bitwise_equal(np.asarray(got), expected, str(spec))


@pytest.mark.parametrize("spec", [("tp",), (None, "tp"), ("dp", "tp")], ids=str)
def test_rotary_embedding_by_tokens_and_heads(spec):
    mesh = devices.mesh("cpu", dp=2, tp=2)
    arrays = layer_cases.rotary("float32", num_tokens=8, num_heads=8, num_kv_heads=2)
    rotate = jax.jit(lambda arrays: xg.rotary_embedding(**arrays))
    want = [np.asarray(x) for x in rotate(arrays)]
    specs = {"query": spec, "key": spec, "positions": spec[:1], "table": ()}
    compiled = rotate.lower({n: devices.shard(mesh, x, *specs[n]) for n, x in arrays.items()}).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    for got, expected in zip(
        compiled({n: devices.shard(mesh, x, *specs[n]) for n, x in arrays.items()}), want, strict=True
    ):
        compare.assert_bitwise_equal(np.asarray(got), expected, str(spec))


def test_rotary_and_cache_refuses_a_sharded_cache():
    """Columns of qkv are no heads: inside shard_map a device has its own."""
    mesh = devices.mesh("cpu", tp=2)
    arrays, options = layer_cases.samples()["rotary_and_cache"]
    placed = {n: devices.shard(mesh, x) for n, x in arrays.items()}
    placed["kv_cache"] = devices.shard(mesh, arrays["kv_cache"], None, None, "tp", None)
    with pytest.raises(Exception, match=r"rotary_and_cache: kv_cache: expected no shards of an axis"):
        jax.jit(lambda arrays: xg.rotary_and_cache(**arrays, **options))(placed)


def test_sample_by_rows():
    mesh = devices.mesh("cpu", tp=4)
    arrays = layer_cases.sampling("float32", 8, 300)
    arrays["seed"] = arrays["seed"].astype(np.int32)  # what JAX has without 64-bit types
    sample = jax.jit(lambda arrays: xg.sample(**arrays))
    want = [np.asarray(x) for x in sample(arrays)]
    compiled = sample.lower({n: devices.shard(mesh, x, "tp") for n, x in arrays.items()}).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    for got, expected in zip(compiled({n: devices.shard(mesh, x, "tp") for n, x in arrays.items()}), want, strict=True):
        compare.assert_bitwise_equal(np.asarray(got), expected, "sample")


@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "float8-block", "int4"])
def test_products_by_rows_and_features(weight_format):
    """linear: rows over one axis of the mesh, features over the other."""
    mesh = devices.mesh("cpu", dp=2, tp=2)
    arrays = cases.linear_inputs(weight_format, 4, 256, 256, "float32")
    want = np.asarray(jax.jit(xg.linear)(**arrays))
    sharded = {name: devices.shard(mesh, x, "dp" if name == "x" else "tp") for name, x in arrays.items()}
    compiled = jax.jit(xg.linear).lower(**sharded).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    got = compiled(**sharded)
    assert got.sharding.shard_shape(got.shape) == (2, 128)
    compare.assert_bitwise_equal(np.asarray(got), want, weight_format)


@pytest.mark.parametrize(
    "weight_format", ["plain", "float8-tensor", "float8-channel", "int8", "int4", "int4-zero-point"]
)
def test_products_of_shares_of_16_features(weight_format):
    """int4 has scales of its own for each feature: of no format but float8's blocks must a share be longer."""
    mesh = devices.mesh("cpu", tp=4)
    arrays = cases.linear_inputs(weight_format, 4, 64, 256, "float32")
    whole = ("x", "weight_scale") if weight_format == "float8-tensor" else ("x",)
    want = np.asarray(jax.jit(xg.linear)(**arrays))
    sharded = {name: devices.shard(mesh, x, *(() if name in whole else ("tp",))) for name, x in arrays.items()}
    compiled = jax.jit(xg.linear).lower(**sharded).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    got = compiled(**sharded)
    assert got.sharding.shard_shape(got.shape) == (4, 16)
    compare.assert_bitwise_equal(np.asarray(got), want, weight_format)


@pytest.mark.parametrize(("weight_format", "n", "unit"), [("int4", 32, 16), ("float8-block", 256, 128)])
def test_shares_of_less_than_a_block_of_features_are_named(weight_format, n, unit):
    mesh = devices.mesh("cpu", tp=4)
    arrays = cases.linear_inputs(weight_format, 4, n, 256, "float32")
    sharded = {name: devices.shard(mesh, x, *(["tp"] if name == "weight" else [])) for name, x in arrays.items()}
    text = rf"linear: weight: expected a number of shards that divides blocks_of_{unit}_features = 2, got axis 0"
    with pytest.raises(Exception, match=text):
        jax.jit(xg.linear)(**sharded)


@pytest.mark.parametrize("weight_format", ["plain", "float8-block", "int4-zero-point", "mxfp4"])
def test_grouped_linear_by_features(weight_format):
    mesh = devices.mesh("cpu", tp=2)
    arrays = grouped_cases.inputs(weight_format, [2, 0, 3], 256, 256, bias=True, rows=6)
    want = np.asarray(jax.jit(xg.grouped_linear)(**arrays))
    whole = ("x", "group_sizes")
    sharded = {n: devices.shard(mesh, x, *(() if n in whole else (None, "tp"))) for n, x in arrays.items()}
    compiled = jax.jit(xg.grouped_linear).lower(**sharded).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    got = compiled(**sharded)
    assert got.sharding.shard_shape(got.shape) == (6, 128)
    compare.assert_bitwise_equal(np.asarray(got), want, weight_format)


def test_attention_block_refuses_a_sharded_cache():
    mesh = devices.mesh("cpu", tp=2)
    arrays, options = layer_cases.samples()["attention_block"]
    placed = {n: devices.shard(mesh, x) for n, x in arrays.items()}
    placed["kv_cache"] = devices.shard(mesh, arrays["kv_cache"], None, None, "tp", None)
    with pytest.raises(Exception, match=r"attention_block: kv_cache: expected no shards of an axis"):
        jax.jit(lambda arrays: xg.attention_block(**arrays, **options))(placed)


def test_gated_mlp_by_rows():
    mesh = devices.mesh("cpu", tp=4)
    arrays = layer_cases.gated_mlp("float8-channel", 8, 64, 96, "float32")
    step = jax.jit(lambda arrays: xg.gated_mlp(**arrays, eps=1e-5))
    want = np.asarray(step(arrays))
    placed = {n: devices.shard(mesh, x, *(["tp"] if n in ("x", "residual") else [])) for n, x in arrays.items()}
    compiled = step.lower(placed).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    compare.assert_bitwise_equal(np.asarray(compiled(placed)), want, "gated_mlp")
