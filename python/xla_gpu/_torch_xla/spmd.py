"""Calls on sharded tensors under torch_xla's SPMD: each device calls the handler on its shards.

XLA cannot look into a custom call, and would gather its operands. Where the user's annotation (mark_sharding) says how
an operand lies, the call is put between torch_xla's manual-sharding markers: shards in, shards out, nothing gathered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._core.operator import ArraySpec, OpCall
from .._core.partitioning import Axes


class _Tiles(NamedTuple):
    """An HLO sharding: shards of each dimension, one more for copies, and the devices in that order."""

    shape: tuple[int, ...]
    devices: np.ndarray


def run(
    call: OpCall,
    tensors: Sequence[torch.Tensor],
    run_local: Callable[[OpCall, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...] | None:
    """The results of ``call`` on the operands' shards; None where there is nothing to divide.

    Raises ValueError for an annotation under which a device would need what another one has.
    """
    from torch_xla import runtime

    if call.partitioning is None or call.with_operands is None or not runtime.is_spmd():
        return None
    decided = _decide(call, tensors)
    if decided is None:
        return None
    decider, tiles, dims = decided
    import torch_xla.distributed.spmd as xs

    mesh = xs.Mesh(tiles.devices.reshape(-1), tiles.shape)

    def spec(axes: Axes) -> tuple[int | None, ...]:
        return tuple(dims.get(axis) if axis else None for axis in axes)

    def unwrapped(tensor: Any) -> torch.Tensor:
        return getattr(tensor, "global_tensor", tensor)

    local, specs = [], {}
    for name, operand, tensor in zip(call.operand_names, call.operands, tensors, strict=True):
        wanted = spec(_axes(call, name, tensor.dim()))
        # The one that decides lies so already. An annotation could move the others: it is put on their values alone.
        source = tensor if tensor is decider else tensor.clone()
        shard = unwrapped(xs.enable_manual_sharding(source, wanted, mesh=mesh))
        local.append(shard)
        specs[name] = ArraySpec(tuple(shard.shape), operand.dtype)
    results = run_local(call.with_operands(specs), local)
    return tuple(
        unwrapped(xs.disable_manual_sharding(result, spec(axes), torch.Size(full.shape), mesh=mesh))
        for result, axes, full in zip(results, call.partitioning.results, call.results, strict=True)
    )


def _axes(call: OpCall, name: str, rank: int) -> Axes:
    assert call.partitioning is not None
    return call.partitioning.operands.get(name) or (None,) * rank


def _decide(call: OpCall, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, _Tiles, dict[str, int]] | None:
    """The operand that decides, its sharding, and for each axis of the call the dimension that divides it."""
    partitioning = call.partitioning
    assert partitioning is not None
    kept = partitioning.never_gathered
    for i in sorted(range(len(tensors)), key=lambda i: call.operand_names[i] not in kept):
        name = call.operand_names[i]
        tiles = _tiles(tensors[i])
        if tiles is None:
            if name in kept:
                return None  # it is whole on every device, and so is the call
            continue
        dims: dict[str, int] = {}
        for dim, (axis, shards) in enumerate(zip(_axes(call, name, tensors[i].dim()), tiles.shape, strict=False)):
            if shards == 1:
                continue
            if axis is None:
                expected = "no shards of an axis that every device needs whole"
            elif partitioning.sizes[axis] % shards:
                expected = f"a number of shards that divides {axis} = {partitioning.sizes[axis]}"
            else:
                dims[axis] = dim
                continue
            if name in kept:
                raise ValueError(
                    f"{call.name}: {name}: expected {expected}, got axis {dim} of {call.operands[i]} in {shards} shards"
                )
        if dims:
            return tensors[i], tiles, dims
    return None


def _tiles(tensor: torch.Tensor) -> _Tiles | None:
    """How the user's annotation lays the tensor out; None where it has none, or is whole on every device."""
    import _XLAC

    return parse(_XLAC._get_xla_sharding_spec(tensor))


# "{devices=[1,2,2]0,1,2,3 last_tile_dim_replicate}", or with the devices as an iota: "[4]<=[2,2]T(1,0)".
_SHARDING = re.compile(
    r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))( last_tile_dim_replicate)?\}"
)


def parse(text: str) -> _Tiles | None:
    match = _SHARDING.fullmatch(text)
    if match is None:
        return None
    shape, iota, order, listed, _ = match.groups()
    tile_shape = tuple(map(int, shape.split(",")))
    if listed:
        devices = np.array(list(map(int, listed.split(","))))
    else:
        sizes = list(map(int, iota.split(",")))
        devices = np.arange(math.prod(sizes)).reshape(sizes)
        if order:
            devices = devices.transpose(list(map(int, order.split(","))))
    return _Tiles(tile_shape, devices.reshape(tile_shape))
