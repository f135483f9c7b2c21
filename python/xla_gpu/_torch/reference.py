"""ragged_paged_attention in PyTorch's own operations, without a kernel: slow, short, for comparisons.

No value of a tensor decides what is computed, so it runs on any device, lazily and compiled too.
"""

from __future__ import annotations

import torch


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """See ops/ragged_paged_attention.py; the arguments have been checked."""
    num_pages, page_size, num_combined_heads, head_dim = kv_pages.shape
    max_seqs, pages_per_seq = page_indices.shape
    num_tokens, num_heads, _ = q.shape
    group = num_heads // (num_combined_heads // 2)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    if num_pages * pages_per_seq * num_tokens == 0:
        return out.to(q.dtype)

    rows = torch.arange(num_tokens, device=q.device)
    slots = torch.arange(pages_per_seq * page_size, device=q.device)
    queries = q.float()
    pages_in_float32 = kv_pages.float()
    for s in range(max_seqs):
        first, end, length = cu_q_lens[s], cu_q_lens[s + 1], kv_lens[s]
        used = (slots < length) & (s < num_seqs)
        # The contents of unused entries and slots take no part in indexing and products, where NaN would spread.
        pages = torch.where(used[::page_size], page_indices[s], 0).long()
        kv = pages_in_float32[pages].reshape(-1, num_combined_heads, head_dim)
        kv = torch.where(used[:, None, None], kv, 0.0)
        k = (kv[:, 0::2] * k_scale).repeat_interleave(group, dim=1)
        v = (kv[:, 1::2] * v_scale).repeat_interleave(group, dim=1)

        scores = torch.einsum("thd,khd->htk", queries, k) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = length - end + rows
        visible = used & (slots <= positions[:, None])
        if sliding_window is not None:
            visible = visible & (slots > positions[:, None] - sliding_window)
        visible = visible & ((rows >= first) & (rows < end) & (s < num_seqs))[:, None]
        scores = torch.where(visible, scores, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
        total = weights.sum(dim=-1, keepdim=True)
        out = out + torch.einsum("htk,khd->thd", weights / torch.where(total == 0, 1.0, total), v)
    return out.to(q.dtype)
