"""Inputs of ragged_paged_attention_v3, made from the cases of paged_attention, and its results by the reference."""

from __future__ import annotations

import numpy as np

from tests.common import cases, reference


def aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def pack(cache: np.ndarray) -> np.ndarray:
    """A rank-4 cache in the layout of RPA v3; padding is zero."""
    pages, page_size, heads, dim = cache.shape
    packing = 4 // cache.dtype.itemsize
    packed = np.zeros((pages, page_size, aligned(heads, packing), aligned(dim, 128)), cache.dtype)
    packed[:, :, :heads, :dim] = cache
    return packed.reshape(pages, page_size, -1, packing, packed.shape[-1])


def unpack(packed: np.ndarray, num_kv_heads: int, head_dim: int) -> np.ndarray:
    pages, page_size, *_, dim = packed.shape
    return np.asarray(packed).reshape(pages, page_size, -1, dim)[:, :, : 2 * num_kv_heads, :head_dim]


def build(case: cases.AttentionCase, poison: bool = True) -> dict[str, np.ndarray]:
    """The arguments by name. The new tokens' keys and values are taken out of the cache, which holds zeros there."""
    inputs = cases.build(case, poison=poison)
    cache, tables = inputs.kv_cache.copy(), inputs.block_tables
    num_tokens, shape = len(inputs.query), (len(inputs.query), case.num_kv_heads, case.head_dim)
    keys, values = (np.full(shape, np.nan if poison else 0, cache.dtype) for _ in range(2))
    for s, (q_len, context_len) in enumerate(case.sequences):
        new = range(max(context_len - q_len, 0), context_len)
        for row, position in zip(range(int(inputs.query_start_loc[s + 1]) - len(new), num_tokens), new, strict=False):
            page, offset = tables[s, position // case.page_size], position % case.page_size
            keys[row], values[row] = cache[page, offset, 0::2], cache[page, offset, 1::2]
            cache[page, offset] = 0
    live = len(case.sequences)
    arrays = {
        "queries": inputs.query,
        "keys": keys,
        "values": values,
        "kv_cache": pack(cache),
        "kv_lens": inputs.context_lens,
        "page_indices": tables.reshape(-1),
        "cu_q_lens": inputs.query_start_loc,
        "distribution": np.array([0, 0, live], np.int32),
    }
    if inputs.sinks is not None:
        arrays["attention_sink"] = inputs.sinks
    return arrays


def options(case: cases.AttentionCase) -> dict:
    return {"sm_scale": case.softmax_scale, "sliding_window": case.sliding_window, "soft_cap": case.soft_cap}


def expected(case: cases.AttentionCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, cache), the cache as paged_attention takes it."""
    inputs = cases.build(case)
    out, lse = reference.paged_attention(**inputs.arrays(), **case.options())
    return out, lse, inputs.kv_cache
