"""The bits of a sequence's rows depend on that sequence alone: not on its neighbours, on the order of the batch, on the
page numbers it was given, on the padding of the metadata, or on what was computed before."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.common import cases, compare, process, reference
from tests.common.cases import AttentionCase, AttentionInputs

pytestmark = pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")

# The sequence under test: a decode step, a few speculative rows, a chunk of a prefill, a long context.
SUBJECTS = {"decode": (1, 211), "speculative": (4, 130), "chunk": (40, 170), "long": (1, 3000)}
BEHIND_A_LONG_CONTEXT = {"few-rows": (16, 9000), "two-splits": (150, 5600), "three-splits": (140, 8200)}
SEVERAL_TOKENS = {"speculative-long": (8, 9000), "speculative-short": (5, 400)}
ONE_OR_TWO_TOKENS = {"one-token": (1, 5000), "two-tokens": (2, 3000)}
BEHIND_FEW_KEYS = {"two-behind-few": (2, 700)}
LATE_CHUNKS = {"chunk-of-1300": (1300, 2700), "chunk-of-2000": (2000, 4100)}
SPLIT_CHUNKS = {"chunk-of-256": (256, 8100), "twelve-tokens": (12, 2100), "forty-tokens": (40, 2100)}
LONG_CHUNKS = {"chunk-of-1100": (1100, 29500)}
AMONG_LONG_CONTEXTS = {"thirty-tokens": (30, 9000)}
FILLING = {"speculative-1400": (6, 1400), "speculative-2900": (7, 2900)}
SHORT_PROMPTS = {"prompt-90": (90, 90), "chunk-of-112": (60, 112), "chunk-of-220": (100, 220), "more-rows": (60, 50)}
NEIGHBOURS = {
    "alone": ((), ()),
    "behind-a-prefill": (((90, 90),), ()),
    "before-a-prefill": ((), ((90, 90),)),
    "among-decodes": (((1, 5), (1, 900)), ((1, 64), (1, 1), (1, 400))),
    "among-empties": (((0, 0), (0, 50)), ((0, 3),)),
    "behind-a-long-one": (((1, 4000),), ((2, 2),)),
    "among-many": (((1, 33),) * 17, ((3, 20),) * 9),
}
SHAPES = {
    # Sums in another order change the last bits of float32 alone; rounded to 16 bits, hardly one in 30000 shows it.
    # So float32 finds what is wrong, and the others have many elements.
    "gqa-f32": dict(num_heads=8, num_kv_heads=2, head_dim=128, dtype="float32", page_size=16),
    "gqa-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16),
    "group-3-f32": dict(num_heads=3, num_kv_heads=1, head_dim=80, dtype="float32", page_size=7, sliding_window=100),
    "fp8-sinks": dict(
        num_heads=4, num_kv_heads=4, head_dim=64, dtype="float16", cache_dtype="float8_e4m3fn", scales="one",
        sinks=True, soft_cap=20.0,
    ),
}  # fmt: skip

SEVERAL_TOKENS_SHAPES = {
    "tree-group-4-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16, tree=1),
    "group-4-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16),
    "group-8-bf16": dict(num_heads=32, num_kv_heads=4, head_dim=128, dtype="bfloat16", page_size=16),
    "group-7-f16": dict(num_heads=14, num_kv_heads=2, head_dim=64, dtype="float16", page_size=5, soft_cap=30.0),
    "group-8-fp8": dict(
        num_heads=16, num_kv_heads=2, head_dim=128, dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="one",
        sliding_window=3000,
    ),
}  # fmt: skip
# Prompts over a float8 cache, which CUDA converts on the way to its tiles, and of the other head_dims.
PROMPT_SHAPES = {
    "head-64-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=64, dtype="bfloat16", page_size=16),
    "head-256-bf16": dict(num_heads=8, num_kv_heads=4, head_dim=256, dtype="bfloat16", page_size=16),
    "head-256-cap-bf16": dict(num_heads=8, num_kv_heads=4, head_dim=256, dtype="bfloat16", page_size=16, soft_cap=50.0),
    "gqa-fp8": dict(
        num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16, cache_dtype="float8_e4m3fn",
        scales="per_head",
    ),
}  # fmt: skip

LATE_CHUNKS_SHAPES = {
    "gqa-bf16": SHAPES["gqa-bf16"],
    "gqa-fp8": PROMPT_SHAPES["gqa-fp8"],
    "group-7-bf16": dict(num_heads=56, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16),
}
SPLIT_CHUNKS_SHAPES = {
    "two-kv-heads-bf16": dict(num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", page_size=16),
    "two-kv-heads-64-bf16": dict(num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=16),
    "one-kv-head-bf16": dict(num_heads=8, num_kv_heads=1, head_dim=128, dtype="bfloat16", page_size=16),
}
# Many rows behind few bytes of K and V.
ONE_KV_HEAD_SHAPES = {
    "one-kv-head-bf16": dict(num_heads=16, num_kv_heads=1, head_dim=128, dtype="bfloat16", page_size=16),
    "one-kv-head-64-f16": dict(num_heads=32, num_kv_heads=1, head_dim=64, dtype="float16", page_size=16),
    "one-kv-head-256-bf16": dict(num_heads=16, num_kv_heads=1, head_dim=256, dtype="bfloat16", page_size=16),
    "one-kv-head-fp8": dict(
        num_heads=16, num_kv_heads=1, head_dim=128, dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="one",
        page_size=16,
    ),
}  # fmt: skip
MANY_PROMPTS_SHAPES = {
    "gqa-bf16": SHAPES["gqa-bf16"],
    "group-3-f16": dict(
        num_heads=12, num_kv_heads=4, head_dim=128, dtype="float16", page_size=8, sliding_window=100, sinks=True,
        soft_cap=30.0,
    ),
}  # fmt: skip


def fields(shape: str) -> dict:
    more = {**MANY_PROMPTS_SHAPES, **LATE_CHUNKS_SHAPES, **SPLIT_CHUNKS_SHAPES, **ONE_KV_HEAD_SHAPES}
    return {**SHAPES, **SEVERAL_TOKENS_SHAPES, **PROMPT_SHAPES, **more}[shape]


def sequence(name: str) -> tuple[int, int]:
    more = {**FILLING, **SHORT_PROMPTS, **LATE_CHUNKS, **SPLIT_CHUNKS, **LONG_CHUNKS, **ONE_OR_TWO_TOKENS}
    more |= AMONG_LONG_CONTEXTS
    return {**SUBJECTS, **BEHIND_A_LONG_CONTEXT, **BEHIND_FEW_KEYS, **SEVERAL_TOKENS, **more}[name]


@functools.cache
def subject(name: str, shape: str) -> tuple[AttentionCase, AttentionInputs]:
    case = AttentionCase(
        f"subject-{name}-{shape}", (sequence(name),), spare_seqs=0, spare_columns=0, padding_tokens=0, **fields(shape)
    )
    return case, cases.build(case)


def batch(name: str, shape: str, before, after, **changes) -> tuple[dict, AttentionCase, slice]:
    """Arrays in which the subject stands between other sequences, its K and V on other pages; and its rows."""
    alone, inputs = subject(name, shape)
    others = AttentionCase(
        f"batch-{name}-{shape}-{before}-{after}-{changes}",
        (*before, sequence(name), *after),
        **{**fields(shape), **changes},
    )
    arrays = cases.build(others)
    place = len(before)
    rows = slice(*arrays.query_start_loc[place : place + 2])
    arrays.query[rows] = inputs.query
    theirs, ours = reference.split_cache(arrays.kv_cache), reference.split_cache(inputs.kv_cache)
    pages = -(-sequence(name)[1] // alone.page_size)
    for their, our in zip(theirs, ours, strict=True):
        their[arrays.block_tables[place, :pages]] = our[inputs.block_tables[0, :pages]]
    arrays.k_scale, arrays.v_scale, arrays.sinks = inputs.k_scale, inputs.v_scale, inputs.sinks
    if inputs.tree_mask is not None:
        arrays.tree_mask[rows] = inputs.tree_mask
    return arrays.arrays(), others, rows


def results(frontend, arrays, case, rows=slice(None)):
    out, lse = frontend.call("paged_attention_with_lse", arrays, **case.options())
    return out[rows], lse[rows]


@pytest.mark.parametrize("neighbours", [n for n in NEIGHBOURS if n != "alone"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_neighbours_do_not_change_bits(frontend, name, shape, neighbours):
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    got = results(frontend, *batch(name, shape, *NEIGHBOURS[neighbours]))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {neighbours}: {what}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("before", [((200, 200),), ((1900, 1900),)], ids=["some", "many"])
@pytest.mark.parametrize("shape", ["gqa-bf16", "gqa-fp8"])
def test_larger_tiles_do_not_change_bits(frontend, shape, before):
    """With many new rows CUDA takes larger tiles of rows, in another kernel."""
    case, inputs = subject("chunk", shape)
    want = results(frontend, inputs.arrays(), case)
    got = results(frontend, *batch("chunk", shape, before, ((30, 700),)))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {what}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("spare_columns", [0, 1000])
@pytest.mark.parametrize("shape", MANY_PROMPTS_SHAPES)
@pytest.mark.parametrize("name", SHORT_PROMPTS)
def test_many_short_prompts_do_not_change_bits(frontend, name, shape, spare_columns):
    """Where no context can be long, CUDA computes many short prompts by smaller CTAs, several on an SM."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    before = (*((tokens, tokens) for tokens in range(9, 112, 3)), *((60, 0),) * 100)
    after = ((64, 64), (1, 100), (0, 0), (100, 90), *((17 + i, 110) for i in range(70)))
    got = results(frontend, *batch(name, shape, before, after, spare_seqs=0, spare_columns=spare_columns))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {what}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize(
    "before",
    [((30, 70),), ((200, 200),), ((2500, 2500),), ((240, 6000),)],
    ids=["few", "some", "many", "split-too"],
)
@pytest.mark.parametrize("spare_seqs", [0, 40])
@pytest.mark.parametrize("shape", ["gqa-bf16", *PROMPT_SHAPES])
@pytest.mark.parametrize("name", BEHIND_A_LONG_CONTEXT)
def test_parts_of_keys_do_not_change_bits(frontend, name, shape, before, spare_seqs):
    """Behind a long context CUDA splits the keys of few rows, among CTAs if there are few, else within a CTA."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    got = results(frontend, *batch(name, shape, before, ((1, 50),), spare_seqs=spare_seqs))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {what}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", SEVERAL_TOKENS_SHAPES)
@pytest.mark.parametrize("name", SEVERAL_TOKENS)
def test_several_tokens_do_not_change_bits(frontend, name, shape):
    """On CUDA sequences of several tokens are split, among CTAs or within one, whose split accumulators stand in other
    places where there are more sequences. Beside a prompt another kernel computes them."""
    case, inputs = subject(name, shape)
    alone = results(frontend, inputs.arrays(), case)
    several = (((8, 2000), (7, 90)), ((8, 3000), (6, 6), (8, 5000), (4, 4100)))
    for what, neighbours, changes in (
        ("two", (((8, 100),), ()), {"spare_seqs": 0}),
        ("several", several, {"spare_seqs": 0}),
        ("forty", (((8, 700),) * 20, ((8, 1200), (5, 64)) * 10), {"spare_seqs": 1}),
        ("narrow", several, {"spare_seqs": 100}),
        ("prompt", (((8, 700), (700, 700)), ((1, 900),)), {"spare_seqs": 0}),
    ):
        got = results(frontend, *batch(name, shape, *neighbours, **changes))
        for result, g, w in zip(("out", "lse"), got, alone, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", ["group-4-bf16", "group-8-bf16"])
@pytest.mark.parametrize("name", ONE_OR_TWO_TOKENS)
def test_few_tokens_among_several_do_not_change_bits(frontend, name, shape):
    """On CUDA one kernel merges the splits of such a sequence and those of its neighbours, which another path
    computes. Not where they have more rows together, nor beside a prompt."""
    case, inputs = subject(name, shape)
    alone = results(frontend, inputs.arrays(), case)
    for what, neighbours, changes in (
        ("two", (((8, 3000),), ()), {"spare_seqs": 0}),
        ("several", (((8, 2000), (5, 90)), ((1, 4000), (8, 5000), (7, 700))), {"spare_seqs": 0}),
        ("narrow", (((8, 2000), (5, 90)), ((8, 5000),)), {"spare_seqs": 20}),
        ("many", (((8, 2000),) * 30, ((8, 900),)), {"spare_seqs": 0}),
        ("prompt", (((8, 700), (700, 700)), ((1, 900),)), {"spare_seqs": 0}),
    ):
        got = results(frontend, *batch(name, shape, *neighbours, **changes))
        for result, g, w in zip(("out", "lse"), got, alone, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize(
    ("name", "shape", "sequences"),
    [
        *((name, "group-4-bf16", sequences) for name in FILLING for sequences in (8, 11, 16)),
        *((name, "group-8-bf16", sequences) for name in FILLING for sequences in (32, 33)),
        ("few-rows", "group-4-bf16", 8),
    ],
)
def test_sequences_for_all_ctas_do_not_change_bits(frontend, name, shape, sequences):
    """On CUDA 128 work tiles before their keys are split have a CTA each on an H100 or H200, which takes all splits of
    its rows, its warpgroups in turns. So have 132 of 33 sequences, which no warp plans alone. Of 64 or 88 work tiles
    a CTA each takes the first splits, and the other CTAs the others."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    neighbours = ((sequence(name),) * (sequences - 4), (sequence(name),) * 3)
    got = results(frontend, *batch(name, shape, *neighbours, spare_seqs=0))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {sequences}: {what}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", LATE_CHUNKS_SHAPES)
@pytest.mark.parametrize("name", LATE_CHUNKS)
def test_chunks_that_are_alike_do_not_change_bits(frontend, name, shape):
    """On CUDA the last round of work tiles of chunks that are alike has smaller ones, as many as the CTAs: not the same
    of two and of three chunks, and none beside other sequences."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    rows, context = sequence(name)
    for what, before, after in (
        ("two", (), ((rows, context),)),
        ("three", ((rows, context - 200),), ((rows, context + 100),)),
        ("beside decode rows", ((1, 300),), ()),
        ("beside a prompt", ((300, 300),), ()),
    ):
        got = results(frontend, *batch(name, shape, before, after, spare_seqs=0))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
def test_split_chunks_that_are_alike_do_not_change_bits(frontend):
    """On CUDA four such chunks, in three KV splits, are more work tiles than CTAs, and the last ones smaller."""
    name, shape = "chunk-of-256", "two-kv-heads-bf16"
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    rows, context = sequence(name)
    for what, before, after in (
        ("four", ((rows, context - 100),), ((rows, context), (rows, context + 50))),
        ("five", ((rows, context),) * 4, ()),
        ("three of another length", ((rows - 9, context),), ((rows, context), (rows, context))),
    ):
        got = results(frontend, *batch(name, shape, before, after, spare_seqs=0))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
def test_chunks_beside_many_decode_rows_do_not_change_bits(frontend):
    """The split accumulators of three chunks do not fit: on CUDA both warpgroups of a CTA take all splits of its
    rows."""
    name, shape = "three-splits", "gqa-bf16"
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    chunks = (sequence(name),) * 2
    got = results(frontend, *batch(name, shape, ((1, 300),) * 64, chunks, spare_seqs=0))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {what}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", ["gqa-bf16", "group-8-bf16"])
@pytest.mark.parametrize("name", ["decode", "long", "chunk"])
def test_chunk_beside_decode_does_not_change_bits(frontend, name, shape):
    """A chunk of a prompt beside many decode rows: on CUDA their kernels may run at the same time."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    got = results(frontend, *batch(name, shape, ((1, 4000),) * 30, ((300, 900), (1, 5000)), spare_seqs=0))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape}: {what}")


@pytest.mark.parametrize(
    "changes",
    [
        {"spare_seqs": 60},
        {"spare_columns": 300},
        {"padding_tokens": 200},
        {"spare_seqs": 0, "spare_columns": 0, "padding_tokens": 200},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["decode", "chunk"])
def test_padding_does_not_change_bits(frontend, name, shape, changes):
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    got = results(frontend, *batch(name, shape, (), (), **changes))
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {changes}: {what}")


@pytest.mark.parametrize("shape", ["gqa-f32", "gqa-bf16", "gqa-fp8"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_poison_in_unread_places_does_not_change_bits(frontend, name, shape):
    """Same inputs with zeros instead of NaN and absurd numbers wherever nothing may be read."""
    case = AttentionCase(f"poison-{name}", (SUBJECTS[name], (1, 9)), **fields(shape))
    want = results(frontend, cases.build(case, poison=False).arrays(), case)
    got = results(frontend, cases.build(case, poison=True).arrays(), case)
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {name}: {what}")


@pytest.mark.parametrize("shape", ["gqa-f32", "gqa-bf16"])
@pytest.mark.parametrize("name", ["long", "chunk"])
def test_repeated_calls_give_the_same_bits(frontend, name, shape):
    """Whatever threads and blocks raced for, and whatever a larger call left in the scratch memory."""
    large, _, _ = batch("long", shape, *NEIGHBOURS["among-many"])
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    for _ in range(20):
        frontend.call("paged_attention", large, **case.options())
        got = results(frontend, inputs.arrays(), case)
        for g, w in zip(got, want, strict=True):
            compare.assert_bitwise_equal(g, w, frontend.name)


@pytest.mark.frontends("eager")
def test_number_of_threads_does_not_change_bits(frontend, tmp_path):
    """The host kernels split work over threads; one thread alone gives the same bits."""
    arrays, case, _ = batch("long", "gqa-f32", *NEIGHBOURS["among-many"])
    out, _ = results(frontend, arrays, case)
    np.savez(tmp_path / "in.npz", **{k: compare.bits(v) for k, v in arrays.items()})
    code = f"""
import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import numpy as np
from tests.common import cases, compare, frontends
from tests.common.cases import AttentionCase
data = np.load({str(tmp_path / "in.npz")!r})
types = {dict((k, v.dtype.name) for k, v in arrays.items())!r}
arrays = {{k: data[k].view(cases.DTYPES[types[k]]) for k in data.files}}
out, _ = frontends.ALL["eager"].call("paged_attention_with_lse", arrays, **{case.options()!r})
np.save({str(tmp_path / "out.npy")!r}, compare.bits(out))
"""
    process.run(code)
    compare.assert_bitwise_equal(np.load(tmp_path / "out.npy"), compare.bits(out), "one thread")
