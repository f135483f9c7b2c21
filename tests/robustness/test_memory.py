"""What buffers held before a call never shows, and nothing is written beside them: results, scratch and operands as XLA
or an allocator may hand them over, with canaries around each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, layer_cases, reference
from tests.robustness import memory

pytest.importorskip("torch")
pytestmark = pytest.mark.frontends("eager", "eager-cuda")

NAMES = {case.name: case for case in (*cases.COMMON, *cases.MORE)}
ATTENTION = [
    *cases.COMMON,
    *(
        NAMES[name]
        for name in (
            *("no-live-sequence", "only-empty-sequences", "no-padding-at-all", "much-padding", "long-tail-of-lengths"),
            *("prefill-behind-long-context", "everything-at-once", "one-token-one-key", "gemma-2b-head-256"),
        )
    ),
]


@pytest.mark.parametrize("garbage", memory.GARBAGE)
@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention(frontend, case, garbage):
    arrays = cases.build(case).arrays()
    want = frontend.call("paged_attention_with_lse", arrays, **case.options())
    got = memory.run(frontend, "paged_attention_with_lse", arrays, case.options(), garbage=garbage)
    for name, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {case.name} {garbage}: {name}")


@pytest.mark.parametrize("garbage", memory.GARBAGE)
@pytest.mark.parametrize("case", cache_cases.CACHE_CASES, ids=lambda case: case.name)
def test_update(frontend, case, garbage):
    arrays = cache_cases.build_cache(case)
    want = reference.reshape_and_cache(**arrays)
    for alias in (True, False):
        (cache,) = memory.run(frontend, "reshape_and_cache", arrays, garbage=garbage, alias=alias)
        compare.assert_bitwise_equal(cache, want, f"{frontend.name} {case.name} {garbage} alias={alias}")


@pytest.mark.parametrize("slots", ["past", "far", "mixed"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_update_with_slots_outside_the_cache(frontend, slots, dtype):
    """Nothing beside the cache is touched. On the host nothing in it either; on CUDA the good slots are stored."""
    case = cache_cases.CacheCase("outside", slot_dtype=dtype, skipped=0, cache_dtype="float8_e4m3fn", scales="one")
    arrays = cache_cases.build_cache(case)
    size = case.num_pages * case.page_size
    wide = {"int32": [2**31 - 1, -(2**31)], "int64": [2**40 + 17, 2**63 - 1, -(2**63), 2**32, 2**32 + 1]}[dtype]
    bad = {"past": [size, size + 1], "far": wide, "mixed": [size, *wide, -1]}[slots]
    places = cases.rng_for("places").permutation(case.num_tokens)[: len(bad)]
    arrays["slot_mapping"][places] = bad
    kept = arrays["slot_mapping"].copy()
    kept[kept >= size] = -1
    if frontend.platform == "host":
        with pytest.raises(ValueError, match=r"reshape_and_cache: slot_mapping\[\d+\]"):
            memory.run(frontend, "reshape_and_cache", arrays)
        return
    (cache,) = memory.run(frontend, "reshape_and_cache", arrays)
    compare.assert_bitwise_equal(
        cache, reference.reshape_and_cache(**(arrays | {"slot_mapping": kept})), f"{frontend.name} {slots}"
    )


@pytest.mark.parametrize("garbage", memory.GARBAGE)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_merge_and_add(frontend, dtype, garbage):
    rng = cases.rng_for(f"memory {dtype}")
    x, y = (rng.standard_normal((7, 3, 40)).astype(cases.DTYPES[dtype]) for _ in range(2))
    lse_a, lse_b = (rng.standard_normal((7, 3)).astype(np.float32) for _ in range(2))
    lse_a[2], lse_b[3], lse_a[4], lse_b[4] = (-np.inf,) * 4
    for operator, arrays in (
        ("simple_add", {"a": x, "b": y}),
        ("merge_attention_states", {"out_a": x, "lse_a": lse_a, "out_b": y, "lse_b": lse_b}),
    ):
        want = frontend.call(operator, arrays)
        for g, w in zip(memory.run(frontend, operator, arrays, garbage=garbage), want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {operator} {garbage}")


@pytest.mark.parametrize("garbage", memory.GARBAGE)
@pytest.mark.parametrize("operator", layer_cases.NAMES)
def test_layer(frontend, operator, garbage):
    """rms_norm, silu_and_mul, rotary_embedding, sample, linear, grouped_linear, gated_mlp, attention_block,
    bidirectional_attention, mla_attention, concat_and_cache_mla."""
    arrays, options = layer_cases.samples()[operator]
    want = frontend.call(operator, arrays, **options)
    for i, (g, w) in enumerate(
        zip(memory.run(frontend, operator, arrays, options, garbage=garbage), want, strict=True)
    ):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {operator} {garbage}: result {i}")


WRONG = {
    "page": lambda inputs: inputs.block_tables.__setitem__((1, 0), 2**31 - 1),
    "context": lambda inputs: inputs.context_lens.__setitem__(1, 2**31 - 1),
    "starts": lambda inputs: inputs.query_start_loc.__setitem__(2, 2**31 - 1),
    "starts-below": lambda inputs: inputs.query_start_loc.__setitem__(1, -(2**31)),
    "num_seqs": lambda inputs: inputs.num_seqs.__setitem__(0, 2**31 - 1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("sequences", [((1, 30), (2, 40), (1, 9)), ((20, 30), (33, 40), (9, 9))], ids=["few", "many"])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_wrong_metadata_writes_nothing_outside(frontend, dtype, sequences, wrong):
    case = cases.AttentionCase("outside", sequences, num_heads=4, num_kv_heads=2, page_size=8, dtype=dtype)
    inputs = cases.build(case)
    WRONG[wrong](inputs)
    if frontend.platform == "host":
        with pytest.raises(ValueError, match="paged_attention"):
            memory.run(frontend, "paged_attention", inputs.arrays(), case.options())
    else:
        (out,) = memory.run(frontend, "paged_attention", inputs.arrays(), case.options(), garbage="zeros")
        assert np.isnan(out.astype(np.float32)).any()


@pytest.mark.parametrize("wrong", ["starts", "starts-below", "num_seqs"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_wrong_metadata_of_bidirectional_attention_writes_nothing_outside(frontend, dtype, window, wrong):
    arrays, options = layer_cases.bidirectional("outside", (70, 5, 9), dtype=dtype, sliding_window=window)
    argument, place, value = {
        "starts": ("query_start_loc", 2, 2**31 - 1),
        "starts-below": ("query_start_loc", 1, -(2**31)),
        "num_seqs": ("num_seqs", 0, 2**31 - 1),
    }[wrong]
    arrays[argument][place] = value
    if frontend.platform == "host":
        with pytest.raises(ValueError, match=f"bidirectional_attention: {argument}"):
            memory.run(frontend, "bidirectional_attention", arrays, options)
    else:
        (out,) = memory.run(frontend, "bidirectional_attention", arrays, options, garbage="zeros")
        assert np.isnan(out.astype(np.float32)).all()


def test_canaries_sing(frontend):
    """The check itself: a byte beside a buffer is found."""
    space = memory.Memory(frontend)
    buffer = space.place("buffer", 100)
    space.check()
    (_, block, end), *_ = space._blocks
    block[end] = 0
    with pytest.raises(AssertionError, match="beside buffer"):
        space.check()
    assert buffer.numel() == 100
