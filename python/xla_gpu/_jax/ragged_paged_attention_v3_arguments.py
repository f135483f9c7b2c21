"""The arguments of ragged_paged_attention_v3: what they are, how they are checked, and what follows from them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.checks import FLOAT8S, FLOATS, SMALLEST_FLOAT32, Checks
from .._core.operator import ArraySpec, check_inputs_requested
from ..ops import paged_attention

DOCSTRING = """
Stores the keys and values of the step's tokens in the cache and attends over it, as one call. The interface is
"RPA v3", which tpu-inference, tokamax and ejkernel share, so that programs written for those move over by their
import. It is reshape_and_cache and paged_attention in one jitted function.

kv_cache is donated, as it is there: its buffer becomes the result's, no copy is made, and the array given must not be
used again. Inside another jax.jit, donate it there.

Args:
  queries: T[num_tokens, num_heads, head_dim], the new tokens of all sequences; T is float32, float16 or bfloat16.
  keys: [num_tokens, num_kv_heads, head_dim], of the cache's dtype, or with a float8 cache of T. A key of the cache's
    dtype is stored as it is; one of T is stored divided by k_scale.
  values: as keys, with v_scale.
  kv_cache: [num_pages, page_size, heads / packing, packing, padded_head_dim] of T, float8_e4m3fn or float8_e5m2.
    packing is 4 bytes over the size of its dtype, heads is 2 * num_kv_heads rounded up to a multiple of packing, and
    padded_head_dim is head_dim rounded up to a multiple of 128. K of head h is head 2h, V is head 2h + 1. head_dim is
    a multiple of 8 up to 256.
  kv_lens: int32[max_seqs], tokens of each sequence, the new ones included.
  page_indices: int32[max_seqs * pages_per_seq], the page numbers of each sequence, one sequence after the other.
  cu_q_lens: int32[max_seqs + 1]; sequence s owns the rows ``cu_q_lens[s]:cu_q_lens[s + 1]`` of queries.
  distribution: int32[3]; distribution[2] is the number of live sequences. The first two numbers say how many of them
    decode and how many read prompts; the kernels here compute that themselves.
  attention_sink: [num_heads], a logit per head that takes part in the softmax's sum and has no value; None: none.
  sm_scale: multiplies q . k.
  sliding_window: a query sees its last ``sliding_window`` keys, itself included; None: all.
  soft_cap: from 2**-100 to 2**13, ``soft_cap * tanh(score / soft_cap)``; None: off.
  out_dtype: of the first result; None: T.
  q_scale: queries are divided by it and rounded to the cache's dtype, and scores are multiplied by it; None: neither.
  k_scale: K is stored * k_scale; None: 1. A number, like the other scales.
  v_scale: V is stored * v_scale; None: 1.
  update_kv_cache: False: the new keys and values are in the cache already.
  return_lse: also return the logarithm of the softmax's sum.
  use_causal_mask: True. Nothing else is supported.
  skip_kv_mask: False. It is for masks that are not causal.
  mask_value: accepted and ignored. Masked keys are left out exactly, which no finite number does.
  chunk_prefill_size: tuning of the TPU kernels: accepted and ignored, like all that follow.
  d_block_sizes: accepted and ignored.
  p_block_sizes: accepted and ignored.
  m_block_sizes: accepted and ignored.
  decode_block_sizes: accepted and ignored.
  prefill_block_sizes: accepted and ignored.
  decode_query_size: accepted and ignored.
  num_kv_pages_per_block: accepted and ignored.
  num_queries_per_block: accepted and ignored.
  vmem_limit_bytes: accepted and ignored.
  debug_mode: accepted and ignored.
  disable_bounds_checks: accepted and ignored.
  disable_semaphore_checks: accepted and ignored.

Returns:
  (out, kv_cache), or with return_lse (out, kv_cache, lse): out [num_tokens, num_heads, head_dim], rows past the live
  sequences 0; the updated cache; lse float32[num_tokens, num_heads], natural logarithm, -inf for rows that see no key.

Raises:
  TypeError: an argument has another dtype or type.
  ValueError: an argument has another shape, or a number is out of its range.

  Wrong numbers on the device are handled as reshape_and_cache and paged_attention say.
"""

_ALIGNMENT = 128  # of head_dim in the cache: lanes of a TPU's vector registers

check = Checks("ragged_paged_attention_v3")


class Shape(NamedTuple):
    """What follows from the shapes."""

    num_pages: int
    page_size: int
    num_kv_heads: int  # in the cache: its padding included
    head_dim: int  # likewise
    pages_per_seq: int


class Options(NamedTuple):
    """The arguments that are no arrays; hashable, since each combination is a program of its own."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    out_dtype: Any
    q_scale: float | None
    k_scale: float
    v_scale: float
    update_kv_cache: bool
    return_lse: bool
    check_inputs: bool  # is read from the environment while the program is traced, and so belongs to its key


def checked_shape(specs: dict[str, ArraySpec]) -> Shape:
    """Checks the arrays, by name. Raises TypeError and ValueError."""
    queries, keys, cache = specs["queries"], specs["keys"], specs["kv_cache"]
    check.dtype("queries", queries, FLOATS)
    num_tokens, num_heads, head_dim = check.rank("queries", queries, "num_tokens, num_heads, head_dim")
    if head_dim % 8 != 0 or not 8 <= head_dim <= paged_attention.MAX_HEAD_DIM:
        raise check.value_error(
            "queries", f"head_dim a multiple of 8 from 8 to {paged_attention.MAX_HEAD_DIM}", queries
        )
    check.dtype("kv_cache", cache, (queries.dtype, *FLOAT8S), f" ({queries.dtype} as queries)")
    axes = "num_tokens, num_kv_heads, head_dim"
    check.dtype("keys", keys, tuple({cache.dtype: 0, queries.dtype: 0}), " (as kv_cache or queries)")
    num_kv_heads = check.rank("keys", keys, axes)[1]
    check.shape("keys", keys, (num_tokens, num_kv_heads, head_dim), axes)
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads != 0:
        raise check.value_error("queries", f"num_heads a multiple of num_kv_heads = {num_kv_heads}", queries)
    check.dtype("values", specs["values"], (keys.dtype,), " (as keys)")
    check.shape("values", specs["values"], keys.shape, axes)

    packs = packing(cache)
    padded_heads, padded_dim = _aligned(2 * num_kv_heads, packs), _aligned(head_dim, _ALIGNMENT)
    if len(cache.shape) != 5 or cache.shape[2:] != (padded_heads // packs, packs, padded_dim) or cache.shape[1] < 1:
        raise check.value_error(
            "kv_cache", f"shape [num_pages, page_size, {padded_heads // packs}, {packs}, {padded_dim}]", cache
        )
    if (cache.shape[0] + 1) * cache.shape[1] > 2**31:
        raise check.value_error("kv_cache", "fewer than 2**31 slots", cache)

    for argument in ("kv_lens", "page_indices", "cu_q_lens", "distribution"):
        check.dtype(argument, specs[argument], ("int32",))
    (max_seqs,) = check.rank("kv_lens", specs["kv_lens"], "max_seqs")
    check.rank("page_indices", specs["page_indices"], "max_seqs * pages_per_seq")
    entries = specs["page_indices"].shape[0]
    if entries % max(max_seqs, 1) != 0 or (max_seqs == 0 and entries != 0):
        raise check.value_error("page_indices", f"a multiple of max_seqs = {max_seqs} entries", specs["page_indices"])
    check.shape("cu_q_lens", specs["cu_q_lens"], (max_seqs + 1,), "max_seqs + 1")
    check.shape("distribution", specs["distribution"], (3,), "3")
    if (sink := specs.get("attention_sink")) is not None:
        check.dtype("attention_sink", sink, FLOATS)
        check.shape("attention_sink", sink, (num_heads,), "num_heads")
    return Shape(*cache.shape[:2], padded_heads // 2, padded_dim, entries // max(max_seqs, 1))


def checked_options(
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out_dtype: Any,
    q_scale: float | None,
    k_scale: float | None,
    v_scale: float | None,
    update_kv_cache: bool,
    return_lse: bool,
    use_causal_mask: bool,
    skip_kv_mask: bool,
) -> Options:
    """Checks the other arguments. Raises TypeError and ValueError."""
    if not use_causal_mask:
        raise check.value_error("use_causal_mask", "True: the kernels are causal", use_causal_mask)
    if skip_kv_mask:
        raise check.value_error("skip_kv_mask", "False with a causal mask", skip_kv_mask)
    if out_dtype is not None and jnp.dtype(out_dtype).name not in FLOATS:
        raise check.type_error("out_dtype", " or ".join(FLOATS), jnp.dtype(out_dtype).name)

    def factor(argument: str, value: float | None) -> float:
        expected = "a float32 number > 0"
        return 1.0 if value is None else float(check.float32(argument, value, SMALLEST_FLOAT32, expected=expected))

    return Options(
        scale=float(check.float32("sm_scale", sm_scale)),
        sliding_window=None if sliding_window is None else check.integer("sliding_window", sliding_window, 1),
        soft_cap=None if soft_cap is None else float(paged_attention.check_soft_cap(check, soft_cap)),
        out_dtype=None if out_dtype is None else jnp.dtype(out_dtype),
        q_scale=None if q_scale is None else factor("q_scale", q_scale),
        k_scale=factor("k_scale", k_scale),
        v_scale=factor("v_scale", v_scale),
        update_kv_cache=bool(update_kv_cache),
        return_lse=bool(return_lse),
        check_inputs=check_inputs_requested(),
    )


def packing(kv_cache: ArraySpec) -> int:
    """Rows of K and V that stand in one row of the cache, side by side in 32 bits."""
    return 4 // np.dtype(kv_cache.dtype).itemsize


def _aligned(size: int, alignment: int) -> int:
    return math.ceil(size / alignment) * alignment
