"""bidirectional_attention in PyTorch's operations and paged_attention; see ops/bidirectional_attention.py."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .._core import bidirectional_plan
from .._core.operator import OpCall
from .dispatch import Results
from .tensors import check_operands


def run(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    """See ops/bidirectional_attention.py; the arguments have been checked."""
    check_operands(call.name, call.operand_names, tensors)
    names = ("scale", "sliding_window", "soft_cap")
    return (attention(*tensors, **{name: arguments[name] for name in names if name in arguments}),)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The result."""
    num_tokens, max_seqs = query.shape[0], query_start_loc.shape[0] - 1
    if query.device.type == "xla" and not (num_tokens and max_seqs):  # torch_xla has no gathers and slices of nothing
        return _without_sequences(query, key, query_start_loc, num_seqs, scale)
    both = torch.stack([key, value], 2).flatten(1, 2)  # K of head h at 2h, V at 2h + 1
    size = bidirectional_plan.pages(num_tokens, max_seqs, math.prod(both.shape[1:]) * both.itemsize)
    plan = bidirectional_plan.plan(_arrays(query.device), size, num_tokens, query_start_loc, num_seqs)

    def attend(
        query: torch.Tensor, tokens: torch.Tensor, context_lens: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = both.index_select(0, tokens).view(size.num_pages, size.page_size, *both.shape[1:])
        states: tuple[torch.Tensor, torch.Tensor] = torch.ops.xla_gpu.paged_attention_with_lse(
            query,
            cache,
            context_lens,
            plan.block_tables,
            query_start_loc,
            num_seqs,
            scale=scale,
            sliding_window=window,
            soft_cap=soft_cap,
        )
        return states

    out, lse = attend(query, plan.tokens, plan.context_lens, sliding_window)
    if sliding_window == 1:
        return torch.where(plan.is_sound, out, math.nan)
    behind = None if sliding_window is None else sliding_window - 1
    reverse = query.index_select(0, plan.reverse)
    states = attend(reverse, plan.reverse_tokens, plan.reverse_context_lens, behind)
    out_behind, lse_behind = (state.index_select(0, plan.reverse) for state in states)
    # Where two states are NaN, so is their union.
    lse, lse_behind = (torch.where(plan.is_sound, x, math.nan) for x in (lse, lse_behind))
    merged: torch.Tensor = torch.ops.xla_gpu.merge_attention_states(out, lse, out_behind, lse_behind)[0]
    return merged


def _without_sequences(
    query: torch.Tensor, key: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: torch.Tensor, scale: float
) -> torch.Tensor:
    """Zeros, of a call over an empty cache that fails as others do where num_seqs is wrong."""
    if not len(query):
        return torch.zeros_like(query)
    cache = query.new_zeros(1, bidirectional_plan.SMALLEST_PAGE, 2 * key.shape[1], key.shape[2])
    lengths = query_start_loc[1:]
    states = torch.ops.xla_gpu.paged_attention_with_lse(
        query, cache, lengths, lengths[:, None], query_start_loc, num_seqs, scale=scale
    )
    out: torch.Tensor = states[0]
    return out


def _arrays(device: torch.device) -> bidirectional_plan.Arrays:
    return bidirectional_plan.Arrays(
        torch,
        arange=functools.partial(torch.arange, dtype=torch.int32, device=device),
        cumsum=lambda x: x.cumsum(0, dtype=torch.int32),
        take=lambda x, indices: x.index_select(0, indices),
        count_up_to=_compared if device.type == "xla" else _searched,
    )


def _searched(ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(ends, values, right=True, out_int32=True)


def _compared(ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """By one sum, which XLA computes without what it is a sum of; torch_xla has no search."""
    return (ends[None] <= values[:, None]).sum(1, dtype=torch.int32)
