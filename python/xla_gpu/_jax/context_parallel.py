"""Decode of sequences whose pages are spread over devices: attention over each device's pages, then one merge."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.checks import Checks
from .._core.operator import ArraySpec
from ..ops.all_reduce import OPERATOR as ALL_REDUCE
from ..ops.merge_attention_states import OPERATOR as MERGE
from ..ops.paged_attention import OPERATOR_OF_CONTEXT_PARALLEL as ATTENTION
from . import call, device_group

NAME = ATTENTION.name

_check = Checks("context_parallel_slots")


def slots(positions: Any, block_tables: Any, page_size: int, axis: str) -> jax.Array:
    """See xla_gpu.jax.context_parallel_slots."""
    devices, device = _place("context_parallel_slots", axis)
    given = {"positions": positions, "block_tables": block_tables}
    for name, axes in (("positions", "max_seqs"), ("block_tables", "max_seqs, pages_per_seq")):
        array = given[name] = call.as_array(f"context_parallel_slots: {name}", given[name])
        spec = ArraySpec(array.shape, array.dtype.name)
        _check.dtype(name, spec, ("int32", "int64"))
        sizes = _check.rank(name, spec, axes)
    positions, block_tables = given.values()
    _check.shape("block_tables", spec, (positions.shape[0], sizes[1]), "max_seqs, pages_per_seq")
    if isinstance(page_size, bool) or not isinstance(page_size, (int, np.integer)) or page_size < 1:
        raise ValueError(f"context_parallel_slots: page_size: expected a positive int, got {page_size!r}")
    page = positions // page_size
    own = (positions >= 0) & (page % devices == device)
    entry = jnp.clip(page // devices, 0, max(block_tables.shape[1] - 1, 0))
    table = jnp.take_along_axis(block_tables, entry[:, None], axis=1)[:, 0]
    return jnp.where(own, table * page_size + positions % page_size, -1).astype(jnp.int32)


def attention(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    *,
    axis: str,
    group: device_group.DeviceGroup | None = None,
    **options: Any,
) -> jax.Array:
    """See xla_gpu.jax.context_parallel_paged_attention."""
    if group is not None and (not isinstance(group, device_group.DeviceGroup) or group.axis != axis):
        raise ValueError(f"{NAME}: group: expected a DeviceGroup of axis {axis!r}, got {group!r}")
    devices, device = _place(NAME, axis)
    query, kv_cache = call.as_array(f"{NAME}: query", query), call.as_array(f"{NAME}: kv_cache", kv_cache)
    context_lens = call.as_array(f"{NAME}: context_lens", context_lens)
    max_seqs = context_lens.shape[0] if context_lens.ndim else 0
    if query.ndim and query.shape[0] > max_seqs:
        raise ValueError(
            f"{NAME}: query: expected at most max_seqs = {max_seqs} rows, one for each sequence, got {query.shape[0]}"
        )
    page_size = kv_cache.shape[-3] if kv_cache.ndim >= 3 else 1
    full, rest = context_lens // page_size, context_lens % page_size
    pages = (full - device + devices - 1) // devices  # full ones of this device
    local_lens = pages * page_size + jnp.where(full % devices == device, rest, 0)
    out, lse = call.call(
        ATTENTION,
        query=query,
        kv_cache=kv_cache,
        context_lens=local_lens.astype(context_lens.dtype),
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        num_seqs=num_seqs,
        **options,
    )
    outs, lses = _gather(out, lse, axis, group)
    first = min(1, devices - 1)
    out, lse = outs[0], lses[0]
    if first == 0:  # a merge with the state that saw no key, which tells check_vma that the result does not vary
        out, lse = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for rank in range(first, devices):
        # The order of ranks, so that all devices hold the same bits.
        out, lse = call.call(
            MERGE, reduced_axes=frozenset((axis,)), out_a=out, lse_a=lse, out_b=outs[rank], lse_b=lses[rank]
        )
    return out


def _gather(
    out: jax.Array, lse: jax.Array, axis: str, group: device_group.DeviceGroup | None
) -> tuple[jax.Array, jax.Array]:
    """The states of all devices, by rank."""
    if group is None or not group.uses_peer_memory:
        return jax.lax.all_gather(out, axis), jax.lax.all_gather(lse, axis)
    # As one sum over peer memory to which each device contributes its own place: a state is exact in float32.
    state = jnp.concatenate([out.astype(jnp.float32), lse.astype(jnp.float32)[..., None]], -1)
    places = jnp.zeros((group.size, *state.shape), jnp.float32).at[jax.lax.axis_index(axis)].set(state)
    states = device_group.run(ALL_REDUCE, group, x=places)
    return states[..., :-1].astype(out.dtype), states[..., -1].astype(lse.dtype)


def _place(name: str, axis: str) -> tuple[int, Any]:
    """The axis's size, and this device's place on it."""
    with contextlib.suppress(NameError):
        if isinstance(axis, str):  # psum takes a number for an axis of its array
            return jax.lax.psum(1, axis), jax.lax.axis_index(axis)
    raise ValueError(f"{name}: axis: expected the name of a mesh axis of an enclosing jax.shard_map, got {axis!r}")
