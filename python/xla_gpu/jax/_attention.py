"""Attention over paged caches, and what writes them."""

# `function` gives these declarations their bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import jax
import jax.typing

from .._core.docstrings import docstring
from .._jax import context_parallel
from .._jax import ragged_paged_attention_v3 as _ragged_paged_attention_v3
from .._jax import ragged_paged_attention_v3_arguments as _ragged_paged_attention_v3_arguments
from .._jax.call import function, ragged
from .._jax.device_group import DeviceGroup
from ..ops import bidirectional_attention as _bidirectional_attention
from ..ops import concat_and_cache_mla as _concat_and_cache_mla
from ..ops import merge_attention_states as _merge_attention_states
from ..ops import mla_attention as _mla_attention
from ..ops import paged_attention as _paged_attention
from ..ops import ragged_paged_attention as _ragged_paged_attention
from ..ops import reshape_and_cache as _reshape_and_cache


@function(_paged_attention.OPERATOR)
def paged_attention(
    query: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    block_tables: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    tree_mask: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """Computes attention of the new tokens of a ragged batch over a paged KV cache."""


@function(_paged_attention.OPERATOR_WITH_LSE)
def paged_attention_with_lse(
    query: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    block_tables: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    tree_mask: jax.typing.ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes paged_attention and the log-sum-exp of each row's scores."""


@function(_bidirectional_attention.OPERATOR)
def bidirectional_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Computes attention of all tokens of a ragged batch over all tokens of their sequence, without a cache."""


@function(_mla_attention.OPERATOR)
def mla_attention(
    query: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    block_tables: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    scale: float,
    value_dim: int,
) -> jax.Array:
    """Computes multi-head latent attention of the new tokens of a ragged batch over a paged cache of latents."""


@function(_mla_attention.OPERATOR_WITH_LSE)
def mla_attention_with_lse(
    query: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    block_tables: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    scale: float,
    value_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes mla_attention and the log-sum-exp of each row's scores."""


@function(_concat_and_cache_mla.OPERATOR)
def concat_and_cache_mla(
    kv_c: jax.typing.ArrayLike,
    k_pe: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    slot_mapping: jax.typing.ArrayLike,
) -> jax.Array:
    """Returns a paged cache of latents with new ones stored.

    The cache is updated in place, without a copy, where XLA may reuse its buffer: donate it
    (``jax.jit(step, donate_argnames="kv_cache")``), or carry it through jax.lax.scan.
    """


@function(_merge_attention_states.OPERATOR)
def merge_attention_states(
    out_a: jax.typing.ArrayLike,
    lse_a: jax.typing.ArrayLike,
    out_b: jax.typing.ArrayLike,
    lse_b: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Merges two attention states into one."""


@function(_reshape_and_cache.OPERATOR)
def reshape_and_cache(
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    slot_mapping: jax.typing.ArrayLike,
    *,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """Returns a paged KV cache with new keys and values stored.

    The cache is updated in place, without a copy, where XLA may reuse its buffer: donate it
    (``jax.jit(step, donate_argnames="kv_cache")``), or carry it through jax.lax.scan.
    """


@function(_ragged_paged_attention.OPERATOR, ragged)
def ragged_paged_attention(
    q: jax.typing.ArrayLike,
    kv_pages: jax.typing.ArrayLike,
    kv_lens: jax.typing.ArrayLike,
    page_indices: jax.typing.ArrayLike,
    cu_q_lens: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
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
) -> jax.Array:
    """Computes paged_attention, with the name and the parameters of torch_xla's operator for TPUs."""


@docstring(_ragged_paged_attention_v3_arguments.DOCSTRING)
def ragged_paged_attention_v3(
    queries: jax.typing.ArrayLike,
    keys: jax.typing.ArrayLike,
    values: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    kv_lens: jax.typing.ArrayLike,
    page_indices: jax.typing.ArrayLike,
    cu_q_lens: jax.typing.ArrayLike,
    distribution: jax.typing.ArrayLike,
    attention_sink: jax.typing.ArrayLike | None = None,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    return_lse: bool = False,
    use_causal_mask: bool = True,
    skip_kv_mask: bool = False,
    mask_value: float | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: object = None,
    p_block_sizes: object = None,
    m_block_sizes: object = None,
    decode_block_sizes: object = None,
    prefill_block_sizes: object = None,
    decode_query_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
) -> tuple[jax.Array, ...]:
    """The cache update and the attention of one layer, by the call of TPU serving projects ("RPA v3")."""
    del mask_value, chunk_prefill_size, d_block_sizes, p_block_sizes, m_block_sizes, decode_block_sizes
    del prefill_block_sizes, decode_query_size, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    del debug_mode, disable_bounds_checks, disable_semaphore_checks
    return _ragged_paged_attention_v3.ragged_paged_attention_v3(
        {
            "queries": queries,
            "keys": keys,
            "values": values,
            "kv_cache": kv_cache,
            "kv_lens": kv_lens,
            "page_indices": page_indices,
            "cu_q_lens": cu_q_lens,
            "distribution": distribution,
            "attention_sink": attention_sink,
        },
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        out_dtype=out_dtype,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        update_kv_cache=update_kv_cache,
        return_lse=return_lse,
        use_causal_mask=use_causal_mask,
        skip_kv_mask=skip_kv_mask,
    )


def context_parallel_paged_attention(
    query: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    block_tables: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    axis: str,
    scale: float,
    soft_cap: float | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    group: DeviceGroup | None = None,
) -> jax.Array:
    """Computes paged_attention of a decode step over sequences whose pages are spread over devices.

    For contexts that one GPU cannot hold or read fast enough, inside jax.shard_map. Page i of a sequence lies on device
    ``i % n`` of the axis's n devices, at ``block_tables[s, i // n]`` of that device's own cache and table. Each device
    attends to its pages (paged_attention_with_lse); the states are gathered and merged (merge_attention_states) in the
    order of devices, so that all of them hold the same bits.

    Args:
      query: T[num_tokens, num_heads, head_dim], the same on every device, at most one row for each sequence.
      kv_cache: this device's pages, in either layout of paged_attention.
      context_lens: int32[max_seqs], tokens of each whole sequence, the new one included; the same on every device.
      block_tables: int32[max_seqs, pages_per_seq], this device's pages of each sequence.
      query_start_loc: int32[max_seqs + 1], as of paged_attention.
      num_seqs: int32[1], or an int, as of paged_attention.
      axis: the name of the mesh axis.
      scale: multiplies q . k.
      soft_cap: as of paged_attention.
      k_scale: as of paged_attention.
      v_scale: as of paged_attention.
      group: a DeviceGroup of ``axis``. With peer memory the states go through it in one exchange instead of XLA's two
        all-gathers. The result is the same but for the sign of zeros.

    Returns:
      T[num_tokens, num_heads, head_dim], the same on every device. It is that of one device with all pages up to the
      rounding of each device's result to T. Sequences with several new tokens, sliding windows and sinks need
      positions in the whole sequence, which a device's pages do not show: they are not supported.

    Raises:
      TypeError: an argument is of another type or dtype.
      ValueError: an argument has another shape, or the call is not inside jax.shard_map over ``axis``.

    Note: Wrong values on the device
      As of paged_attention; errors name paged_attention_with_lse.
    """
    return context_parallel.attention(
        query,
        kv_cache,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        axis=axis,
        group=group,
        scale=scale,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def context_parallel_slots(positions: jax.Array, block_tables: jax.Array, *, page_size: int, axis: str) -> jax.Array:
    """Returns where reshape_and_cache stores new tokens on this device, for context_parallel_paged_attention.

    Args:
      positions: int32[max_seqs], the position of each sequence's new token; negative: none.
      block_tables: int32[max_seqs, pages_per_seq], this device's pages of each sequence.
      page_size: tokens of a page.
      axis: the name of the mesh axis, of an enclosing jax.shard_map.

    Returns:
      int32[max_seqs], a slot of this device's cache, or -1 where another device holds the token's page.

    Raises:
      TypeError: positions or block_tables is no array, or not of integers.
      ValueError: the call is not inside jax.shard_map over ``axis``, an array has another shape, or page_size is no
        positive int.
    """
    return context_parallel.slots(positions, block_tables, page_size, axis)
