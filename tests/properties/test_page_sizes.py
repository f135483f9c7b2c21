"""The size of pages does not change the bits of a sequence's rows: CUDA has kernels that load pages of a multiple of 8
slots whole, and others that load slot by slot. At head_dim 64 it changes those of 2 to 8 tokens, for which each has
another kernel."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.common import cases, compare, reference
from tests.common.cases import AttentionCase, AttentionInputs

pytestmark = pytest.mark.frontends("eager-cuda", "jax-cuda")

PAGE_SIZES = (1, 5, 12)
SHAPES = {
    "gqa-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    "group-7-f16": dict(num_heads=14, num_kv_heads=2, head_dim=128, dtype="float16", sinks=True),
    "head-64-f16": dict(num_heads=14, num_kv_heads=2, head_dim=64, dtype="float16", soft_cap=30.0),
    "head-64-bf16": dict(num_heads=8, num_kv_heads=8, head_dim=64, dtype="bfloat16"),
    "head-256-bf16": dict(num_heads=8, num_kv_heads=4, head_dim=256, dtype="bfloat16"),
    "head-256-f16": dict(num_heads=8, num_kv_heads=2, head_dim=256, dtype="float16", soft_cap=50.0),
    "window-bf16": dict(num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", sliding_window=300),
}
LOADS = {
    "one-prompt": ((700, 700),),
    "short-prompts": tuple((tokens, tokens) for tokens in range(9, 150, 12)),
    "chunks-beside-decode": ((300, 2100), (40, 700), *(((1, 900),) * 6)),
    "few-rows-behind-long-contexts": ((16, 9000), (12, 5001), (9, 3000)),
    "two-chunks": ((256, 8100), (140, 4200)),
    "many": tuple((tokens, 40 + 31 * tokens) for tokens in range(9, 49)),
    "no-keys": ((20, 0), (30, 30), (0, 50), (12, 4)),
}
FEW_TOKENS = {
    "several": ((4, 2000), (7, 900), (5, 1300), (8, 40)),
    "several-behind-long-contexts": ((5, 9000), (8, 12000)),
    "one": ((6, 7000),),
    "many": tuple((1 + n % 8, 30 + 61 * n) for n in range(40)),
    "beside-a-chunk": ((300, 2100), *(((5, 700),) * 6)),
    "beside-decode": (*(((3, 800),) * 4), *(((1, 2500),) * 6), (8, 3)),
}
TREES = {
    "gqa-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", tree=1),
    "head-256-f16": dict(num_heads=8, num_kv_heads=4, head_dim=256, dtype="float16", tree=2),
}
TREE_LOADS = {"few-nodes": ((8, 900), (20, 3000), (1, 300)), "wide": ((30, 2000), (25, 90))}


@functools.cache
def in_pages_of_16(load: tuple, **fields) -> tuple[AttentionCase, AttentionInputs]:
    case = AttentionCase(f"pages-{load}-{fields}", load, page_size=16, **fields)
    return case, cases.build(case)


def in_pages_of(page_size: int, case: AttentionCase, inputs: AttentionInputs) -> tuple[AttentionCase, AttentionInputs]:
    """The same keys, on pages of another size in another order, with poison around them."""
    other = case.but(page_size=page_size)
    arrays = cases.build(other)
    for name in ("query", "tree_mask", "sinks"):
        setattr(arrays, name, getattr(inputs, name))
    for s, (_, context) in enumerate(case.sequences):
        positions = np.arange(context)
        place = arrays.block_tables[s][positions // page_size], positions % page_size
        source = inputs.block_tables[s][positions // 16], positions % 16
        for their, our in zip(
            reference.split_cache(arrays.kv_cache), reference.split_cache(inputs.kv_cache), strict=True
        ):
            their[place] = our[source]
    return other, arrays


def results(frontend, arrays: dict, case: AttentionCase):
    return frontend.call("paged_attention_with_lse", arrays, **case.options())


def compare_rows(got, want, rows, text: str) -> None:
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g[rows], w[rows], f"{text}: {what}")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", LOADS)
def test_page_size_does_not_change_bits(frontend, load, shape, page_size):
    case, inputs = in_pages_of_16(LOADS[load], **SHAPES[shape])
    other, arrays = in_pages_of(page_size, case, inputs)
    want, got = results(frontend, inputs.arrays(), case), results(frontend, arrays.arrays(), other)
    compare_rows(got, want, slice(None), f"{frontend.name} {load} {shape} {page_size}")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "head-64-f16"])
@pytest.mark.parametrize("load", FEW_TOKENS)
def test_page_size_does_not_change_bits_of_few_tokens(frontend, load, shape, page_size):
    case, inputs = in_pages_of_16(FEW_TOKENS[load], **SHAPES[shape])
    other, arrays = in_pages_of(page_size, case, inputs)
    want, got = results(frontend, inputs.arrays(), case), results(frontend, arrays.arrays(), other)
    compare_rows(got, want, slice(None), f"{frontend.name} {load} {shape} {page_size}")


@pytest.mark.parametrize("page_size", [1, 12])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("load", TREE_LOADS)
def test_page_size_does_not_change_bits_of_trees(frontend, load, shape, page_size):
    case, inputs = in_pages_of_16(TREE_LOADS[load], **TREES[shape])
    other, arrays = in_pages_of(page_size, case, inputs)
    want, got = results(frontend, inputs.arrays(), case), results(frontend, arrays.arrays(), other)
    compare_rows(got, want, slice(None), f"{frontend.name} {load} {shape} {page_size}")


@pytest.mark.parametrize("page", [1 << 30, -1], ids=["too-large", "negative"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", ["gqa-bf16", "head-64-f16", "head-256-bf16"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_page_out_of_range(frontend, place, shape, page_size, page):
    """Makes the rows of its sequence NaN, and no others."""
    case, inputs = in_pages_of_16(((40, 700), (200, 3001), (1, 900), (30, 60)), **SHAPES[shape])
    other, arrays = in_pages_of(page_size, case, inputs)
    want = results(frontend, arrays.arrays(), other)
    pages = -(-3001 // page_size)
    arrays.block_tables[1, {"first": 0, "middle": pages // 2 + 1, "last": pages - 1}[place]] = page
    out, lse = results(frontend, arrays.arrays(), other)
    own = slice(*arrays.query_start_loc[1:3])
    assert np.isnan(np.asarray(out[own], np.float32)).all() and np.isnan(lse[own]).all()
    others = np.r_[0 : own.start, own.stop : len(out)]
    compare_rows((out, lse), want, others, f"{frontend.name} {place} {shape} {page_size}")
