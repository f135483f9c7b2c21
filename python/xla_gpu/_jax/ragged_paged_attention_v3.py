"""ragged_paged_attention_v3: the cache update and the attention of one layer, by the call that TPU kernels have.

The interface is that of tpu_inference.kernels.ragged_paged_attention.v3 ("RPA v3"), which tokamax and ejkernel share.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental.layout import Layout, with_layout_constraint

from .._core.attributes import Text
from .._core.checks import FLOAT8S, FLOATS, SMALLEST_FLOAT32, Checks
from .._core.operator import CACHED_CALLS, ArraySpec, OpCall, check_inputs_requested
from .._core.partitioning import Partitioning
from ..ops import paged_attention, reshape_and_cache
from . import call
from .gradients import with_derivative
from .partition import DIVIDES_OPERATIONS, explicit_shardings, partitioned

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

_check = Checks("ragged_paged_attention_v3")


class _Shape(NamedTuple):
    """What follows from the shapes."""

    num_pages: int
    page_size: int
    num_kv_heads: int  # in the cache: its padding included
    head_dim: int  # likewise
    pages_per_seq: int


class _Options(NamedTuple):
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


def ragged_paged_attention_v3(arrays: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
    """See DOCSTRING; ``arrays`` holds all array arguments by name, None for no attention_sink."""
    arrays = {
        name: call.as_array(f"{_check.name}: {name}", x)
        for name, x in arrays.items()
        if x is not None or name != "attention_sink"
    }
    _checked_shape(_specs(arrays))
    results: tuple[jax.Array, ...] = _program(arrays.pop("kv_cache"), arrays, _checked_options(**options))
    return results


def _specs(arrays: dict[str, Any]) -> dict[str, ArraySpec]:
    return {name: ArraySpec(tuple(x.shape), x.dtype.name) for name, x in arrays.items()}


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked_shape(specs: dict[str, ArraySpec]) -> _Shape:
    queries, keys, cache = specs["queries"], specs["keys"], specs["kv_cache"]
    _check.dtype("queries", queries, FLOATS)
    num_tokens, num_heads, head_dim = _check.rank("queries", queries, "num_tokens, num_heads, head_dim")
    if head_dim % 8 != 0 or not 8 <= head_dim <= paged_attention.MAX_HEAD_DIM:
        raise _check.value_error(
            "queries", f"head_dim a multiple of 8 from 8 to {paged_attention.MAX_HEAD_DIM}", queries
        )
    _check.dtype("kv_cache", cache, (queries.dtype, *FLOAT8S), f" ({queries.dtype} as queries)")
    axes = "num_tokens, num_kv_heads, head_dim"
    _check.dtype("keys", keys, tuple({cache.dtype: 0, queries.dtype: 0}), " (as kv_cache or queries)")
    num_kv_heads = _check.rank("keys", keys, axes)[1]
    _check.shape("keys", keys, (num_tokens, num_kv_heads, head_dim), axes)
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads != 0:
        raise _check.value_error("queries", f"num_heads a multiple of num_kv_heads = {num_kv_heads}", queries)
    _check.dtype("values", specs["values"], (keys.dtype,), " (as keys)")
    _check.shape("values", specs["values"], keys.shape, axes)

    packing = _packing(cache)
    padded_heads, padded_dim = _aligned(2 * num_kv_heads, packing), _aligned(head_dim, _ALIGNMENT)
    if len(cache.shape) != 5 or cache.shape[2:] != (padded_heads // packing, packing, padded_dim) or cache.shape[1] < 1:
        raise _check.value_error(
            "kv_cache", f"shape [num_pages, page_size, {padded_heads // packing}, {packing}, {padded_dim}]", cache
        )
    if (cache.shape[0] + 1) * cache.shape[1] > 2**31:
        raise _check.value_error("kv_cache", "fewer than 2**31 slots", cache)

    for argument in ("kv_lens", "page_indices", "cu_q_lens", "distribution"):
        _check.dtype(argument, specs[argument], ("int32",))
    (max_seqs,) = _check.rank("kv_lens", specs["kv_lens"], "max_seqs")
    _check.rank("page_indices", specs["page_indices"], "max_seqs * pages_per_seq")
    entries = specs["page_indices"].shape[0]
    if entries % max(max_seqs, 1) != 0 or (max_seqs == 0 and entries != 0):
        raise _check.value_error("page_indices", f"a multiple of max_seqs = {max_seqs} entries", specs["page_indices"])
    _check.shape("cu_q_lens", specs["cu_q_lens"], (max_seqs + 1,), "max_seqs + 1")
    _check.shape("distribution", specs["distribution"], (3,), "3")
    if (sink := specs.get("attention_sink")) is not None:
        _check.dtype("attention_sink", sink, FLOATS)
        _check.shape("attention_sink", sink, (num_heads,), "num_heads")
    return _Shape(*cache.shape[:2], padded_heads // 2, padded_dim, entries // max(max_seqs, 1))


def _checked_options(
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
) -> _Options:
    if not use_causal_mask:
        raise _check.value_error("use_causal_mask", "True: the kernels are causal", use_causal_mask)
    if skip_kv_mask:
        raise _check.value_error("skip_kv_mask", "False with a causal mask", skip_kv_mask)
    if out_dtype is not None and jnp.dtype(out_dtype).name not in FLOATS:
        raise _check.type_error("out_dtype", " or ".join(FLOATS), jnp.dtype(out_dtype).name)

    def factor(argument: str, value: float | None) -> float:
        expected = "a float32 number > 0"
        return 1.0 if value is None else float(_check.float32(argument, value, SMALLEST_FLOAT32, expected=expected))

    return _Options(
        scale=float(_check.float32("sm_scale", sm_scale)),
        sliding_window=None if sliding_window is None else _check.integer("sliding_window", sliding_window, 1),
        soft_cap=None if soft_cap is None else float(paged_attention.check_soft_cap(_check, soft_cap)),
        out_dtype=None if out_dtype is None else jnp.dtype(out_dtype),
        q_scale=None if q_scale is None else factor("q_scale", q_scale),
        k_scale=factor("k_scale", k_scale),
        v_scale=factor("v_scale", v_scale),
        update_kv_cache=bool(update_kv_cache),
        return_lse=bool(return_lse),
        check_inputs=check_inputs_requested(),
    )


def _packing(kv_cache: ArraySpec) -> int:
    """Rows of K and V that stand in one row of the cache, side by side in 32 bits."""
    return 4 // np.dtype(kv_cache.dtype).itemsize


def _aligned(size: int, alignment: int) -> int:
    return math.ceil(size / alignment) * alignment


# ---- The program -----------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _program(kv_cache: jax.Array, arrays: dict[str, jax.Array], options: _Options) -> tuple[jax.Array, ...]:
    arrays = {"kv_cache": kv_cache, **arrays}
    if call.varying_axes(list(arrays.values())):  # inside jax.shard_map: the arrays are a device's own
        return _attention(arrays, options)
    described, function = _divided(tuple(_specs(arrays).items()), options)
    shardings = explicit_shardings(described, list(arrays.values()))
    if shardings is not None and not DIVIDES_OPERATIONS:  # the cache is gathered
        return _attention(arrays, options)
    if shardings is not None:
        function = jax.sharding.auto_axes(function, out_sharding=shardings)
    return tuple(function(*arrays.values()))


@functools.lru_cache(maxsize=CACHED_CALLS)
def _divided(specs: tuple[tuple[str, ArraySpec], ...], options: _Options) -> tuple[OpCall, Any]:
    """The program's description, and the program as a function of its arrays: it divides over devices as a whole.

    XLA does not divide a layout constraint, and would gather the cache for it.
    """
    operands = dict(specs)
    queries, kv_cache = operands["queries"], operands["kv_cache"]
    num_kv_heads, packs = operands["keys"].shape[1], kv_cache.shape[2]
    of_heads, of_cache = (None, "kv_heads", None), (None, None, "kv_heads", None, None)
    out = queries if options.out_dtype is None else ArraySpec(queries.shape, options.out_dtype.name)
    lse = (ArraySpec(queries.shape[:2], "float32"),) if options.return_lse else ()
    partitioning = Partitioning(
        operands={
            **dict.fromkeys(("queries", "keys", "values"), of_heads),
            "kv_cache": of_cache,
            "attention_sink": ("kv_heads",),
        },
        results=(of_heads, of_cache, of_heads[:2])[: 2 + len(lse)],
        # float8 packs two heads side by side; where the cache has padding it cannot be divided.
        sizes={"kv_heads": 1 if 2 * num_kv_heads % _packing(kv_cache) else math.gcd(num_kv_heads, packs)},
        never_gathered=("kv_cache",),
    )
    described = OpCall(
        name=_check.name,
        target=f"xla_gpu_{_check.name}",
        operand_names=tuple(operands),
        operands=tuple(operands.values()),
        results=(out, kv_cache, *lse),
        attributes=(("options", Text(repr(options).encode())),),
        partitioning=partitioning,
    )

    def local(*arrays: Any) -> tuple[jax.Array, ...]:
        return _attention(dict(zip(operands, arrays, strict=True)), options)

    return described, with_derivative(described, sequential_vmap(partitioned(described, partitioning, local)))


def _attention(arrays: dict[str, jax.Array], options: _Options) -> tuple[jax.Array, ...]:
    """The program of one device."""
    shape = _checked_shape(_specs(arrays))
    queries, kv_cache = arrays["queries"], arrays["kv_cache"]
    _, num_heads, head_dim = queries.shape
    group = num_heads // arrays["keys"].shape[1]
    num_seqs = arrays["distribution"][2:]
    # The same memory as reshape_and_cache and paged_attention take it. Without the constraint XLA's layout assignment
    # puts a copy between a reshape and the custom call.
    cache = kv_cache.reshape(*kv_cache.shape[:2], 2 * shape.num_kv_heads, shape.head_dim)
    cache = with_layout_constraint(cache, Layout((0, 1, 2, 3)))
    float8 = cache.dtype.name in FLOAT8S

    if options.update_kv_cache:
        cache = _updated(cache, arrays, shape, options)

    scale, scales = options.scale, {}
    if options.q_scale is not None:
        largest = float(jnp.finfo(cache.dtype).max)
        scaled = jnp.clip(queries / options.q_scale, -largest, largest)
        queries = scaled.astype(cache.dtype).astype(queries.dtype)
        scale *= options.q_scale
    if float8:
        scales = {name: jnp.full(1, getattr(options, name), jnp.float32) for name in ("k_scale", "v_scale")}
    else:
        scale *= options.k_scale
    sinks = arrays.get("attention_sink")
    if sinks is not None:
        padding = (0, shape.num_kv_heads * group - num_heads)
        sinks = jnp.pad(sinks.astype(jnp.float32), padding)
    out, lse = (
        call.call(
            paged_attention.OPERATOR_WITH_LSE if options.return_lse else paged_attention.OPERATOR,
            query=_padded(queries, shape.num_kv_heads * group, shape),
            kv_cache=cache,
            context_lens=arrays["kv_lens"],
            block_tables=arrays["page_indices"].reshape(arrays["kv_lens"].shape[0], shape.pages_per_seq),
            query_start_loc=arrays["cu_q_lens"],
            num_seqs=num_seqs,
            scale=scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=sinks,
            **scales,
        ),
        None,
    )
    if options.return_lse:
        out, lse = out
    out = out[:, :num_heads, :head_dim]
    if not float8 and options.v_scale != 1.0:
        out = out.astype(jnp.float32) * options.v_scale
    # The barrier is for jax.jit, which otherwise leaves the layout of such a result to XLA and then refuses to donate.
    cache = with_layout_constraint(cache.reshape(kv_cache.shape), Layout((0, 1, 2, 3, 4)))
    cache = jax.lax.optimization_barrier(cache)
    results = (out.astype(options.out_dtype or arrays["queries"].dtype), cache)
    return results if lse is None else (*results, lse[:, :num_heads])


def _padded(x: jax.Array, heads: int, shape: _Shape) -> jax.Array:
    """X [num_tokens, heads, head_dim] with as many heads, of the cache's head_dim."""
    return jnp.pad(x, ((0, 0), (0, heads - x.shape[1]), (0, shape.head_dim - x.shape[2])))


def _updated(cache: jax.Array, arrays: dict[str, jax.Array], shape: _Shape, options: _Options) -> jax.Array:
    """The cache with the new keys and values."""
    queries, keys, values = (arrays[name] for name in ("queries", "keys", "values"))
    scales = {}
    if cache.dtype.name in FLOAT8S:
        # Of the cache's own dtype they come as they shall be stored: T holds every float8 number exactly.
        factors = (1.0, 1.0) if keys.dtype == cache.dtype else (options.k_scale, options.v_scale)
        scales = {name: jnp.full(1, x, jnp.float32) for name, x in zip(("k_scale", "v_scale"), factors, strict=True)}
    return call.call(
        reshape_and_cache.OPERATOR,
        key=_padded(keys.astype(queries.dtype), shape.num_kv_heads, shape),
        value=_padded(values.astype(queries.dtype), shape.num_kv_heads, shape),
        kv_cache=cache,
        slot_mapping=_slots(arrays, queries.shape[0], shape),
        **scales,
    )


def _slots(arrays: dict[str, jax.Array], num_tokens: int, shape: _Shape) -> jax.Array:
    """The cache slot of each token, -1 for padding and for tokens that have no place in their sequence's pages."""
    kv_lens, num_seqs = arrays["kv_lens"], arrays["distribution"][2]
    max_seqs = kv_lens.shape[0]
    if max_seqs * shape.pages_per_seq == 0:
        return jnp.full(num_tokens, -1, jnp.int32)
    tables = arrays["page_indices"].reshape(max_seqs, shape.pages_per_seq)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    starts, ends = arrays["cu_q_lens"][:-1], arrays["cu_q_lens"][1:]
    # Comparisons with all sequences at once are one fused kernel; a binary search is a loop of launches.
    owned = (starts[None] <= tokens) & (tokens < ends[None]) & (jnp.arange(max_seqs) < num_seqs)[None]
    sequences = jnp.argmax(owned, axis=1)
    positions = (kv_lens - ends)[sequences] + tokens[:, 0]
    page = jnp.clip(positions // shape.page_size, 0, shape.pages_per_seq - 1)
    numbers = tables[sequences, page]
    # A page that the cache does not have is a slot past the cache: reshape_and_cache says what becomes of that.
    numbers = jnp.where((numbers >= 0) & (numbers < shape.num_pages), numbers, shape.num_pages)
    slots = numbers * shape.page_size + positions % shape.page_size
    placed = owned.any(axis=1) & (positions >= 0) & (positions < shape.pages_per_seq * shape.page_size)
    return jnp.where(placed, slots, -1).astype(jnp.int32)
