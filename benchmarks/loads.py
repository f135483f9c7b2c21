"""The loads that are measured, as the tests' cases: shapes named after models and after what serving does with them."""

from __future__ import annotations

import numpy as np
from tests.common.cases import AttentionCase

# Measured on one H200, 2026-11-20: the best readers' bandwidth, and a bfloat16 matrix product of 8192 x 8192 x 8192.
BYTES_PER_SECOND = 4.5e12
OPERATIONS_PER_SECOND = 798e12

HEADS = {
    "llama3-8b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "llama3-70b": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128},
    "llama2-7b": {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128},
    "llama2-13b-tp2": {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128},
    "head-dim-64": {"num_heads": 32, "num_kv_heads": 32, "head_dim": 64},
    "gemma2-9b": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256},
}


def zipf_lengths(count: int, unit: int, longest: int, exponent: float = 1.5, seed: int = 0) -> list[int]:
    """Lengths as a service sees them: most short, a few very long; the same list on every machine."""
    draws = np.random.RandomState(seed).zipf(exponent, count)  # whose numbers no version of NumPy changes
    return [int(min(longest, unit * rank)) for rank in draws]


def _zipf_prompts(total: int, count: int) -> list[int]:
    """`count` uneven prompts of `total` tokens in all, multiples of 16 but for the last."""
    weights = [1 / rank for rank in range(1, count + 1)]
    lengths = [max(16, round(total * w / sum(weights) / 16) * 16) for w in weights]
    return [*lengths[:-1], total - sum(lengths[:-1])]


def _case(name: str, sequences: list[tuple[int, int]], model: str, **changes) -> AttentionCase:
    exact = {"dtype": "bfloat16", "page_size": 16, "spare_seqs": 0, "spare_columns": 0, "padding_tokens": 0}
    return AttentionCase(f"{name} {model}", tuple(sequences), **{**HEADS[model], **exact, **changes})


def decode(name: str, lengths: list[int], model: str = "llama3-8b", **changes) -> AttentionCase:
    """One new token per sequence."""
    return _case(name, [(1, length) for length in lengths], model, **changes)


def prefill(name: str, prompts: list[tuple[int, int]], model: str = "llama3-8b", **changes) -> AttentionCase:
    """(new tokens, context including them) per sequence."""
    return _case(name, prompts, model, **changes)


K = 1024
ZIPF = zipf_lengths(64, unit=256, longest=64 * K)
_BATCHES = {
    "1x1k": [K],
    "1x8k": [8 * K],
    "1x32k": [32 * K],
    "8x1k": [K] * 8,
    "8x4k": [4 * K] * 8,
    "8x16k": [16 * K] * 8,
    "32x4k": [4 * K] * 32,
    "64x4k": [4 * K] * 64,
    "128x2k": [2 * K] * 128,
    "64-zipf": ZIPF,
}

DECODE = [
    decode(name, lengths, model)
    for model in ("llama3-8b", "llama3-70b", "llama2-7b")
    for name, lengths in _BATCHES.items()
    # Without grouped heads the KV cache is four times as large: the longest loads say nothing new there.
    if model != "llama2-7b" or sum(lengths) <= 150_000
]
DECODE_VARIANTS = [
    decode("32x4k-page1", [4 * K] * 32, page_size=1),
    decode("32x4k-page8", [4 * K] * 32, page_size=8),
    decode("32x4k-fp8", [4 * K] * 32, cache_dtype="float8_e4m3fn", scales="one"),
    decode("64x4k-fp8", [4 * K] * 64, cache_dtype="float8_e4m3fn", scales="one"),
    _case("8x4k-speculative4", [(4, 4 * K)] * 8, "llama3-8b"),
    decode("8x4k-window1k", [4 * K] * 8, sliding_window=K),
]

PREFILL = [
    *(prefill(f"1x{n}k", [(n * K, n * K)], model) for model in ("llama3-8b", "llama2-13b-tp2") for n in (1, 16, 32)),
    *(prefill("4x4k", [(4 * K, 4 * K)] * 4, model) for model in ("llama3-8b", "llama2-13b-tp2")),
    prefill("1x16k", [(16 * K, 16 * K)], "head-dim-64"),
    prefill("1x16k", [(16 * K, 16 * K)], "gemma2-9b"),
    prefill("chunk2k-behind-30k", [(2 * K, 32 * K)]),
    prefill("1x32k-window4k", [(32 * K, 32 * K)], sliding_window=4 * K),
    prefill("8-zipf-16k", [(n, n) for n in _zipf_prompts(16 * K, 8)]),
    prefill("8x2k", [(2 * K, 2 * K)] * 8),
    prefill("mixed-2x2k-64x4k", [*[(2 * K, 2 * K)] * 2, *[(1, 4 * K)] * 64]),
    prefill("mixed-prefill-alone", [(2 * K, 2 * K)] * 2),
    decode("mixed-decode-alone", [4 * K] * 64),
]


def operations(case: AttentionCase) -> int:
    """Multiplications and additions of the two products over the keys that each row sees."""
    seen = 0
    for rows, context in case.sequences:
        keys = np.arange(context - rows + 1, context + 1)
        seen += int(np.minimum(keys, case.sliding_window or context).sum())
    return 4 * seen * case.num_heads * case.head_dim


def bytes_moved(case: AttentionCase) -> int:
    """The fewest bytes: every visible key and value once, every row of query and result once."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[case.dtype]
    cache_size = 1 if case.cache_dtype else size
    keys = sum(min(context, (case.sliding_window or context) + rows - 1) for rows, context in case.sequences)
    rows = sum(rows for rows, _ in case.sequences)
    return keys * 2 * case.num_kv_heads * case.head_dim * cache_size + 2 * rows * case.num_heads * case.head_dim * size


def limit(case: AttentionCase) -> float:
    """Microseconds that the bytes or the operations take at least."""
    return max(bytes_moved(case) / BYTES_PER_SECOND, operations(case) / OPERATIONS_PER_SECOND) * 1e6
