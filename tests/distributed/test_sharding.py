"""Plain jax.jit over sharded arrays: each device computes its share, with the bits of one device; the optimised HLO
holds no collective and no copy of the cache, and the donated cache is updated in place."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import cases, compare, grouped_cases, layer_cases
from tests.distributed import devices

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
P = jax.sharding.PartitionSpec

CASE = cases.AttentionCase("sharded", ((1, 20), (4, 9), (7, 7)), num_heads=16, num_kv_heads=4, page_size=8)
COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
# (platform, devices): two GPUs are all that some machines have.
PLACES = [pytest.param("cpu", 4, id="cpu-4"), pytest.param("cuda", 2, id="cuda-2", marks=pytest.mark.gpu)]


@pytest.fixture(params=["shardy", "gspmd"], autouse=True)
def partitioner(request):
    """JAX's two ways to divide a program."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)


def cache_spec(layout: str, axis="tp"):
    return P(None, None, axis, None) if layout == "combined" else P(None, None, None, axis, None)


def step(query, key, value, cache, slots, metadata, scales):
    cache_scales = {name: scales[name] for name in ("k_scale", "v_scale") if name in scales}
    cache = xg.reshape_and_cache(key, value, cache, slots, **cache_scales)
    out, lse = xg.paged_attention_with_lse(query, cache, **metadata, scale=0.125, soft_cap=20.0, **scales)
    return out, lse, cache


def arguments(case: cases.AttentionCase) -> tuple:
    arrays = cases.build(case, poison=False).arrays()
    rng = cases.rng_for("sharded key and value")
    shape = (case.num_tokens, case.num_kv_heads, case.head_dim)
    key, value = (rng.standard_normal(shape).astype(arrays["query"].dtype) for _ in range(2))
    slots = rng.permutation(16)[: case.num_tokens - 3].astype(np.int32)
    metadata = {n: arrays[n] for n in ("context_lens", "block_tables", "query_start_loc", "num_seqs")}
    scales = {n: arrays[n] for n in ("k_scale", "v_scale", "sinks") if n in arrays}
    return arrays["query"], key, value, arrays["kv_cache"], slots, metadata, scales


def placed(mesh, layout: str, args: tuple, axis="tp") -> tuple:
    """By heads; what all devices need, everywhere."""
    query, key, value, cache, slots, metadata, scales = args
    heads = (None, axis, None)
    per_head = {name: (axis,) if len(x) > 1 else () for name, x in scales.items()}
    return (
        devices.shard(mesh, query, *heads),
        devices.shard(mesh, key, *heads),
        devices.shard(mesh, value, *heads),
        devices.shard(mesh, cache, *cache_spec(layout, axis)),
        devices.shard(mesh, slots),
        {name: devices.shard(mesh, x) for name, x in metadata.items()},
        {name: devices.shard(mesh, x, *per_head[name]) for name, x in scales.items()},
    )


VARIANTS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "sinks": True},
    "float8, a scale": {"dtype": "bfloat16", "cache_dtype": "float8_e4m3fn", "scales": "one"},
    "float8, scales by head": {"cache_dtype": "float8_e5m2", "scales": "per_head", "sinks": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["combined", "split"])
@pytest.mark.parametrize(("platform", "count"), PLACES)
def test_attention_and_cache_by_heads(platform, count, layout, variant):
    case = CASE.but(layout=layout, **VARIANTS[variant])
    args = arguments(case)
    mesh = devices.mesh(platform, tp=count)
    with jax.default_device(mesh.devices.flat[0]):
        want = [np.asarray(x) for x in jax.jit(step)(*args)]
    sharded = placed(mesh, layout, args)
    compiled = jax.jit(step, donate_argnums=3).lower(*sharded).compile()
    text = compiled.as_text()
    assert not re.findall(COLLECTIVES, text)
    local = [n // count if i == len(args[3].shape) - 2 else n for i, n in enumerate(args[3].shape)]
    shape = re.escape(f"[{','.join(map(str, local))}]")
    # (A float8 cache without scales by head is the same: whatever makes one of the cache's shape is the handler's.)
    assert not re.findall(rf"= \w+{shape}\S* (copy|fusion|dynamic-slice)\(", text)
    assert re.search(rf"= \w+{shape}\S* custom-call\(.*output_to_operand_aliasing=", text)
    out = compiled(*sharded)
    for name, got, expected in zip(("out", "lse", "cache"), out, want, strict=True):
        compare.assert_bitwise_equal(np.asarray(got), expected, name)
    assert sharded[3].is_deleted()
    assert out[0].sharding.shard_shape(out[0].shape)[1] == case.num_heads // count


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_only_some_mesh_axes(platform):
    """Replicated over dp, by heads over tp."""
    mesh = devices.mesh(platform, dp=2, tp=2)
    args = arguments(CASE)
    want = [np.asarray(x) for x in jax.jit(step)(*args)]
    for axis in ("tp", ("dp", "tp")):
        out = jax.jit(step)(*placed(mesh, "combined", args, axis))
        for got, expected in zip(out, want, strict=True):
            compare.assert_bitwise_equal(np.asarray(got), expected, str(axis))


def test_outside_of_jit():
    mesh = devices.mesh("cpu", tp=4)
    args = arguments(CASE)
    *_, want = step(*args)
    sharded = placed(mesh, "combined", args)
    *_, cache = step(*sharded)
    compare.assert_bitwise_equal(np.asarray(cache), np.asarray(want), "cache")
    assert cache.sharding.shard_shape(cache.shape)[2] == cache.shape[2] // 4


def test_query_follows_the_cache():
    """A query that arrives in one piece is cut, one that is cut by tokens is gathered; the cache stays."""
    mesh = devices.mesh("cpu", tp=2)
    args = arguments(CASE.but(padding_tokens=2))
    want, *_ = (np.asarray(x) for x in jax.jit(step)(*args))
    for spec in ((), ("tp",)):
        sharded = list(placed(mesh, "combined", args))
        sharded[0] = devices.shard(mesh, args[0], *spec)
        compiled = jax.jit(step).lower(*sharded).compile()
        compare.assert_bitwise_equal(np.asarray(compiled(*sharded)[0]), want, str(spec))
        assert not re.findall(r"= \w+\[\d+,8,8,64\]\S* all-gather\(", compiled.as_text())


def test_inside_shard_map_and_scan():
    """The same call where devices are programmed one by one, and where the cache is a loop's carry."""
    mesh = devices.mesh("cpu", tp=4)
    args = arguments(CASE)
    metadata = args[5]
    want = [np.asarray(x) for x in jax.jit(step)(*args)]
    heads, whole = P(None, "tp", None), P()
    in_specs = (heads, heads, heads, cache_spec("combined"), whole, dict.fromkeys(metadata, whole), {})
    out_specs = (heads, P(None, "tp"), cache_spec("combined"))
    for check_vma in (True, False):
        mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        for got, expected in zip(jax.jit(mapped)(*args), want, strict=True):
            compare.assert_bitwise_equal(np.asarray(got), expected, f"check_vma={check_vma}")

    def loop(query, key, value, cache, slots, metadata):
        def body(cache, _):
            out, _, cache = step(query, key, value, cache, slots, metadata, {})
            return cache, out

        return jax.lax.scan(body, cache, length=3)

    sharded = placed(mesh, "combined", args)[:6]
    compiled = jax.jit(loop, donate_argnums=3).lower(*sharded).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    _, outs = compiled(*sharded)
    compare.assert_bitwise_equal(np.asarray(outs[2]), want[0], "the third step")


def test_ragged_paged_attention_by_heads():
    mesh = devices.mesh("cpu", tp=4)
    query, _, _, cache, _, metadata, _ = args = arguments(CASE)
    order = ("context_lens", "block_tables", "query_start_loc", "num_seqs")

    def attend(query, cache, metadata):
        return xg.ragged_paged_attention(query, cache, *(metadata[n] for n in order), sm_scale=0.1, v_scale=2.0)

    sharded = placed(mesh, "combined", args)
    compiled = jax.jit(attend).lower(sharded[0], sharded[3], sharded[5]).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    got = compiled(sharded[0], sharded[3], sharded[5])
    compare.assert_bitwise_equal(np.asarray(got), np.asarray(jax.jit(attend)(query, cache, metadata)), "out")


@pytest.mark.parametrize("spec", [("tp",), (None, "tp"), ("dp", "tp")], ids=str)
def test_states_by_tokens_and_heads(spec):
    mesh = devices.mesh("cpu", dp=2, tp=2)
    rng = cases.rng_for("states")
    a, b = (rng.standard_normal((6, 4, 16)).astype(np.float32) for _ in range(2))
    la, lb = (rng.standard_normal((6, 4)).astype(np.float32) for _ in range(2))
    want = [np.asarray(x) for x in xg.merge_attention_states(a, la, b, lb)]
    sharded = [devices.shard(mesh, x, *spec) for x in (a, la, b, lb)]
    compiled = jax.jit(xg.merge_attention_states).lower(*sharded).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    for got, expected in zip(compiled(*sharded), want, strict=True):
        compare.assert_bitwise_equal(np.asarray(got), expected, str(spec))


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


@pytest.mark.parametrize("spec", [(None, "tp"), ("dp", "tp")], ids=str)
def test_bidirectional_attention_by_heads(spec):
    """Heads over devices; tokens are gathered, of which a sequence needs all."""
    mesh = devices.mesh("cpu", dp=2, tp=2)
    arrays, options = layer_cases.bidirectional("sharded", (20, 1, 9), padding=(1, 1))
    attend = jax.jit(lambda arrays: xg.bidirectional_attention(**arrays, **options))
    want = np.asarray(attend(arrays))
    placed = {n: devices.shard(mesh, x, *(spec if x.ndim == 3 else ())) for n, x in arrays.items()}
    compiled = attend.lower(placed).compile()
    collectives = {kind for kind, *_ in re.findall(COLLECTIVES, compiled.as_text())}
    assert collectives == ({"all-gather"} if spec[0] else set())
    got = compiled(placed)
    assert got.sharding.shard_shape(got.shape)[1] == 2
    compare.assert_bitwise_equal(np.asarray(got), want, str(spec))


def test_mla_attention_by_heads():
    """Over both axes of a mesh; test_mla_attention.py has the rest, and concat_and_cache_mla."""
    mesh = devices.mesh("cpu", dp=2, tp=2)
    arrays, options = layer_cases.latent_attention("sharded", ((1, 20), (3, 9)), num_heads=64)
    attend = jax.jit(lambda arrays: xg.mla_attention(**arrays, **options))
    want = np.asarray(attend(arrays))
    placed = {n: devices.shard(mesh, x, *((None, ("dp", "tp")) if n == "query" else ())) for n, x in arrays.items()}
    compiled = attend.lower(placed).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    got = compiled(placed)
    assert got.sharding.shard_shape(got.shape)[1] == 16
    compare.assert_bitwise_equal(np.asarray(got), want, "mla_attention")


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


def test_sums_by_any_dimension():
    mesh = devices.mesh("cpu", dp=2, tp=2)
    a = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
    for spec in (("tp",), (None, "dp"), ("dp", None, "tp"), (("dp", "tp"),)):
        compiled = jax.jit(xg.simple_add).lower(*[devices.shard(mesh, a, *spec)] * 2).compile()
        assert not re.findall(COLLECTIVES, compiled.as_text())
        np.testing.assert_array_equal(np.asarray(compiled(*[devices.shard(mesh, a, *spec)] * 2)), a + a)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (("tp",), r"no shards of an axis that every device needs whole, got axis 0 of float32\[\d+, 8, 4, 64\]"),
        ((None, "tp"), "no shards of an axis that every device needs whole, got axis 1"),
        ((None, None, None, "tp"), "no shards of an axis that every device needs whole, got axis 3"),
        ((None, None, "tp"), "a number of shards that divides kv_heads = 2, got axis 2"),
    ],
    ids=str,
)
def test_a_sharding_without_sense_is_named(spec, text):
    mesh = devices.mesh("cpu", tp=4)
    case = CASE.but(num_kv_heads=2)
    args = arguments(case)
    sharded = [devices.shard(mesh, args[0]), devices.shard(mesh, args[3][:8], *spec), args[5]]

    def attend(query, cache, metadata):
        return xg.paged_attention(query, cache, **metadata, scale=0.1)

    with pytest.raises(
        Exception, match=rf"paged_attention: kv_cache: expected {text}.* in 4 shards over mesh axis 'tp'"
    ):
        jax.jit(attend)(*sharded)


def test_half_a_group_of_query_heads_is_named():
    """Query heads over more devices than there are kv heads."""
    mesh = devices.mesh("cpu", tp=4)
    args = arguments(CASE.but(num_kv_heads=2))

    def attend(query, cache, metadata):
        return xg.paged_attention(query, cache, **metadata, scale=0.1)

    with pytest.raises(
        Exception, match=r"paged_attention: query: expected a number of shards that divides kv_heads = 2"
    ):
        jax.jit(attend)(devices.shard(mesh, args[0], None, "tp"), devices.shard(mesh, args[3]), args[5])


def test_vmap_over_sharded_arrays():
    mesh = devices.mesh("cpu", tp=2)
    a = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    out = jax.jit(jax.vmap(xg.simple_add))(devices.shard(mesh, a, None, "tp"), a)
    np.testing.assert_array_equal(np.asarray(out), a + a)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_axes_of_size_one(platform):
    """One kv head, one group of features: nothing to divide there, whatever the size of the dimensions."""
    mesh = devices.mesh(platform, tp=2)
    args = arguments(CASE.but(num_heads=8, num_kv_heads=1))
    want = [np.asarray(x) for x in jax.jit(step)(*args)]
    everywhere = jax.tree.map(lambda array: devices.shard(mesh, array), args)
    for got, expected in zip(jax.jit(step)(*everywhere), want, strict=True):
        compare.assert_bitwise_equal(np.asarray(got), expected, "one kv head")
    x, weight = np.ones((8, 128), np.float32), np.eye(16, 128, dtype=np.float32)
    sums = jax.jit(xg.linear)(devices.shard(mesh, x, "tp"), devices.shard(mesh, weight))
    np.testing.assert_array_equal(np.asarray(sums), x @ weight.T)
    assert sums.sharding.shard_shape(sums.shape) == (4, 16)


def test_arrays_of_several_devices_are_named():
    mesh = devices.mesh("cpu", tp=2)
    x, other = (jax.device_put(np.ones((3, 4), np.float32), device) for device in mesh.devices)
    with pytest.raises(ValueError, match=r"Got argument a of simple_add with shape float32\[3,4\]"):
        xg.simple_add(x, other)
