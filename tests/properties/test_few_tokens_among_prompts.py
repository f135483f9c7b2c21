"""Sequences of few tokens in a call whose shapes suggest prompts without contexts: on CUDA the kernel for prompts
computes them, with the bits of the kernels for few tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare
from tests.common.cases import AttentionCase

pytestmark = pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")

SHAPES = {
    "gqa-bf16": dict(num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", page_size=16),
    "group-3-f16": dict(
        num_heads=6, num_kv_heads=2, head_dim=128, dtype="float16", page_size=8, sliding_window=50, sinks=True,
        soft_cap=30.0,
    ),
    "group-16-bf16": dict(num_heads=16, num_kv_heads=1, head_dim=128, dtype="bfloat16", page_size=16),
    "head-64-bf16": dict(num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=16),
    "head-256-f16": dict(num_heads=4, num_kv_heads=2, head_dim=256, dtype="float16", page_size=16, soft_cap=50.0),
    "gqa-fp8": dict(
        num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", page_size=16, cache_dtype="float8_e4m3fn",
        scales="per_head",
    ),
}  # fmt: skip
# Prompts, and their tokens: in work tiles of 64 to 192 rows, or in those of three CTAs on an SM; and so many that no
# warp plans them alone.
PROMPTS = [(3, 304), (2, 1104), (9, 96), (34, 240), (36, 64)]
WRONG = {
    "negative-context": ("context_lens", 1, -1),
    "no-sequence": ("num_seqs", 0, 0),
    "too-many-sequences": ("num_seqs", 0, 1000),
    "begins-late": ("query_start_loc", 2, 1 << 20),
    "begins-below-0": ("query_start_loc", 1, -1),
    "begins-before-the-last": ("query_start_loc", 3, 1),
    "page-out-of-range": ("block_tables", (1, 0), 1 << 30),
}


def batch(name: str, prompts: tuple[int, int], shape: str) -> tuple[AttentionCase, dict]:
    """Few tokens between prompts of as many tokens as there is room for. Padding tokens make up for them."""
    count, room = prompts
    sequences = ((room, room), (1, room - 3), (2, room // 2), *((room, room),) * (count - 1), (1, 1), (2, room))
    case = AttentionCase(
        f"{name}-{prompts}-{shape}", sequences, spare_seqs=0, spare_columns=0, padding_tokens=4 * room, **SHAPES[shape]
    )
    return case, cases.build(case).arrays()


def call(frontend, case: AttentionCase, arrays: dict) -> list[np.ndarray]:
    return frontend.call("paged_attention_with_lse", arrays, **case.options())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompts", PROMPTS, ids=str)
def test_bits(frontend, prompts, shape):
    """Of each sequence, those of a call for it alone."""
    case, arrays = batch("among-prompts", prompts, shape)
    got = call(frontend, case, arrays)
    starts = arrays["query_start_loc"]
    for i, (tokens, _) in enumerate(case.sequences):
        if tokens > 2 and i > 0:
            continue
        rows = slice(starts[i], starts[i + 1])
        alone = {
            **arrays,
            "query": arrays["query"][rows],
            "context_lens": arrays["context_lens"][i : i + 1],
            "block_tables": arrays["block_tables"][i : i + 1],
            "query_start_loc": np.array([0, tokens], np.int32),
            "num_seqs": np.array([1], np.int32),
        }
        for what, g, w in zip(("out", "lse"), got, call(frontend, case, alone), strict=True):
            compare.assert_bitwise_equal(g[rows], w, f"{frontend.name} {prompts} {shape} sequence {i}: {what}")


@pytest.mark.frontends("eager-cuda")
@pytest.mark.parametrize("shape", ["gqa-bf16", "head-64-bf16"])
@pytest.mark.parametrize("prompts", PROMPTS, ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_metadata(frontend, wrong, prompts, shape):
    """As with a block table that has room for more keys, from which the shapes suggest no prompts."""
    case, arrays = batch("wrong", prompts, shape)
    argument, place, value = WRONG[wrong]
    arrays[argument] = np.array(arrays[argument])
    arrays[argument][place] = value
    got = call(frontend, case, arrays)
    arrays["block_tables"] = np.pad(arrays["block_tables"], ((0, 0), (0, 3 * arrays["block_tables"].shape[1])))
    for what, g, w in zip(("out", "lse"), got, call(frontend, case, arrays), strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name} {wrong} {prompts} {shape}: {what}")
