"""ragged_paged_attention_v3: values and caches, the references of the projects whose call it is, donation, errors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import types

import numpy as np
import pytest

from tests.common import baseline, cases, compare
from tests.frontends import rpa_v3

pytestmark = pytest.mark.frontends("jax", "jax-cuda")
# Without what the interface has no operand for: scales of heads, and a tree_mask.
CASES = tuple(
    c.but(layout="combined") if c.layout == "split" else c
    for c in cases.COMMON
    if c.scales != "per_head" and not c.tree
)
CASE = cases.AttentionCase("v3", ((1, 20), (4, 9), (3, 3)), num_heads=4, num_kv_heads=2, page_size=8)
ODD_HEADS = (
    CASE.but(num_kv_heads=1, dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="one"),  # 2 heads in a pack of 4
    CASE.but(num_kv_heads=3, num_heads=6, dtype="bfloat16", cache_dtype="float8_e5m2", scales="one"),
    CASE.but(head_dim=136, sinks=True),  # padded to 256
    CASE.but(num_kv_heads=1, dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="one", sinks=True),
)


def call(frontend, arrays, **options):
    import jax

    import xla_gpu.jax

    results = xla_gpu.jax.ragged_paged_attention_v3(**jax.device_put(arrays, frontend.device()), **options)
    return tuple(np.asarray(r) for r in results)


def scales(case) -> dict[str, float]:
    inputs = cases.build(case)
    return {} if inputs.k_scale is None else {n: float(getattr(inputs, n)[0]) for n in ("k_scale", "v_scale")}


# ---- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", (*CASES, *ODD_HEADS), ids=lambda c: c.name)
def test_values_and_cache(frontend, case):
    want, want_lse, want_cache = rpa_v3.expected(case)
    base, base_lse = baseline.paged_attention(cases.build(case), **case.options())
    arrays = rpa_v3.build(case)
    out, cache, lse = call(frontend, arrays, return_lse=True, **rpa_v3.options(case), **scales(case))
    compare.assert_close(out, want, base, f"{case.name}: out")
    compare.assert_close(lse, want_lse, base_lse, f"{case.name}: lse")
    assert out.dtype == arrays["queries"].dtype and cache.dtype == arrays["kv_cache"].dtype
    compare.assert_bitwise_equal(cache, rpa_v3.pack(want_cache), f"{case.name}: cache")


def test_without_lse_the_same_bits(frontend):
    arrays = rpa_v3.build(CASE)
    out, cache = call(frontend, arrays, sm_scale=0.3)
    with_lse = call(frontend, arrays, sm_scale=0.3, return_lse=True)
    compare.assert_bitwise_equal(out, with_lse[0], "out")
    compare.assert_bitwise_equal(cache, with_lse[1], "cache")


def test_keys_that_are_in_the_cache_already(frontend):
    arrays = rpa_v3.build(CASE)
    out, cache = call(frontend, arrays, sm_scale=0.3)
    again, same = call(frontend, arrays | {"kv_cache": cache}, sm_scale=0.3, update_kv_cache=False)
    compare.assert_bitwise_equal(again, out, "out")
    compare.assert_bitwise_equal(same, cache, "cache")
    unwritten, _ = call(frontend, arrays, sm_scale=0.3, update_kv_cache=False)
    assert not np.array_equal(unwritten, out)


def test_a_float8_cache_takes_keys_of_the_queries_dtype(frontend):
    """They are stored divided by the scale: the same as quantising outside."""
    case = CASE.but(dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="one")
    arrays, factors = rpa_v3.build(case, poison=False), {"k_scale": 0.5, "v_scale": 2.0}
    wide = {
        "keys": (arrays["keys"].astype(np.float32) * 0.5).astype(arrays["queries"].dtype),
        "values": (arrays["values"].astype(np.float32) * 2.0).astype(arrays["queries"].dtype),
    }
    for a, b in zip(call(frontend, arrays, **factors), call(frontend, arrays | wide, **factors), strict=True):
        compare.assert_bitwise_equal(a, b, "stored quantised and quantised when stored")


def test_scales_of_a_wide_cache_are_factors(frontend):
    arrays = rpa_v3.build(CASE)
    want, _ = call(frontend, arrays, sm_scale=0.3 * 0.5)
    got, _ = call(frontend, arrays, sm_scale=0.3, k_scale=0.5, v_scale=4.0)
    np.testing.assert_allclose(got, want * 4, rtol=1e-5, atol=1e-6)


def test_out_dtype(frontend):
    arrays = rpa_v3.build(CASE)
    want, _ = call(frontend, arrays)
    got, _ = call(frontend, arrays, out_dtype="bfloat16")
    compare.assert_bitwise_equal(got, want.astype(cases.DTYPES["bfloat16"]), "out")


def test_tuning_arguments_change_nothing(frontend):
    arrays, blocks = rpa_v3.build(CASE), (1, 16, 1, 16)
    tuning = {
        **dict.fromkeys(("d_block_sizes", "p_block_sizes", "m_block_sizes"), blocks),
        **dict.fromkeys(("decode_block_sizes", "prefill_block_sizes"), object()),
        **dict.fromkeys(("chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block"), 8),
        **{"vmem_limit_bytes": 2**20, "mask_value": -1e30, "decode_query_size": 4, "debug_mode": True},
        **{"disable_bounds_checks": False, "disable_semaphore_checks": False},
    }
    for a, b in zip(call(frontend, arrays), call(frontend, arrays, **tuning), strict=True):
        compare.assert_bitwise_equal(a, b, "tuned")


@pytest.mark.parametrize("max_seqs", [0, 1])
def test_no_live_sequence(frontend, max_seqs):
    arrays = rpa_v3.build(CASE.but(sequences=(), spare_seqs=max_seqs, padding_tokens=5))
    out, cache = call(frontend, arrays)
    assert not out.any()
    compare.assert_bitwise_equal(cache, arrays["kv_cache"], "cache")


# ---- What others wrote -----------------------------------------------------------------------------------------------


def tpu_inference():
    """Its reference. Importing the package itself would need vLLM, so the modules beside the reference are reached
    through a stand-in for it."""
    if "tpu_inference" not in sys.modules:
        spec = importlib.util.find_spec("tpu_inference")
        if spec is None:
            pytest.skip("tpu_inference is not installed")
        package = types.ModuleType("tpu_inference")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tpu_inference"] = package
    kernel = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    return functools.partial(kernel.ref_ragged_paged_attention, out_dtype="float32"), {}


def ejkernel():
    pytest.importorskip("ejkernel")
    module = importlib.import_module("ejkernel.kernels._pallas.tpu.ragged_page_attention_v3._pallas_impl_fwd")
    names = {"page_indices": "block_tables", "cu_q_lens": "query_start_loc", "attention_sink": "softmax_aux"}
    names |= {"sm_scale": "softmax_scale", "soft_cap": "logits_soft_cap"}
    return module.ref_ragged_paged_attention, names


def tokamax():
    pytest.importorskip("tokamax")
    module = pytest.importorskip("tokamax._src.ops.batched_rpa.reference")

    def reference(*, kv_cache, **arguments):
        flat = kv_cache.reshape(*kv_cache.shape[:2], -1, kv_cache.shape[-1])
        out, cache = module.batched_ragged_paged_attention_reference(kv_cache=flat, **arguments)
        return out, cache.reshape(kv_cache.shape)

    return reference, {}


THEIRS = (
    CASE,
    CASE.but(num_kv_heads=4, head_dim=128, dtype="bfloat16", sliding_window=6),
    CASE.but(soft_cap=5.0, sliding_window=7, head_dim=256),
    CASE.but(sinks=True, head_dim=128),
    CASE.but(num_heads=16, num_kv_heads=2, dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="one"),
)


@pytest.mark.parametrize("theirs", [tpu_inference, ejkernel, tokamax])
@pytest.mark.parametrize("case", THEIRS, ids=lambda c: c.name)
def test_agrees_with_the_reference_of(frontend, theirs, case):
    import jax

    reference, names = theirs()
    if case.sinks and theirs is not ejkernel:
        pytest.skip("this reference has no sinks")
    if case.sliding_window is not None and theirs is ejkernel:
        pytest.skip("this reference asks for a TPU's block sizes where there is a window")
    if case.scales is not None and theirs is tokamax:
        pytest.skip("this reference divides by the scales where the kernels multiply")
    case = case.but(padding_tokens=0)
    arrays = rpa_v3.build(case, poison=False)
    options = rpa_v3.options(case) | scales(case)
    out, cache = call(frontend, arrays, **options)
    renamed = {names.get(name, name): x for name, x in (jax.device_put(arrays) | options).items()}
    with jax.default_matmul_precision("highest"):
        their_out, their_cache = (np.asarray(x) for x in reference(**renamed))
    want, _, _ = rpa_v3.expected(case)
    np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(their_cache, np.float32))
    # As close to the float64 reference as theirs.
    compare.assert_close(out.astype(np.float32), want, their_out.astype(np.float32), theirs.__name__)


# ---- In place --------------------------------------------------------------------------------------------------------


def test_the_cache_given_is_gone(frontend):
    import jax

    import xla_gpu.jax

    arrays = jax.device_put(rpa_v3.build(CASE), frontend.device())
    xla_gpu.jax.ragged_paged_attention_v3(**arrays)
    assert arrays["kv_cache"].is_deleted() and not arrays["queries"].is_deleted()


@pytest.mark.parametrize("case", [CASE.but(head_dim=128), CASE.but(dtype="bfloat16")], ids=lambda c: c.name)
def test_no_copy_of_the_cache(frontend, case):
    """Three layers in one program: besides names for memory that is there, nothing has a cache's size."""
    import jax

    import xla_gpu.jax

    arrays = jax.device_put(rpa_v3.build(case), frontend.device())
    cache = arrays.pop("kv_cache")

    def step(caches, arrays):
        updated = []
        for layer in caches:
            out, layer = xla_gpu.jax.ragged_paged_attention_v3(kv_cache=layer, **arrays)
            arrays, updated = arrays | {"queries": out}, [*updated, layer]
        return out, updated

    def makers(step) -> tuple[str, list[str]]:
        text = step.lower([cache] * 3, arrays).compile().as_text()
        elements = cache.size
        found = []
        for line in text.splitlines():
            instruction = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
            if instruction and instruction[2] not in ("parameter", "get-tuple-element", "bitcast", "custom-call"):
                sizes = [int(n) for n in instruction[1].split(",") if n]
                found += [line.strip()[:160]] if int(np.prod(sizes)) == elements else []
        return text, found

    text, found = makers(jax.jit(step, donate_argnums=0))
    assert found == []
    assert text.count('custom_call_target="xla_gpu_reshape_and_cache"') == 3
    assert len(re.findall(r"\{[\d, ]*\}: \(\d+, \{\}", text.splitlines()[0])) >= 3
    _, copies = makers(jax.jit(step))  # the reader sees copies where there are some
    assert copies


# ---- Errors ----------------------------------------------------------------------------------------------------------


def but(name, change):
    return lambda arrays, options: arrays.update({name: change(arrays[name])})


def option(name, value):
    return lambda arrays, options: options.update({name: value})


BAD = [
    ("queries", TypeError, "dtype float32 or .*got int32", but("queries", lambda x: np.zeros(x.shape, np.int32))),
    ("queries", ValueError, "rank 3", but("queries", lambda x: x[0])),
    ("queries", ValueError, "head_dim a multiple of 8", but("queries", lambda x: x[..., :5])),
    ("queries", ValueError, "num_heads a multiple of num_kv_heads = 2", but("queries", lambda x: x[:, :3])),
    ("keys", TypeError, "dtype float32 .*got float16", but("keys", lambda x: x.astype(np.float16))),
    ("keys", ValueError, "shape", but("keys", lambda x: x[1:])),
    ("values", TypeError, "dtype float32 .as keys.", but("values", lambda x: x.astype(np.float16))),
    ("values", ValueError, "shape", but("values", lambda x: x[:, :1])),
    ("kv_cache", TypeError, "dtype float32", but("kv_cache", lambda x: x.astype(np.float16))),
    ("kv_cache", ValueError, r"shape \[num_pages, page_size, 4, 1, 128\], got", but("kv_cache", lambda x: x[..., :64])),
    ("kv_cache", ValueError, "shape", but("kv_cache", lambda x: x[..., 0])),
    ("kv_lens", TypeError, "dtype int32", but("kv_lens", lambda x: x.astype(np.float32))),
    ("kv_lens", ValueError, "rank 1", but("kv_lens", lambda x: x[None])),
    ("page_indices", ValueError, "a multiple of max_seqs = 5 entries", but("page_indices", lambda x: x[1:])),
    ("page_indices", ValueError, "rank 1", but("page_indices", lambda x: x.reshape(5, -1))),
    ("cu_q_lens", ValueError, r"shape \[6\]", but("cu_q_lens", lambda x: x[1:])),
    ("distribution", ValueError, r"shape \[3\]", but("distribution", lambda x: x[:1])),
    ("distribution", TypeError, "JAX or NumPy array, got list", but("distribution", list)),
    ("attention_sink", ValueError, r"shape \[4\]", option("attention_sink", np.zeros(3, np.float32))),
    ("sm_scale", TypeError, "a number known when the call is traced", option("sm_scale", np.zeros(1))),
    ("sm_scale", ValueError, "finite", option("sm_scale", float("nan"))),
    ("sliding_window", ValueError, "an int >= 1, got 0", option("sliding_window", 0)),
    ("soft_cap", ValueError, "or None for no soft cap, got 0", option("soft_cap", 0.0)),
    ("q_scale", ValueError, "> 0, got 0", option("q_scale", 0.0)),
    ("k_scale", ValueError, "> 0, got -1", option("k_scale", -1.0)),
    ("v_scale", TypeError, "a number", option("v_scale", "1")),
    ("out_dtype", TypeError, "float32 or float16 or bfloat16, got int8", option("out_dtype", np.int8)),
    ("use_causal_mask", ValueError, "True", option("use_causal_mask", False)),
    ("skip_kv_mask", ValueError, "False", option("skip_kv_mask", True)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "error", "expected", "change"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)]
)
def test_wrong_arguments(frontend, argument, error, expected, change):
    import xla_gpu.jax

    arrays, options = rpa_v3.build(CASE), {}
    change(arrays, options)
    with pytest.raises(error, match=rf"^ragged_paged_attention_v3: {argument}: expected .*{expected}"):
        xla_gpu.jax.ragged_paged_attention_v3(**arrays, **options)


@pytest.mark.parametrize("page", [2**30, 1000, -7])
@pytest.mark.frontends("jax")
def test_a_page_that_the_cache_does_not_have(frontend, page):
    arrays = rpa_v3.build(CASE)
    arrays["page_indices"][0] = page
    with pytest.raises(Exception, match=r"reshape_and_cache|paged_attention"):
        call(frontend, arrays)


@pytest.mark.parametrize("page", [2**30, 1000, -7])
@pytest.mark.frontends("jax-cuda")
def test_a_wrong_page_harms_its_own_sequence_alone_on_cuda(frontend, page):
    arrays = rpa_v3.build(CASE)
    want, want_cache = call(frontend, arrays)
    wrong = arrays["page_indices"].copy()
    wrong[0] = page
    out, cache = call(frontend, arrays | {"page_indices": wrong})
    assert np.isnan(out[0]).all()
    compare.assert_bitwise_equal(out[1:], want[1:], "other sequences")
    good = [p for p in range(cache.shape[0]) if p not in arrays["page_indices"][:3]]
    compare.assert_bitwise_equal(cache[good], want_cache[good], "pages of others")


def test_checked_inputs_are_another_program(frontend, monkeypatch):
    import jax

    import xla_gpu.jax

    arrays = rpa_v3.build(CASE)
    texts = []
    for value in ("0", "1", "0"):
        monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", value)
        call = jax.jit(lambda arrays: xla_gpu.jax.ragged_paged_attention_v3(**arrays))
        texts.append(set(re.findall(r"check_inputs = (\w+)", call.lower(arrays).as_text())))
    assert texts == [{"false"}, {"true"}, {"false"}]
