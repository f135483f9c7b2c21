"""Meshes of AxisType.Explicit, as jax.make_mesh makes them: results' types have the operands' shardings."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest

from tests.common import compare
from tests.distributed import devices
from tests.distributed.test_sharding import CASE, COLLECTIVES, P, arguments, placed, step

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)

# jax 0.7 has it under another name.
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh


def explicit(mesh):
    """That mesh with explicit axes."""
    types = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_attention_and_cache_by_heads(platform):
    args = arguments(CASE)
    want = [np.asarray(x) for x in jax.jit(step)(*args)]
    mesh = explicit(devices.mesh(platform, tp=2))
    with set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=3).lower(*placed(mesh, "combined", args)).compile()
        assert not re.findall(COLLECTIVES, compiled.as_text())
        specs = [x.sharding.spec for x in jax.eval_shape(step, *placed(mesh, "combined", args))]
        assert specs == [P(None, "tp", None), P(None, "tp"), P(None, None, "tp", None)]
        out = compiled(*placed(mesh, "combined", args))
        eager = step(*placed(mesh, "combined", args))
    for got, other, expected in zip(out, eager, want, strict=True):
        compare.assert_bitwise_equal(np.asarray(got), expected)
        compare.assert_bitwise_equal(np.asarray(other), expected)


def test_a_cache_that_scan_carries():
    """Its type stays the same."""
    args = arguments(CASE)
    mesh = explicit(devices.mesh("cpu", tp=2))

    def several(query, key, value, cache, *others):
        def body(cache, _):
            out, _, cache = step(query, key, value, cache, *others)
            return cache, out

        return jax.lax.scan(body, cache, length=2)

    want = [np.asarray(x) for x in jax.jit(several)(*args)]
    with set_mesh(mesh):
        got = jax.jit(several)(*placed(mesh, "combined", args))
    for one, expected in zip(got, want, strict=True):
        compare.assert_bitwise_equal(np.asarray(one), expected)
    assert got[1].sharding.spec == P(None, None, "tp", None)


@pytest.mark.parametrize("types", ["explicit", "auto and explicit"])
def test_by_rows(types):
    """Norms, products and blocks; of two axes the automatic one is XLA's."""
    mesh = devices.mesh("cpu", dp=2, tp=2)
    kinds = jax.sharding.AxisType
    first = kinds.Explicit if types == "explicit" else kinds.Auto
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(first, kinds.Explicit))
    rng = np.random.default_rng(0)
    x, weight, wide = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (64, 64), (128, 64)))

    def layer(x):
        x = xg.rms_norm(x, np.ones(64, np.float32), eps=1e-5)
        return xg.gated_mlp(xg.linear(x, weight), wide, weight, residual=x)

    want = np.asarray(jax.jit(layer)(x))
    with set_mesh(mesh):
        got = jax.jit(layer)(devices.shard(mesh, x, "tp"))
        several = jax.jit(jax.vmap(layer))(devices.shard(mesh, np.stack([x, x]), None, "tp"))
    compare.assert_bitwise_equal(np.asarray(got), want)
    compare.assert_bitwise_equal(np.asarray(several)[1], want)
    assert got.sharding.shard_shape(got.shape) == (4, 64)
    assert several.sharding.shard_shape(several.shape) == (2, 4, 64)


@pytest.mark.parametrize("rows", [8, 72])
@pytest.mark.parametrize("of_x", [(), ("tp",), (None, "tp")])
@pytest.mark.parametrize("of_weight", [(), ("tp",), (None, "tp")])
def test_products_of_operands_divided_anyhow(rows, of_x, of_weight):
    """Many rows of 16 bits are multiplied by XLA: the results' type is the kernel's, of few rows."""
    mesh = explicit(devices.mesh("cpu", tp=2))
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(jax.numpy.bfloat16) for shape in ((rows, 64), (64, 64)))
    want = np.asarray(xg.linear(x, weight))
    x, weight = devices.shard(mesh, x, *of_x), devices.shard(mesh, weight, *of_weight)
    shape = (rows // 2, 64) if of_x == ("tp",) else (rows, 32) if of_weight == ("tp",) else (rows, 64)
    for call in (xg.linear, jax.jit(xg.linear)):
        got = call(x, weight)
        assert got.sharding.shard_shape(got.shape) == shape
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [8, 72])
@pytest.mark.parametrize("of_x", [("tp",), (None, "tp")])
@pytest.mark.parametrize("of_weight", [("tp",), (None, "tp")])
def test_gradients_of_products_of_operands_divided_anyhow(rows, of_x, of_weight):
    mesh = explicit(devices.mesh("cpu", tp=2))
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(jax.numpy.bfloat16) for shape in ((rows, 64), (64, 64)))

    def loss(x, weight):
        return (xg.linear(x, weight).astype(jax.numpy.float32) ** 2).sum()

    want = jax.grad(loss, (0, 1))(x, weight)
    with jax.set_mesh(mesh):
        divided = devices.shard(mesh, x, *of_x), devices.shard(mesh, weight, *of_weight)
        gradients = jax.jit(jax.grad(loss, (0, 1)))(*divided)
    for got, wanted, operand in zip(gradients, want, divided, strict=True):
        assert got.sharding.shard_shape(got.shape) == operand.sharding.shard_shape(operand.shape)
        got, wanted = (np.asarray(array, np.float32) for array in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


def test_without_set_mesh():
    """Arrays that were placed have types with their mesh: of JAX's operations, and of these."""
    mesh = explicit(devices.mesh("cpu", tp=2))
    rng = np.random.default_rng(0)
    rows, weight, wide = (rng.standard_normal(shape).astype(np.float32) for shape in ((72, 64), (64, 64), (128, 64)))
    rows = devices.shard(mesh, rows, "tp")

    def layer(x):
        return xg.gated_mlp(xg.rms_norm(x, np.ones(64, np.float32), eps=1e-5), wide, weight, residual=x)

    want = np.asarray(jax.jit(layer)(np.asarray(rows)))
    gradient = jax.jit(jax.grad(lambda x: layer(x).sum()))
    for call in (layer, jax.jit(layer), gradient):
        if call is gradient and jax.__version_info__ < (0, 7, 2):
            continue  # refuses the rule of jax.custom_jvp on sharded arrays
        got = call(rows)
        assert got.sharding.shard_shape(got.shape) == (36, 64)
    np.testing.assert_allclose(np.asarray(layer(rows)), want, rtol=1e-5, atol=1e-5)
    other = devices.shard(explicit(devices.mesh("cpu", dp=2)), np.ones(64, np.float32), "dp")
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected an array over the mesh of x, {'tp': 2}, got one"):
        jax.jit(lambda x, weight: xg.rms_norm(x, weight, eps=1e-5))(rows, other)


def test_gradients_are_named():
    mesh = explicit(devices.mesh("cpu", tp=2))
    logits, zeros = np.ones((8, 64), np.float32), np.zeros(8, np.int32)
    options = dict.fromkeys(("temperature", "top_p", "min_p"), np.ones(8, np.float32))
    options |= dict.fromkeys(("top_k", "seed", "step"), zeros)
    with set_mesh(mesh), pytest.raises(ValueError, match="sample has no gradient"):
        jax.grad(lambda logits: xg.sample(logits, **options)[1].sum())(devices.shard(mesh, logits, "tp"))


def layer_loss(x, weight, wide, narrow):
    x = xg.rms_norm(x, weight, eps=1e-5, residual=x)[0]
    x = xg.simple_add(xg.silu_and_mul(xg.linear(x, wide)), x)
    return jax.numpy.square(xg.gated_mlp(x, wide, narrow, norm_weight=weight, residual=x)).sum()


@pytest.mark.skipif(jax.__version_info__ < (0, 7, 2), reason="refuses the rule of jax.custom_jvp on sharded arrays")
@pytest.mark.parametrize("types", ["explicit", "auto"])
def test_gradients_of_sharded_arrays(types):
    """Under jax.jit, and of arrays that are a device's own in jax.shard_map: those of one device."""
    mesh = devices.mesh("cpu", tp=2)
    mesh = explicit(mesh) if types == "explicit" else mesh
    rng = np.random.default_rng(0)
    x, wide, narrow = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (128, 64), (64, 64)))
    weights = np.linspace(0.5, 1.5, 64, dtype=np.float32), wide / 8, narrow / 8
    of_all = jax.grad(layer_loss, (0, 1, 2, 3))
    want = jax.jit(of_all)(x, *weights)

    def close(got):
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-4, atol=1e-4 * np.abs(w).max())

    with set_mesh(mesh) if types == "explicit" else contextlib.nullcontext():
        close(jax.jit(of_all)(devices.shard(mesh, x, "tp"), *weights))
    if types == "auto":
        specs = (P("tp"), P(), P(), P())
        shards = jax.shard_map(of_all, mesh=mesh, in_specs=specs, out_specs=specs)
        close(jax.jit(shards)(x, *weights))


def test_another_mesh_is_named():
    mesh, other = explicit(devices.mesh("cpu", tp=2)), explicit(devices.mesh("cpu", rows=2))
    x = devices.shard(other, np.ones((8, 64), np.float32), "rows")
    text = r"silu_and_mul: x: expected an array over the mesh of jax.set_mesh, .*'tp': 2.*, got one over .*'rows': 2"
    with set_mesh(mesh), pytest.raises(ValueError, match=text):
        xg.silu_and_mul(x)
