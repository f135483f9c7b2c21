"""What JAX does with functions: vmap, grad, jit, shapes without values."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, frontends, layer_cases, reference

pytestmark = pytest.mark.frontends("jax", "jax-cuda")
CASE = cases.AttentionCase("jax", ((1, 20), (4, 9)), num_heads=4, num_kv_heads=2, page_size=8)
OPTIONS = {"scale": 0.2, "soft_cap": 5.0}


def stacked(frontend, count=3):
    """`count` batches of one shape, stacked: different values, lengths and pages."""
    import jax

    batches = [cases.build(CASE, seed).arrays() for seed in range(count)]
    for i, b in enumerate(batches):
        b["context_lens"][0] -= i
    return batches, jax.device_put({k: np.stack([b[k] for b in batches]) for k in batches[0]}, frontend.device())


@pytest.mark.parametrize("mapped", ["all", "query", "cache", "metadata"])
def test_vmap_of_attention(frontend, mapped):
    import jax

    import xla_gpu.jax

    batches, stack = stacked(frontend)
    names = {"all": set(stack), "query": {"query"}, "cache": {"kv_cache"}, "metadata": {"context_lens"}}[mapped]
    if mapped in ("query", "cache"):
        for b in batches[1:]:
            b.update({k: batches[0][k] for k in stack if k not in names})
    else:
        for b in batches[1:]:
            b.update({k: v for k, v in batches[0].items() if k not in names})
    if mapped == "cache":  # every batch's cache must be readable by the first one's tables
        for b in batches:
            b["kv_cache"] = np.nan_to_num(b["kv_cache"])
        stack["kv_cache"] = jax.device_put(np.stack([b["kv_cache"] for b in batches]), frontend.device())
    arrays = {k: v if k in names else v[0] for k, v in stack.items()}
    axes = {k: 0 if k in names else None for k in stack}
    attend = functools.partial(_attend, xla_gpu.jax)
    out = jax.jit(jax.vmap(attend, in_axes=(axes,)))(arrays)
    for i, b in enumerate(batches):
        want, _ = reference.paged_attention(**b, **OPTIONS)
        np.testing.assert_allclose(np.asarray(out[i]), want, atol=2e-5, err_msg=f"batch {i}")


def _attend(ops, arrays):
    return ops.paged_attention(**arrays, **OPTIONS)


def test_vmap_of_two_results_and_another_axis(frontend):
    import jax

    import xla_gpu.jax

    batches, stack = stacked(frontend, 2)
    stack["query"] = jax.numpy.moveaxis(stack["query"], 0, 2)
    axes = {k: 2 if k == "query" else 0 for k in stack}
    out, lse = jax.vmap(lambda a: xla_gpu.jax.paged_attention_with_lse(**a, **OPTIONS), in_axes=(axes,))(stack)
    for i, b in enumerate(batches):
        want, want_lse = reference.paged_attention(**b, **OPTIONS)
        np.testing.assert_allclose(np.asarray(out[i]), want, atol=2e-5)
        compare.assert_same_special(np.asarray(lse[i]), want_lse)


def test_vmap_of_the_others(frontend):
    import jax

    import xla_gpu.jax

    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    out = jax.vmap(xla_gpu.jax.simple_add, in_axes=(0, None))(jax.device_put(a, frontend.device()), a[0])
    np.testing.assert_array_equal(np.asarray(out), a + a[0])

    caches = [cache_cases.build_cache(cache_cases.CACHE_CASES[1], seed) for seed in range(3)]
    stack = jax.device_put({k: np.stack([c[k] for c in caches]) for k in caches[0]}, frontend.device())
    stored = jax.jit(jax.vmap(lambda arrays: xla_gpu.jax.reshape_and_cache(**arrays)))(stack)
    for i, c in enumerate(caches):
        compare.assert_bitwise_equal(np.asarray(stored[i]), reference.reshape_and_cache(**c), f"cache {i}")


def test_vmap_of_vmap(frontend):
    import jax

    import xla_gpu.jax

    a = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    out = jax.vmap(jax.vmap(xla_gpu.jax.simple_add))(jax.device_put(a, frontend.device()), a)
    np.testing.assert_array_equal(np.asarray(out), a + a)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vjp"])
def test_derivatives_are_refused_by_name(frontend, transform):
    import jax

    import xla_gpu.jax

    arrays = jax.device_put(cases.build(CASE, poison=False).arrays(), frontend.device())

    def loss(query):
        return xla_gpu.jax.paged_attention(query, **{k: v for k, v in arrays.items() if k != "query"}, **OPTIONS).sum()

    calls = {
        "grad": lambda: jax.grad(loss)(arrays["query"]),
        "jvp": lambda: jax.jvp(loss, (arrays["query"],), (arrays["query"],)),
        "vjp": lambda: jax.vjp(loss, arrays["query"]),
    }
    with pytest.raises(Exception, match=r"paged_attention.*(gradient|derivative|differentia)"):
        calls[transform]()


def test_shapes_without_values(frontend):
    import jax

    import xla_gpu.jax

    out, lse = jax.eval_shape(
        lambda a: xla_gpu.jax.paged_attention_with_lse(**a, **OPTIONS), cases.build(CASE).arrays()
    )
    assert out.shape == (CASE.num_tokens, CASE.num_heads, CASE.head_dim) and lse.shape == out.shape[:2]


def test_numpy_arrays_are_taken(frontend):
    """Outside of jit, as jax.numpy's functions take them."""
    import jax

    import xla_gpu.jax

    inputs = cases.build(CASE)
    with jax.default_device(frontend.device()):
        out = xla_gpu.jax.paged_attention(**inputs.arrays(), **OPTIONS)
    want, _ = reference.paged_attention(**inputs.arrays(), **OPTIONS)
    np.testing.assert_allclose(np.asarray(out), want, atol=2e-5)


def test_inside_control_flow(frontend):
    """A decode loop: the cache is the carry of a scan."""
    import jax

    import xla_gpu.jax

    case = cache_cases.CACHE_CASES[1]
    arrays = cache_cases.build_cache(case)
    slots = np.stack([np.roll(arrays["slot_mapping"], i) for i in range(4)])

    def step(cache, slot_mapping):
        cache = xla_gpu.jax.reshape_and_cache(arrays["key"], arrays["value"], cache, slot_mapping)
        return cache, None

    cache, _ = jax.jit(lambda c, s: jax.lax.scan(step, c, s))(
        *jax.device_put((arrays["kv_cache"], slots), frontend.device())
    )
    want = arrays["kv_cache"]
    for row in slots:
        want = reference.reshape_and_cache(arrays["key"], arrays["value"], want, row)
    compare.assert_bitwise_equal(np.asarray(cache), want, frontend.name)


def test_64_bit_integers_that_jax_would_cut(frontend):
    """Without its switch JAX makes int32 of them: another seed, another slot."""
    import jax

    import xla_gpu.jax

    with jax.default_device(frontend.device()):
        update = cache_cases.build_cache(cache_cases.CACHE_CASES[0])
        slots = update["slot_mapping"].astype(np.int64)
        want = np.asarray(xla_gpu.jax.reshape_and_cache(**update))
        with frontends.enable_x64(False):
            kept = xla_gpu.jax.reshape_and_cache(**(update | {"slot_mapping": slots}))
            compare.assert_bitwise_equal(np.asarray(kept), want, "slots that fit")
            slots[0] = np.iinfo(np.int64).min  # padding, of which 32 bits are slot 0
            with pytest.raises(
                ValueError, match=r"slot_mapping: expected integers of int32, .* got -9223372036854775808"
            ):
                xla_gpu.jax.reshape_and_cache(**(update | {"slot_mapping": slots}))
            sampling = layer_cases.sampling("float32", 3, 50)
            with pytest.raises(
                ValueError, match=r"sample: seed: expected integers .* jax_enable_x64 is set, got 4294967301"
            ):
                xla_gpu.jax.sample(**(sampling | {"seed": np.array([1, 2, 2**32 + 5])}))
        with frontends.enable_x64():
            token, _ = xla_gpu.jax.sample(**(sampling | {"seed": np.array([1, 2, 2**32 + 5])}))
            assert np.asarray(token).min() >= 0


def test_arrays_of_eager_calls_are_freed_with_their_last_name(frontend):
    """And not by Python's next collection of cycles: on a GPU that is memory."""
    import gc
    import weakref

    import jax

    import xla_gpu.jax as xg

    def gradient(x, weight):
        return jax.grad(lambda x: xg.linear(x, weight).astype("float32").sum())(x)

    calls = {
        "rms_norm": lambda x, weight: xg.rms_norm(x, weight[0], eps=1e-5),
        "linear": xg.linear,
        "few rows": lambda x, weight: xg.linear(x[:3], weight),
        "gated_mlp": lambda x, weight: xg.gated_mlp(x, jax.numpy.concatenate([weight, weight]), weight),
        "gradient": gradient,
    }
    alive = []
    gc.collect()
    gc.disable()
    try:
        for name, call in calls.items():
            x, weight = jax.device_put((np.ones((100, 64)), np.ones((64, 64))), frontend.device())
            x, weight = x.astype("bfloat16"), weight.astype("bfloat16")
            arrays = {"x": weakref.ref(x), "weight": weakref.ref(weight)}
            jax.block_until_ready(call(x, weight))
            del x, weight
            alive += [f"{name}: {key}" for key, array in arrays.items() if array() is not None]
    finally:
        gc.enable()
    assert not alive


def test_no_tracer_leaks(frontend):
    import jax

    import xla_gpu.jax as xg

    arrays = cases.build(CASE, poison=False).arrays()
    x = np.ones((100, 64), jax.numpy.bfloat16)
    with jax.checking_leaks(), jax.default_device(frontend.device()):
        jax.jit(lambda arrays: _attend(xg, arrays))(arrays)
        jax.jit(xg.linear)(x, x[:64])
        jax.jit(xg.gated_mlp)(x, np.concatenate([x[:64], x[:64]]), x[:64])
        jax.vmap(lambda x: xg.rms_norm(x, x[0], eps=1e-5))(x[None])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.astype(">f4"), r"got >f4\[3, 64\] of type ndarray"),
        (lambda x: x.astype(object), r"got \|O\[3, 64\] of type ndarray"),
        (lambda x: np.ma.array(x), r"got <f4\[3, 64\] of type MaskedArray"),
    ],
    ids=["bytes", "objects", "masked"],
)
def test_arrays_that_jax_does_not_take_are_named(frontend, make, text):
    import xla_gpu.jax

    with pytest.raises(TypeError, match="rms_norm: x: expected an array that JAX takes, " + text):
        xla_gpu.jax.rms_norm(make(np.ones((3, 64), np.float32)), np.ones(64, np.float32), eps=1e-5)


def test_what_stands_for_an_array_is_taken(frontend):
    """As jax.numpy takes it: parameters of flax.nnx, for example."""
    import jax

    import xla_gpu.jax as xg

    class Parameter:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return self.value

    x, weight = jax.device_put((np.ones((100, 64)), np.eye(64)), frontend.device())
    x, weight = x.astype("bfloat16"), weight.astype("bfloat16")
    for rows in (x, x[:3]):
        np.testing.assert_array_equal(xg.linear(rows, Parameter(weight), residual=Parameter(rows)), rows + rows)
    gated = xg.gated_mlp(x, Parameter(jax.numpy.concatenate([weight, weight])), Parameter(weight))
    assert gated.shape == x.shape
    sequences = x.reshape(4, 25, 64)
    np.testing.assert_array_equal(xg.linear(Parameter(sequences), weight), sequences)
    with pytest.raises(TypeError, match="linear: weight: expected a JAX or NumPy array, got Parameter"):
        xg.linear(x, Parameter([1.0]))


def test_a_donated_array_is_named(frontend):
    import jax

    import xla_gpu.jax

    update = jax.device_put(cache_cases.build_cache(cache_cases.CACHE_CASES[0]), frontend.device())
    cache = update.pop("kv_cache")
    jax.jit(lambda cache: xla_gpu.jax.reshape_and_cache(**update, kv_cache=cache), donate_argnums=0)(cache)
    with pytest.raises(ValueError, match=r"reshape_and_cache: kv_cache: expected an array with memory, got .* donated"):
        xla_gpu.jax.reshape_and_cache(**update, kv_cache=cache)


@pytest.mark.parametrize("layout", ["combined", "split"])
def test_scan_over_layers_updates_one_cache_without_a_copy(frontend, layout):
    """As in docs/guides/jax_serving.md: the pages of all layers in one array, which the scan carries."""
    import re

    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as xg

    count, pages, page_size, heads, head_dim = 3, 8, 4, 2, 16
    first, last = ((), (2 * heads,)) if layout == "combined" else ((2,), (heads,))
    rng = np.random.default_rng(0)
    caches = rng.standard_normal((count, *first, pages, page_size, *last, head_dim)).astype(np.float32)
    cache = np.concatenate(list(caches), axis=len(first))
    x = rng.standard_normal((3, heads, head_dim)).astype(np.float32)
    slots, table = np.array([20, 21, -1], np.int32), np.array([[5]], np.int32)
    batch = np.array([2], np.int32), np.array([0, 2], np.int32), np.array([1], np.int32)

    def layer(x, cache, slots, table):
        lens, start, num_seqs = batch
        cache = xg.reshape_and_cache(x, x, cache, slots)
        return x + xg.paged_attention(x, cache, lens, table, start, num_seqs, scale=0.25), cache

    def body(carry, i):
        own = jnp.where(slots < 0, -1, slots + i * pages * page_size)
        return layer(*carry, own, table + i * pages), None

    step = jax.jit(
        lambda x, cache: jax.lax.scan(body, (x, cache), jnp.arange(count, dtype="int32"))[0], donate_argnums=1
    )
    placed = jax.device_put((x, np.array(cache)), frontend.device())
    compiled = step.lower(*placed).compile()
    sizes = ",".join(map(str, cache.shape))
    assert not re.findall(rf"= f32\[{sizes}\]\S* copy\(", compiled.as_text())
    got, got_cache = compiled(*placed)
    want = x
    for i in range(count):
        want, caches[i] = layer(jax.device_put(want, frontend.device()), caches[i], slots, table)
    compare.assert_bitwise_equal(np.asarray(got), np.asarray(want), "x")
    compare.assert_bitwise_equal(np.asarray(got_cache), np.concatenate(list(caches), axis=len(first)), "cache")


def test_later_eager_calls_find_a_program(frontend, monkeypatch):
    """Of operators that are made of others, where the rows are many."""
    import jax

    import xla_gpu.jax as xg
    from xla_gpu._jax import dense_linear

    x, weight = jax.device_put((np.ones((100, 64), "float32"), np.ones((128, 64), "float32")), frontend.device())
    x, weight = x.astype("bfloat16"), weight.astype("bfloat16")
    many = CASE.but(sequences=((70, 90), (1, 50)), head_dim=64, dtype="bfloat16")
    arrays, options = layer_cases.attention_block(many)
    arrays = jax.device_put(arrays, frontend.device())
    calls = {
        "linear": lambda: xg.linear(x, weight[:64]),
        "activation": lambda: xg.linear(x, weight, activation="silu_and_mul"),
        "gated_mlp": lambda: xg.gated_mlp(x, weight, weight[:64], norm_weight=x[0]),
        "attention_block": lambda: xg.attention_block(**arrays, **options),
    }
    products, name = [], ""
    linear = dense_linear.linear

    def counting(*given):
        products.append(name)
        return linear(*given)

    monkeypatch.setattr(dense_linear, "linear", counting)
    for first in (True, False):
        products.clear()
        for name, call in calls.items():  # noqa: B007 - counting reads it
            call()
        assert set(products) <= (set(calls) if first else set()), products
    name = "under a transformation"
    jax.vmap(lambda x: xg.linear(x, weight))(x[None])
    assert products == [name]


def test_names_of_pytorchs_updates_in_place_lead_to_jaxs(frontend):
    import xla_gpu.jax

    for name in ("rotary_and_cache", "kernel_call"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}_': .* donate .* {name} updates it in place"):
            getattr(xla_gpu.jax, f"{name}_")
    with pytest.raises(AttributeError, match=r"no attribute 'rms_norms'$"):
        _ = xla_gpu.jax.rms_norms
