"""ragged_paged_attention_v3: the cache update and the attention of one layer, by the call that TPU kernels have.

The interface is that of tpu_inference.kernels.ragged_paged_attention.v3 ("RPA v3"), which tokamax and ejkernel share.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.layout import Layout, with_layout_constraint

from .._core.attributes import Text
from .._core.checks import FLOAT8S
from .._core.operator import CACHED_CALLS, ArraySpec, OpCall
from .._core.partitioning import Partitioning
from ..ops import paged_attention, reshape_and_cache
from . import call
from .gradients import with_derivative
from .partition import DIVIDES_OPERATIONS, explicit_shardings, partitioned
from .ragged_paged_attention_v3_arguments import Options, Shape, check, checked_options, checked_shape, packing


def ragged_paged_attention_v3(arrays: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
    """The call; ``arrays`` holds all array arguments by name, None for no attention_sink."""
    arrays = {
        name: call.as_array(f"{check.name}: {name}", x)
        for name, x in arrays.items()
        if x is not None or name != "attention_sink"
    }
    checked_shape(_specs(arrays))
    results: tuple[jax.Array, ...] = _program(arrays.pop("kv_cache"), arrays, checked_options(**options))
    return results


def _specs(arrays: dict[str, Any]) -> dict[str, ArraySpec]:
    return {name: ArraySpec(tuple(x.shape), x.dtype.name) for name, x in arrays.items()}


# ---- The program -----------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _program(kv_cache: jax.Array, arrays: dict[str, jax.Array], options: Options) -> tuple[jax.Array, ...]:
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
def _divided(specs: tuple[tuple[str, ArraySpec], ...], options: Options) -> tuple[OpCall, Any]:
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
        sizes={"kv_heads": 1 if 2 * num_kv_heads % packing(kv_cache) else math.gcd(num_kv_heads, packs)},
        never_gathered=("kv_cache",),
    )
    described = OpCall(
        name=check.name,
        target=f"xla_gpu_{check.name}",
        operand_names=tuple(operands),
        operands=tuple(operands.values()),
        results=(out, kv_cache, *lse),
        attributes=(("options", Text(repr(options).encode())),),
        partitioning=partitioning,
    )

    def local(*arrays: Any) -> tuple[jax.Array, ...]:
        return _attention(dict(zip(operands, arrays, strict=True)), options)

    return described, with_derivative(described, sequential_vmap(partitioned(described, partitioning, local)))


def _attention(arrays: dict[str, jax.Array], options: Options) -> tuple[jax.Array, ...]:
    """The program of one device."""
    shape = checked_shape(_specs(arrays))
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


def _padded(x: jax.Array, heads: int, shape: Shape) -> jax.Array:
    """X [num_tokens, heads, head_dim] with as many heads, of the cache's head_dim."""
    return jnp.pad(x, ((0, 0), (0, heads - x.shape[1]), (0, shape.head_dim - x.shape[2])))


def _updated(cache: jax.Array, arrays: dict[str, jax.Array], shape: Shape, options: Options) -> jax.Array:
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


def _slots(arrays: dict[str, jax.Array], num_tokens: int, shape: Shape) -> jax.Array:
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
