"""The loads that are measured, as the tests' cases: shapes named after models and after what serving does with them."""

from __future__ import annotations

import dataclasses
import itertools
import zlib

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


# ---- Classes of loads, of which members are drawn


class Draw:
    """Numbers for the members of a class: the same for a seed on every machine."""

    def __init__(self, seed: int, name: str) -> None:
        self.random = np.random.RandomState([seed, zlib.crc32(name.encode())])

    def number(self, least: int, most: int, multiple_of: int = 1) -> int:
        return int(self.random.randint(least // multiple_of, most // multiple_of + 1)) * multiple_of

    def of(self, *choices):
        return choices[self.random.randint(len(choices))]

    def case(self, sequences: list[tuple[int, int]], group: int, kv_heads: int, head_dim: int, **changes):
        """A case that is named after its load and heads."""
        kinds = [f"{sum(1 for _ in run)}x{kind}" for kind, run in itertools.groupby(map(_load_name, sequences))]
        fields = {"num_heads": group * kv_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
        fields |= {"dtype": "bfloat16", "page_size": self.of(16, 32)}
        fields |= {"spare_seqs": 0, "spare_columns": 0, "padding_tokens": 0, **changes}
        heads = f"{group * kv_heads}/{kv_heads}, {head_dim}"
        return AttentionCase(f"{' + '.join(kinds)} {heads}", tuple(sequences), **fields)


def _load_name(sequence: tuple[int, int]) -> str:
    rows, context = sequence
    return str(rows) if rows == context else f"{rows} of {context}"


def _several_rows(draw: Draw) -> AttentionCase:
    group, rows = draw.of(4, 7, 8), draw.number(4, 8)
    if group * rows <= 16:
        rows += 1
    return draw.case([(rows, draw.number(1 * K, 8 * K, 64))] * draw.of(1, 4, 8, 16, 32), group, draw.of(4, 8), 128)


def _odd_groups(draw: Draw) -> AttentionCase:
    lengths = [(1, draw.number(2 * K, 4 * K))] * draw.number(16, 32, 4)
    return draw.case(lengths, draw.of(5, 6, 7), draw.of(2, 4), 128)


def _decode_head_dim_64(draw: Draw) -> AttentionCase:
    lengths = [(1, draw.number(1 * K, 16 * K, 64))] * draw.of(1, 4, 8, 16, 32, 64)
    return draw.case(lengths, draw.of(1, 4, 8), draw.of(2, 4, 8), 64)


def _short_decode(draw: Draw) -> AttentionCase:
    """Sequences of a few tiles of keys each, of unequal lengths."""
    group, kv_heads = draw.of((7, 4), (4, 8), (8, 8), (8, 1), (8, 2), (6, 4), (1, 16), (2, 8))
    least = draw.number(60, 350)
    most = least + draw.of(0, 200, 500, 900)
    case = draw.case([(1, draw.number(least, most)) for _ in range(draw.number(12, 200))], group, kv_heads, 128)
    lengths = f"{least}" if least == most else f"{least}..{most}"
    heads = f"{case.num_heads}/{kv_heads}, {case.head_dim}"
    return dataclasses.replace(case, name=f"{len(case.sequences)}x1 of {lengths} {heads}")


def _short_prompt(draw: Draw) -> AttentionCase:
    tokens = draw.number(64, 256)
    return draw.case([(tokens, tokens)], draw.of(4, 8), 8, 128)


def _prompt_1k_2k(draw: Draw) -> AttentionCase:
    tokens = draw.of(1 * K, 2 * K)
    return draw.case([(tokens, tokens)], draw.of(1, 4, 8), 8, 128)


def _short_prompts(draw: Draw) -> AttentionCase:
    count, tokens = draw.of((16, 512), (32, 128), (64, 64), (24, 300), (48, 90))
    return draw.case([(tokens, tokens)] * count, draw.of(4, 8), draw.of(4, 8), 128)


def _chunks(draw: Draw) -> AttentionCase:
    rows, behind = draw.number(256, 2 * K, 64), draw.number(6 * K, 30 * K, 64)
    return draw.case([(rows, behind + rows)] * draw.of(1, 2, 4, 8), draw.of(4, 8), draw.of(4, 8), 128)


def _chunks_few_heads(draw: Draw) -> AttentionCase:
    """As tensor parallelism makes them: fewer work tiles than SMs."""
    rows, behind = draw.number(256, 1 * K, 64), draw.number(6 * K, 16 * K, 64)
    group, kv_heads = draw.of((4, 2), (4, 4), (4, 8), (8, 1), (8, 2))
    return draw.case([(rows, behind + rows)] * draw.of(1, 1, 2, 4), group, kv_heads, 128)


def _short_chunk_and_decode(draw: Draw) -> AttentionCase:
    rows, behind = draw.number(64, 511), draw.number(2 * K, 8 * K)
    sequences = [(rows, behind + rows), *[(1, draw.number(1 * K, 4 * K, 64))] * 64]
    return draw.case(sequences, draw.of(4, 8), 8, 128)


def _chunk_and_decode(draw: Draw) -> AttentionCase:
    return draw.case([(2 * K, 10 * K), *[(1, draw.number(2 * K, 6 * K, 64))] * 32], draw.of(4, 8), 8, 128)


def _prefill_head_dim_64(draw: Draw) -> AttentionCase:
    tokens = draw.of(1 * K, 4 * K, 8 * K)
    return draw.case([(tokens, tokens)] * draw.of(1, 4), draw.of(4, 8), draw.of(4, 8), 64)


def _gemma_2(draw: Draw) -> AttentionCase:
    tokens = draw.of(4 * K, 8 * K)
    return draw.case([(tokens, tokens)] * draw.of(1, 2), 2, draw.of(4, 8), 256, sliding_window=4 * K, soft_cap=50.0)


def _prompt_128k(draw: Draw) -> AttentionCase:
    return draw.case([(128 * K, 128 * K)], draw.of(4, 8), 4, 128)


def _float8_prefill(draw: Draw) -> AttentionCase:
    rows, behind = draw.of(1 * K, 2 * K, 4 * K), draw.of(0, 0, 8 * K)
    return draw.case([(rows, behind + rows)], 4, 8, 128, cache_dtype="float8_e4m3fn", scales="one")


CLASSES = {
    "several-rows": _several_rows,
    "odd-groups": _odd_groups,
    "decode-head-dim-64": _decode_head_dim_64,
    "short-decode": _short_decode,
    "short-prompt": _short_prompt,
    "prompt-1k-2k": _prompt_1k_2k,
    "short-prompts": _short_prompts,
    "chunks": _chunks,
    "chunks-few-heads": _chunks_few_heads,
    "short-chunk-and-decode": _short_chunk_and_decode,
    "chunk-and-decode": _chunk_and_decode,
    "prefill-head-dim-64": _prefill_head_dim_64,
    "gemma-2": _gemma_2,
    "prompt-128k": _prompt_128k,
    "float8-prefill": _float8_prefill,
}


def members(name: str, count: int, seed: int) -> list[AttentionCase]:
    """Members of a class, drawn by a seed. Tune to the class: other seeds draw others."""
    draw = Draw(seed, name)
    cases = [CLASSES[name](draw) for _ in range(count)]
    return [dataclasses.replace(case, name=f"{name}: {case.name}") for case in cases]


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


def calls_to_time(case: AttentionCase, usual: int = 20) -> int:
    """How many calls a CUDA graph takes: fewer where each lasts long."""
    return 3 if operations(case) > 1e11 else usual


def limit(case: AttentionCase) -> float:
    """Microseconds that the bytes or the operations take at least."""
    return max(bytes_moved(case) / BYTES_PER_SECOND, operations(case) / OPERATIONS_PER_SECOND) * 1e6
