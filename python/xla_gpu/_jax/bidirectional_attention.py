"""bidirectional_attention in JAX's operations and paged_attention; see ops/bidirectional_attention.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._core import bidirectional_plan
from .._core.operator import OpCall
from ..ops import merge_attention_states, paged_attention
from . import call as operators
from . import composite

_ARRAYS = bidirectional_plan.Arrays(
    jnp,
    arange=lambda size: jnp.arange(size, dtype=jnp.int32),
    cumsum=lambda x: jnp.cumsum(x, 0, dtype=jnp.int32),
    take=lambda x, indices: x.at[indices].get(mode="promise_in_bounds"),
    # By one sum, which XLA computes without what it is a sum of.
    count_up_to=lambda ends, values: jnp.sum(ends[None] <= values[:, None], 1, dtype=jnp.int32),
)


def run(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/bidirectional_attention.py; the arguments have been checked."""
    return composite.run(_attention, call, arrays, arguments)


def _attention(
    arrays: dict[str, jax.Array], scale: float, sliding_window: int | None = None, soft_cap: float | None = None
) -> jax.Array:
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    batch = {name: arrays[name] for name in ("query_start_loc", "num_seqs")}
    num_tokens, num_kv_heads, head_dim = key.shape
    max_seqs = arrays["query_start_loc"].shape[0] - 1
    both = jnp.stack([key, value], 2).reshape(num_tokens, 2 * num_kv_heads, head_dim)  # K of head h at 2h, V at 2h + 1
    size = bidirectional_plan.pages(num_tokens, max_seqs, 2 * num_kv_heads * head_dim * both.dtype.itemsize)
    plan = bidirectional_plan.plan(_ARRAYS, size, num_tokens, **batch)

    def attend(
        query: jax.Array, tokens: jax.Array, context_lens: jax.Array, window: int | None
    ) -> tuple[jax.Array, jax.Array]:
        cache = _ARRAYS.take(both, tokens).reshape(size.num_pages, size.page_size, *both.shape[1:])
        out, lse = operators.call(
            paged_attention.OPERATOR_WITH_LSE,
            query=query,
            kv_cache=cache,
            context_lens=context_lens,
            block_tables=plan.block_tables,
            **batch,
            scale=scale,
            sliding_window=window,
            soft_cap=soft_cap,
        )
        return out, lse

    out, lse = attend(query, plan.tokens, plan.context_lens, sliding_window)
    if sliding_window == 1:
        return jnp.where(plan.is_sound, out, jnp.asarray(jnp.nan, out.dtype))
    behind = None if sliding_window is None else sliding_window - 1
    reverse = _ARRAYS.take(query, plan.reverse)
    states = attend(reverse, plan.reverse_tokens, plan.reverse_context_lens, behind)
    out_behind, lse_behind = (_ARRAYS.take(state, plan.reverse) for state in states)
    # Where two states are NaN, so is their union.
    nan = jnp.asarray(jnp.nan, lse.dtype)
    merged: jax.Array = operators.call(
        merge_attention_states.OPERATOR,
        out_a=out,
        lse_a=jnp.where(plan.is_sound, lse, nan),
        out_b=out_behind,
        lse_b=jnp.where(plan.is_sound, lse_behind, nan),
    )[0]
    return merged
