"""Attention over paged caches, and what writes them."""

# `function` gives these declarations their bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import torch

from .._torch.functions import function
from ..ops import bidirectional_attention as _bidirectional_attention
from ..ops import concat_and_cache_mla as _concat_and_cache_mla
from ..ops import merge_attention_states as _merge_attention_states
from ..ops import mla_attention as _mla_attention
from ..ops import paged_attention as _paged_attention
from ..ops import ragged_paged_attention as _ragged_paged_attention
from ..ops import reshape_and_cache as _reshape_and_cache


@function(_paged_attention.OPERATOR)
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention of the new tokens of a ragged batch over a paged KV cache."""


@function(_paged_attention.OPERATOR_WITH_LSE)
def paged_attention_with_lse(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes paged_attention and the log-sum-exp of each row's scores."""


@function(_bidirectional_attention.OPERATOR)
def bidirectional_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Computes attention of all tokens of a ragged batch over all tokens of their sequence, without a cache."""


@function(_mla_attention.OPERATOR)
def mla_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """Computes multi-head latent attention of the new tokens of a ragged batch over a paged cache of latents."""


@function(_mla_attention.OPERATOR_WITH_LSE)
def mla_attention_with_lse(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes mla_attention and the log-sum-exp of each row's scores."""


@function(_concat_and_cache_mla.OPERATOR)
def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Returns a paged cache of latents with new ones stored; ``concat_and_cache_mla_`` updates it in place."""


@function(_concat_and_cache_mla.OPERATOR, in_place=True)
def concat_and_cache_mla_(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Stores new latents and rotary keys into a paged cache in place, and returns that cache.

    The cache is not copied; reshape_and_cache_ says what holds for its tensor.
    """


@function(_merge_attention_states.OPERATOR)
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention states into one."""


@function(_reshape_and_cache.OPERATOR)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a paged KV cache with new keys and values stored; ``reshape_and_cache_`` updates it in place."""


@function(_reshape_and_cache.OPERATOR, in_place=True)
def reshape_and_cache_(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores new keys and values into a paged KV cache in place, and returns that cache.

    The cache is not copied. Eager tensors: the kernel writes into it, so it must be row-major, aligned to 16 bytes, and
    share no memory with the other operands. XLA tensors, lazy and under torch.compile: its buffer is donated to the
    program, so pass a tensor of its own rather than a view into a larger one. A clone that torch_xla has not
    materialised yet shares the buffer and is lost with it: call ``torch_xla.sync()`` between clone() and a compiled
    function that updates the cache.
    """


@function(_ragged_paged_attention.OPERATOR)
def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor | int,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """Computes paged_attention, with the name and the parameters of torch_xla's operator for TPUs."""
