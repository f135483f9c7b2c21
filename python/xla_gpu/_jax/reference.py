"""ragged_paged_attention in JAX's own operations, without a kernel: slow, short, for comparisons."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> jax.Array:
    """See ops/ragged_paged_attention.py; the arguments have been checked."""
    num_pages, page_size, num_combined_heads, head_dim = kv_pages.shape
    max_seqs, pages_per_seq = page_indices.shape
    num_tokens, num_heads, _ = q.shape
    group = num_heads // (num_combined_heads // 2)
    out = jnp.zeros(q.shape, jnp.float32)
    if num_pages * pages_per_seq * num_tokens == 0:
        return out.astype(q.dtype)

    rows = jnp.arange(num_tokens)
    slots = jnp.arange(pages_per_seq * page_size)
    queries = q.astype(jnp.float32)
    for s in range(max_seqs):
        first, end, length = cu_q_lens[s], cu_q_lens[s + 1], kv_lens[s]
        used = (slots < length) & (s < num_seqs[0])
        # The contents of unused entries and slots take no part in indexing and products, where NaN would spread.
        pages = jnp.where(used[::page_size], page_indices[s], 0)
        kv = kv_pages[pages].astype(jnp.float32).reshape(-1, num_combined_heads, head_dim)
        kv = jnp.where(used[:, None, None], kv, 0.0)
        k = jnp.repeat(kv[:, 0::2] * k_scale, group, axis=1)
        v = jnp.repeat(kv[:, 1::2] * v_scale, group, axis=1)

        scores = jnp.einsum("thd,khd->htk", queries, k, precision=jax.lax.Precision.HIGHEST) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        positions = length - end + rows
        visible = used & (slots <= positions[:, None])
        if sliding_window is not None:
            visible = visible & (slots > positions[:, None] - sliding_window)
        visible = visible & ((rows >= first) & (rows < end) & (s < num_seqs[0]))[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
        out = out + jnp.einsum("htk,khd->thd", weights, v, precision=jax.lax.Precision.HIGHEST)
    return out.astype(q.dtype)
