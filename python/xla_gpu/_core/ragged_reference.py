"""ragged_paged_attention in a framework's own operations, without a kernel: slow, short, for comparisons.

No value of an array decides what is computed, so it runs lazily, compiled and on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Arrays(NamedTuple):
    """What PyTorch and JAX do not name alike."""

    numpy: Any  # the module with einsum, where, …: torch or jax.numpy
    arange: Callable[[int], Any]  # on the operands' device
    cast: Callable[[Any, Any], Any]  # of an array to a dtype
    take: Callable[[Any, Any], Any]  # rows of an array by integers


def ragged_paged_attention(
    arrays: Arrays,
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> Any:
    """See ops/ragged_paged_attention.py; the arguments have been checked."""
    np, arange, cast, take = arrays
    num_pages, page_size, num_combined_heads, head_dim = kv_pages.shape
    max_seqs, pages_per_seq = page_indices.shape
    num_tokens, num_heads, _ = q.shape
    num_kv_heads = num_combined_heads // 2
    if num_pages * pages_per_seq * num_tokens == 0:
        return np.zeros_like(q)

    rows, slots = arange(num_tokens), arange(pages_per_seq * page_size)
    queries = cast(q, np.float32).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = np.zeros_like(queries)
    for s in range(max_seqs):
        first, end, length = cu_q_lens[s], cu_q_lens[s + 1], kv_lens[s]
        used = (slots < length) & (s < num_seqs[0])
        # The contents of unused entries and slots take no part in indexing and products, where NaN would spread.
        pages = np.where(used[::page_size], page_indices[s], 0)
        kv = cast(take(kv_pages, pages), np.float32).reshape(-1, num_combined_heads, head_dim)
        kv = np.where(used[:, None, None], kv, 0.0)

        scores = np.einsum("thgd,khd->hgtk", queries, kv[:, 0::2] * k_scale) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        positions = length - end + rows
        visible = used & (slots <= positions[:, None])
        if sliding_window is not None:
            visible = visible & (slots > positions[:, None] - sliding_window)
        visible = visible & ((rows >= first) & (rows < end) & (s < num_seqs[0]))[:, None]
        scores = np.where(visible, scores, -float("inf"))
        top = np.amax(scores, -1)[..., None]
        weights = np.exp(scores - np.where(top == -float("inf"), 0.0, top))
        total = np.sum(weights, -1)[..., None]
        out = out + np.einsum("hgtk,khd->thgd", weights / np.where(total == 0, 1.0, total), kv[:, 1::2] * v_scale)
    return cast(out.reshape(q.shape), q.dtype)
