"""plain_torch without PyTorch: every product and every function is computed in float32 and rounded to the operators'
dtype, as PyTorch does it on a CPU."""

from __future__ import annotations

import math

import numpy as np

from tests.common import reference
from tests.common.cases import AttentionInputs


def paged_attention(
    inputs: AttentionInputs, *, scale: float, sliding_window: int | None = None, soft_cap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out in the query's dtype, lse float32)."""
    dtype = inputs.query.dtype
    k_pages, v_pages = reference.split_cache(inputs.kv_cache)
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    num_tokens, num_heads, _ = inputs.query.shape
    group = num_heads // num_kv_heads

    def rounded(x):
        return x.astype(dtype).astype(np.float32)

    def gathered(cache, kv_scale):
        """float32[num_heads, context_len, head_dim]"""
        keys = cache[pages].reshape(-1, num_kv_heads, head_dim)[:context_len].astype(np.float32)
        if kv_scale is not None:
            keys = rounded(keys * np.broadcast_to(kv_scale, (num_kv_heads,))[:, None])
        return keys.repeat(group, axis=1).transpose(1, 0, 2)

    out = np.zeros(inputs.query.shape, dtype)
    lse = np.full((num_tokens, num_heads), -math.inf, np.float32)
    for s in range(int(inputs.num_seqs[0])):
        context_len = int(inputs.context_lens[s])
        first, last = int(inputs.query_start_loc[s]), int(inputs.query_start_loc[s + 1])
        if first == last or context_len == 0:
            continue
        pages = inputs.block_tables[s, : math.ceil(context_len / page_size)]
        k, v = gathered(k_pages, inputs.k_scale), gathered(v_pages, inputs.v_scale)
        q = inputs.query[first:last].astype(np.float32).transpose(1, 0, 2)

        scores = rounded(rounded(q @ k.transpose(0, 2, 1)) * np.float32(scale))
        if soft_cap is not None:
            scores = rounded(rounded(np.tanh(rounded(scores / np.float32(soft_cap)))) * np.float32(soft_cap))
        mask = None if inputs.tree_mask is None else inputs.tree_mask[first:last]
        hidden = reference.hidden_keys(last - first, context_len, sliding_window, mask)
        scores = np.where(hidden, np.float32(-math.inf), scores)
        if inputs.sinks is not None:
            sinks = np.broadcast_to(rounded(inputs.sinks)[:, None, None], (num_heads, last - first, 1))
            scores = np.concatenate([scores, sinks], axis=-1)
        sees = ~hidden.all(axis=1)  # rows before the context's begin see no key
        seen = scores[:, sees]
        largest = seen.max(axis=-1, keepdims=True)
        weights = np.exp(seen - largest)
        total = weights.sum(axis=-1, keepdims=True)
        rows = rounded(weights / total)[..., :context_len] @ v
        out[first:last][sees] = rows.transpose(1, 0, 2).astype(dtype)
        lse[first:last][sees] = (largest + np.log(total))[..., 0].T
    return out, lse


def merge_attention_states(out_a, lse_a, out_b, lse_b) -> tuple[np.ndarray, np.ndarray]:
    dtype = out_a.dtype
    with np.errstate(invalid="ignore"):  # -inf - -inf: a row that saw no key on either side
        lse = np.logaddexp(lse_a, lse_b)
        weights = [
            np.nan_to_num(np.exp(part - lse))[..., None].astype(dtype).astype(np.float32) for part in (lse_a, lse_b)
        ]
    a, b = (
        (x.astype(np.float32) * w).astype(dtype).astype(np.float32)
        for x, w in zip((out_a, out_b), weights, strict=True)
    )
    return (a + b).astype(dtype), lse


def linear(x, *args, bias=None, residual=None, activation: str | None = None, **kwargs) -> np.ndarray:
    """The product in float32 of values in x's dtype, rounded where PyTorch rounds."""
    values = reference.linear_weight(*args, **kwargs).astype(x.dtype).astype(np.float32)
    out = x.astype(np.float32) @ values.T
    out = (out if bias is None else out + bias.astype(np.float32)).astype(x.dtype)
    if activation is not None:
        gate, up = np.split(out.astype(np.float32), 2, axis=-1)
        if activation == "silu_and_mul":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1 + np.tanh(0.7978845608 * (gate + 0.044715 * gate**3)))
        out = (gate.astype(x.dtype).astype(np.float32) * up).astype(x.dtype)
    if residual is None:
        return out
    return (out.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
