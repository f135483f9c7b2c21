"""The same computations by plain PyTorch in the operators' own dtype: gather the pages, matmul, softmax, matmul, as the
eager attention of Hugging Face's models does it."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.common import reference
from tests.common.arrays import to_numpy, to_torch
from tests.common.cases import AttentionInputs


def paged_attention(
    inputs: AttentionInputs, *, scale: float, sliding_window: int | None = None, soft_cap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out in the query's dtype, lse float32)."""
    query = to_torch(inputs.query)
    k_pages, v_pages = reference.split_cache(inputs.kv_cache)
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    num_tokens, num_heads, _ = query.shape

    def gathered(cache, kv_scale):
        keys = to_torch(cache[pages].reshape(-1, num_kv_heads, head_dim)[:context_len])
        if kv_scale is None:
            return keys
        kv_scale = torch.from_numpy(kv_scale).expand(num_kv_heads)[:, None]
        return (keys.float() * kv_scale).to(query.dtype)

    out = torch.zeros_like(query)
    lse = torch.full((num_tokens, num_heads), -math.inf)
    for s in range(int(inputs.num_seqs[0])):
        context_len = int(inputs.context_lens[s])
        first, last = int(inputs.query_start_loc[s]), int(inputs.query_start_loc[s + 1])
        if first == last or context_len == 0:
            continue
        pages = inputs.block_tables[s, : math.ceil(context_len / page_size)]
        k, v = gathered(k_pages, inputs.k_scale), gathered(v_pages, inputs.v_scale)
        k = k.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(0, 1)
        v = v.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(0, 1)
        q = query[first:last].transpose(0, 1)

        scores = torch.matmul(q, k.transpose(1, 2)) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        mask = None if inputs.tree_mask is None else inputs.tree_mask[first:last]
        hidden = torch.from_numpy(reference.hidden_keys(last - first, context_len, sliding_window, mask))
        scores = scores.masked_fill(hidden, -math.inf)
        if inputs.sinks is not None:
            sinks = torch.from_numpy(inputs.sinks).to(scores.dtype)[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        sees = ~hidden.all(dim=1)  # rows before the context's begin see no key
        weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)[..., :context_len]
        rows = torch.matmul(weights, v).transpose(0, 1)
        out[first:last][sees] = rows[sees]
        lse[first:last] = torch.logsumexp(scores.float(), dim=-1).transpose(0, 1).masked_fill(~sees[:, None], -math.inf)
    return to_numpy(out), lse.numpy()


def merge_attention_states(out_a, lse_a, out_b, lse_b) -> tuple[np.ndarray, np.ndarray]:
    out_a, lse_a, out_b, lse_b = map(to_torch, (out_a, lse_a, out_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).nan_to_num(0)[..., None].to(out_a.dtype)
    weight_b = torch.exp(lse_b - lse).nan_to_num(0)[..., None].to(out_b.dtype)
    return to_numpy(out_a * weight_a + out_b * weight_b), lse.numpy()


def linear(x, *args, bias=None, residual=None, activation: str | None = None, **kwargs) -> np.ndarray:
    """torch.nn.functional.linear with the weight's values in x's dtype."""
    values = to_torch(reference.linear_weight(*args, **kwargs).astype(x.dtype))
    out = torch.nn.functional.linear(to_torch(x), values, None if bias is None else to_torch(bias))
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        silu = activation == "silu_and_mul"
        out = (torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")) * up
    return to_numpy(out if residual is None else out + to_torch(residual))
