"""Wrong static inputs: each argument by rank, shape, dtype and value, through every front end. The error names the
operator, the argument, what was expected and what came."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from tests.common import cases, layer_cases
from tests.common.cache_cases import CacheCase, build_cache
from tests.properties.bad import Bad, drop, option, put
from tests.properties.bad_layer_inputs import LAYER

ATTENTION = cases.AttentionCase("bad-inputs", ((1, 20), (3, 9)), num_heads=4, num_kv_heads=2, page_size=8)
FP8_ATTENTION = dataclasses.replace(ATTENTION, cache_dtype="float8_e4m3fn", scales="one")
CACHE = CacheCase("bad-inputs")
FP8_CACHE = dataclasses.replace(CACHE, cache_dtype="float8_e4m3fn", scales="one")


def valid(bad: Bad) -> tuple[dict, dict]:
    fp8 = bad.base != "float32"
    if bad.operator == "simple_add":
        return {"a": np.ones((3, 4), np.float32), "b": np.ones((3, 4), np.float32)}, {}
    if bad.operator == "reshape_and_cache":
        return build_cache(FP8_CACHE if fp8 else CACHE), {}
    if bad.operator == "merge_attention_states":
        out, lse = np.ones((5, 2, 8), np.float32), np.ones((5, 2), np.float32)
        return {"out_a": out, "lse_a": lse, "out_b": out.copy(), "lse_b": lse.copy()}, {}
    if bad.operator in layer_cases.NAMES:
        return layer_cases.samples()[bad.operator]
    case = FP8_ATTENTION if fp8 else ATTENTION
    return cases.build(case).arrays(), case.options()


def attention_cases(operator: str) -> list[Bad]:
    def bad(*args, **kwargs):
        return Bad(operator, *args, **kwargs)

    T = TypeError
    bf16 = cases.DTYPES["bfloat16"]
    return [
        bad("rank-2", "query", "[7, 256]", put("query", (7, 256))),
        bad("rank-4", "query", "[1, 7, 4, 64]", put("query", (1, 7, 4, 64))),
        bad("float64", "query", "float64", put("query", dtype=np.float64), T),
        bad("int32", "query", "int32", put("query", dtype=np.int32), T),
        bad("heads-not-a-multiple", "query", "[7, 5, 64]", put("query", (7, 5, 64))),
        bad("no-heads", "query", "[7, 0, 64]", put("query", (7, 0, 64))),
        bad("head-dim-12", "query", "[7, 4, 12]", put("query", (7, 4, 12))),
        bad("head-dim-264", "query", "[7, 4, 264]", put("query", (7, 4, 264))),
        bad("head-dim-0", "query", "[7, 4, 0]", put("query", (7, 4, 0))),
        bad("rank-3", "kv_cache", "[4, 8, 64]", put("kv_cache", (4, 8, 64))),
        bad("rank-6", "kv_cache", "[1, 2, 4, 8, 2, 64]", put("kv_cache", (1, 2, 4, 8, 2, 64))),
        bad("odd-heads", "kv_cache", "[4, 8, 3, 64]", put("kv_cache", (4, 8, 3, 64))),
        bad("three-parts", "kv_cache", "[3, 4, 8, 2, 64]", put("kv_cache", (3, 4, 8, 2, 64))),
        bad("page-size-0", "kv_cache", "[4, 0, 4, 64]", put("kv_cache", (4, 0, 4, 64))),
        bad("head-dim", "kv_cache", "[4, 8, 4, 32]", put("kv_cache", (4, 8, 4, 32))),
        bad("other-float", "kv_cache", "bfloat16", put("kv_cache", dtype=bf16), T),
        bad("int8", "kv_cache", "int8", put("kv_cache", dtype=np.int8), T),
        bad("rank-2", "context_lens", "[4, 1]", put("context_lens", (4, 1))),
        bad("int64", "context_lens", "int64", put("context_lens", dtype=np.int64), T),
        bad("float32", "context_lens", "float32", put("context_lens", dtype=np.float32), T),
        bad("rank-1", "block_tables", "[20]", put("block_tables", (20,))),
        bad("rows", "block_tables", "[3, 5]", put("block_tables", (3, 5))),
        bad("int64", "block_tables", "int64", put("block_tables", dtype=np.int64), T),
        bad("rank-2", "query_start_loc", "[5, 1]", put("query_start_loc", (5, 1))),
        bad("one-too-short", "query_start_loc", "[4]", put("query_start_loc", (4,))),
        bad("one-too-long", "query_start_loc", "[6]", put("query_start_loc", (6,))),
        bad("int64", "query_start_loc", "int64", put("query_start_loc", dtype=np.int64), T),
        bad("rank-2", "num_seqs", "[1, 1]", put("num_seqs", (1, 1))),
        bad("two", "num_seqs", "[2]", put("num_seqs", (2,))),
        bad("int64", "num_seqs", "int64", put("num_seqs", dtype=np.int64), T),
        bad("nan", "scale", "nan", option("scale", math.nan)),
        bad("infinite", "scale", "inf", option("scale", math.inf)),
        bad("past-float32", "scale", "1e+39", option("scale", 1e39)),
        bad("zero", "sliding_window", "0", option("sliding_window", 0)),
        bad("negative", "sliding_window", "-4", option("sliding_window", -4)),
        bad("zero", "soft_cap", "0", option("soft_cap", 0.0)),
        bad("negative", "soft_cap", "-1", option("soft_cap", -1.0)),
        bad("nan", "soft_cap", "nan", option("soft_cap", math.nan)),
        bad("infinite", "soft_cap", "inf", option("soft_cap", math.inf)),
        bad("huge", "soft_cap", "8193", option("soft_cap", 8193.0)),
        bad("tiny", "soft_cap", "1e-31", option("soft_cap", 1e-31)),
        bad("without-float8", "k_scale", "float32[1]", put("k_scale", (1,))),
        bad("without-float8", "v_scale", "float32[1]", put("v_scale", (1,))),
        bad("missing", "k_scale", "None", drop("k_scale"), base="fp8"),
        bad("missing", "v_scale", "None", drop("v_scale"), base="fp8"),
        bad("float64", "k_scale", "float64", put("k_scale", dtype=np.float64), T, base="fp8"),
        bad("rank-2", "v_scale", "[1, 2]", put("v_scale", (1, 2)), base="fp8"),
        bad("rank-0", "k_scale", "float32[]", put("k_scale", ()), base="fp8"),
        bad("three", "k_scale", "[3]", put("k_scale", (3,)), base="fp8"),
        bad("one-per-query-head", "v_scale", "[4]", put("v_scale", (4,)), base="fp8"),
        bad("other-than-k", "v_scale", "[2]", put("v_scale", (2,)), base="fp8"),
        bad("one-per-kv-head", "sinks", "[2]", put("sinks", (2,))),
        bad("rank-2", "sinks", "[4, 1]", put("sinks", (4, 1))),
        bad("bfloat16", "sinks", "bfloat16", put("sinks", (4,), bf16), T),
        bad("rank-1", "tree_mask", "[7]", put("tree_mask", (7,), np.uint32)),
        bad("three-words", "tree_mask", "[7, 3]", put("tree_mask", (7, 3), np.uint32)),
        bad("no-words", "tree_mask", "[7, 0]", put("tree_mask", (7, 0), np.uint32)),
        bad("fewer-rows", "tree_mask", "[6, 1]", put("tree_mask", (6, 1), np.uint32)),
        bad("int32", "tree_mask", "int32", put("tree_mask", (7, 1), np.int32), T),
    ]


def cache_cases() -> list[Bad]:
    def bad(*args, **kwargs):
        return Bad("reshape_and_cache", *args, **kwargs)

    T = TypeError
    f16 = np.float16
    return [
        bad("rank-2", "key", "[12, 128]", put("key", (12, 128))),
        bad("float64", "key", "float64", put("key", dtype=np.float64), T),
        bad("rank-4", "value", "[1, 12, 2, 64]", put("value", (1, 12, 2, 64))),
        bad("other-shape", "value", "[11, 2, 64]", put("value", (11, 2, 64))),
        bad("other-float", "value", "float16", put("value", dtype=f16), T),
        bad("rank-3", "kv_cache", "[9, 16, 64]", put("kv_cache", (9, 16, 64))),
        bad("odd-heads", "kv_cache", "[9, 16, 5, 64]", put("kv_cache", (9, 16, 5, 64))),
        bad("other-heads", "kv_cache", "[9, 16, 6, 64]", put("kv_cache", (9, 16, 6, 64))),
        bad("other-head-dim", "kv_cache", "[9, 16, 4, 32]", put("kv_cache", (9, 16, 4, 32))),
        bad("three-parts", "kv_cache", "[3, 9, 16, 2, 64]", put("kv_cache", (3, 9, 16, 2, 64))),
        bad("other-float", "kv_cache", "float16", put("kv_cache", dtype=f16), T),
        bad("rank-2", "slot_mapping", "[12, 1]", put("slot_mapping", (12, 1))),
        bad("too-many", "slot_mapping", "[13]", put("slot_mapping", (13,))),
        bad("float32", "slot_mapping", "float32", put("slot_mapping", dtype=np.float32), T),
        bad("int16", "slot_mapping", "int16", put("slot_mapping", dtype=np.int16), T),
        bad("without-float8", "k_scale", "float32[1]", put("k_scale", (1,))),
        bad("missing", "v_scale", "None", drop("v_scale"), base="fp8"),
        bad("three", "k_scale", "[3]", put("k_scale", (3,)), base="fp8"),
        bad("other-than-k", "v_scale", "[2]", put("v_scale", (2,)), base="fp8"),
    ]


def merge_cases() -> list[Bad]:
    def bad(*args, **kwargs):
        return Bad("merge_attention_states", *args, **kwargs)

    T = TypeError
    return [
        bad("rank-2", "out_a", "[5, 16]", put("out_a", (5, 16))),
        bad("float64", "out_a", "float64", put("out_a", dtype=np.float64), T),
        bad("other-shape", "out_b", "[4, 2, 8]", put("out_b", (4, 2, 8))),
        bad("other-float", "out_b", "float16", put("out_b", dtype=np.float16), T),
        bad("rank-3", "lse_a", "[5, 2, 1]", put("lse_a", (5, 2, 1))),
        bad("transposed", "lse_b", "[2, 5]", put("lse_b", (2, 5))),
        bad("float16", "lse_b", "float16", put("lse_b", dtype=np.float16), T),
    ]


def add_cases() -> list[Bad]:
    T = TypeError
    return [
        Bad("simple_add", "int32", "a", "int32", put("a", dtype=np.int32), T),
        Bad("simple_add", "float64", "a", "float64", put("a", dtype=np.float64), T),
        Bad("simple_add", "other-float", "b", "float16", put("b", dtype=np.float16), T),
        Bad("simple_add", "other-shape", "b", "[4, 3]", put("b", (4, 3))),
        Bad("simple_add", "no-broadcast", "b", "[4]", put("b", (4,))),
    ]


BAD = [*add_cases(), *cache_cases(), *merge_cases(), *attention_cases("paged_attention"), *LAYER]
# What the two share is one function; enough to see that its texts carry the right name.
BAD += [b for b in attention_cases("paged_attention_with_lse") if b.name in ("rank-2", "nan", "missing", "zero")]


IN_PLACE = ("reshape_and_cache", "rotary_and_cache", "concat_and_cache_mla")


def wrong_types(operator: str) -> list[Bad]:
    """Options of a wrong Python type."""
    T = TypeError
    return [
        Bad(operator, "text", "scale", "str", option("scale", "0.5"), T),
        Bad(operator, "none", "scale", "NoneType", option("scale", None), T),
        Bad(operator, "fraction", "sliding_window", "float", option("sliding_window", 1.5), T),
        Bad(operator, "text", "sliding_window", "str", option("sliding_window", "4"), T),
        Bad(operator, "text", "soft_cap", "str", option("soft_cap", "4"), T),
    ]


def check_raises(frontend, bad: Bad, errors: tuple[type[Exception], ...]) -> None:
    arrays, options = valid(bad)
    bad.change(arrays, options)
    with pytest.raises(errors) as caught:
        frontend.call(bad.operator, arrays, **options)
    text = str(caught.value)
    pattern = rf"\b{bad.operator}: {bad.argument}: expected .*, got .*{re.escape(bad.got)}"
    assert re.search(pattern, text), f"{text!r} does not match {pattern!r}"


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_raises(frontend, bad):
    errors = (bad.error,)
    if frontend.name.endswith("-compiled"):
        # Dynamo wraps what a fake kernel raises; the text must come through.
        import torch._dynamo.exc

        errors = (bad.error, torch._dynamo.exc.TorchDynamoException, RuntimeError)
    check_raises(frontend, bad, errors)


@pytest.mark.parametrize("bad", wrong_types("paged_attention"), ids=str)
@pytest.mark.frontends("jax", "jax-cuda", "eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
def test_wrong_type_raises(frontend, bad):
    check_raises(frontend, bad, (TypeError,))


@pytest.mark.parametrize("bad", [b for b in BAD if b.operator in IN_PLACE], ids=str)
@pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
def test_the_in_place_form_raises_the_same(frontend, bad):
    arrays, options = valid(bad)
    bad.change(arrays, options)
    texts = []
    for operator in (bad.operator, f"{bad.operator}_"):
        with pytest.raises(bad.error) as caught:
            frontend.call(operator, arrays, **options)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("operator", ["paged_attention", "paged_attention_with_lse"])
def test_scale_is_required(frontend, operator):
    arrays, options = valid(Bad(operator, "missing", "scale", "", drop("scale")))
    del options["scale"]
    # Dynamo has words of its own.
    text = "scale" if frontend.name.endswith("-compiled") else f"{operator}: missing a required argument: 'scale'"
    with pytest.raises((TypeError, RuntimeError), match=text):
        frontend.call(operator, arrays, **options)


@pytest.mark.parametrize("number", [-1, 5, 2**31, 2.0, True], ids=str)
@pytest.mark.frontends(
    *("eager", "jax", "torch_xla", "torchax", "torchax-jit"),
    *("eager-cuda", "jax-cuda", "torch_xla-cuda", "torchax-cuda", "torchax-cuda-jit"),
)
def test_num_seqs_as_a_python_number(frontend, number):
    """max_seqs is 4: what is known when the call is made is refused when the call is made, on every platform."""
    arrays, options = valid(Bad("paged_attention", "", "", "", drop("")))
    del arrays["num_seqs"]
    error = ValueError if type(number) is int else TypeError
    with pytest.raises(
        error, match=rf"paged_attention: num_seqs: expected .*, got .*({number}|{type(number).__name__})"
    ):
        frontend.call("paged_attention", arrays, num_seqs=number, **options)


@pytest.mark.parametrize("argument", ["query", "kv_cache", "block_tables", "num_seqs"])
@pytest.mark.frontends("eager", "jax", "torch_xla", "torchax")
def test_something_that_is_no_array(frontend, argument):
    arrays, options = valid(Bad("paged_attention", "", "", "", drop("")))

    def body(ops, **tensors):
        return ops.paged_attention(**(tensors | {argument: "text"}), **options)

    with pytest.raises((TypeError, RuntimeError), match=rf"paged_attention.*{argument}"):
        frontend.run(body, arrays)


# (operator, base): what the cases above change.
UNCHANGED = (
    ("simple_add", "float32"),
    ("reshape_and_cache", "float32"),
    ("reshape_and_cache", "fp8"),
    ("merge_attention_states", "float32"),
    ("paged_attention", "float32"),
    ("paged_attention", "fp8"),
    # rms_norm, silu_and_mul, rotary_embedding, sample, linear, grouped_linear, gated_mlp, attention_block,
    # bidirectional_attention, mla_attention, concat_and_cache_mla
    *((operator, "float32") for operator in layer_cases.NAMES),
)


def test_the_unchanged_inputs_are_valid(frontend):
    """Otherwise the tests above could pass for a reason of their own."""
    for operator, base in UNCHANGED:
        arrays, options = valid(Bad(operator, "", "", "", drop(""), base=base))
        frontend.call(operator, arrays, **options)
