"""One sequence of few tokens in a call with room for many more: on CUDA the kernel for prompts computes it, with the
bits of the kernels for few tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare
from tests.common.cases import AttentionCase

pytestmark = pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")

SHAPES = {
    "gqa-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16),
    "group-3-f16": dict(
        num_heads=12, num_kv_heads=4, head_dim=128, dtype="float16", page_size=8, sliding_window=100, sinks=True,
        soft_cap=30.0,
    ),
    "mha-f32": dict(num_heads=4, num_kv_heads=4, head_dim=128, dtype="float32", page_size=16),
    "group-8-bf16": dict(num_heads=16, num_kv_heads=2, head_dim=128, dtype="bfloat16", page_size=16),
    "group-16-bf16": dict(num_heads=16, num_kv_heads=1, head_dim=128, dtype="bfloat16", page_size=16),
    "head-64-bf16": dict(num_heads=32, num_kv_heads=8, head_dim=64, dtype="bfloat16", page_size=16),
    "head-96-bf16": dict(num_heads=4, num_kv_heads=2, head_dim=96, dtype="bfloat16", page_size=16),
    "head-256-f16": dict(num_heads=8, num_kv_heads=4, head_dim=256, dtype="float16", page_size=16, soft_cap=50.0),
    "gqa-fp8": dict(
        num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16, cache_dtype="float8_e4m3fn",
        scales="per_head",
    ),
}  # fmt: skip
LENGTHS = [(1, 0), (1, 1), (1, 100), (1, 5000), (2, 700), (3, 4500), (4, 9), (8, 900)]
WRONG = {
    "negative-context": {"context_lens": -1},
    "context-too-long": {"context_lens": 1 << 20},
    "no-sequence": {"num_seqs": 0},
    "two-sequences": {"num_seqs": 2},
    "ends-before-it-begins": {"query_start_loc": [3, 1]},
    "begins-below-0": {"query_start_loc": [-1, 1]},
    "page-out-of-range": {"block_tables": 1 << 30},
    "negative-page": {"block_tables": -1},
}


def compare_with_padding(frontend, name: str, length: tuple[int, int], shape: str, padding: int, wrong: dict) -> None:
    case = AttentionCase(name, (length,), spare_seqs=0, spare_columns=0, padding_tokens=0, **SHAPES[shape])
    arrays = cases.build(case).arrays()
    for argument, value in wrong.items():
        arrays[argument] = np.array(arrays[argument])
        arrays[argument][...] = value
    want = frontend.call("paged_attention_with_lse", arrays, **case.options())
    query = arrays["query"]
    arrays["query"] = np.concatenate([query, np.full((padding, *query.shape[1:]), np.nan, query.dtype)])
    got = frontend.call("paged_attention_with_lse", arrays, **case.options())
    for what, g, w in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(g[: len(w)], w, f"{frontend.name} {name} {length} {shape} {padding}: {what}")


@pytest.mark.parametrize("padding_tokens", [60, 200, 1500])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_few_tokens(frontend, length, shape, padding_tokens):
    compare_with_padding(frontend, f"one-{length}-{shape}", length, shape, padding_tokens, {})


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("padding_tokens", [100, 1000])
@pytest.mark.parametrize("shape", ["gqa-bf16", "head-64-bf16"])
@pytest.mark.parametrize("length", [(1, 90), (2, 2000)], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_metadata(frontend, wrong, length, shape, padding_tokens):
    compare_with_padding(frontend, f"wrong-{length}-{shape}", length, shape, padding_tokens, WRONG[wrong])
