"""Calls on each device's heads under torch_xla's SPMD, where the operands alone do not say what those are."""

from __future__ import annotations

import torch
import torch_xla.distributed.spmd as xs
from torch import Tensor

import xla_gpu.torch

_groups: list[xla_gpu.torch.DeviceGroup] = []


def number(group: xla_gpu.torch.DeviceGroup) -> int:
    """What the operators below take for a group: a graph has no other objects than tensors and numbers."""
    if group not in _groups:
        _groups.append(group)
    return _groups.index(group)


def _mine(group: int, tensor: Tensor, *spec: str | None) -> Tensor:
    """A device's shard of a tensor that lies so, or whose values alone may be moved (a clone)."""
    part = xs.enable_manual_sharding(tensor, spec, mesh=_groups[group].mesh)
    return getattr(part, "global_tensor", part)


def _whole(group: int, part: Tensor, shape: torch.Size, *spec: str | None) -> Tensor:
    joined = xs.disable_manual_sharding(part, spec, shape, mesh=_groups[group].mesh)
    return getattr(joined, "global_tensor", joined)


@torch.library.custom_op("paged_llama::rotary_and_cache", mutates_args=())
def rotary_and_cache(
    qkv: Tensor, positions: Tensor, table: Tensor, cache: Tensor, slots: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """xla_gpu.torch.rotary_and_cache with qkv [rows, devices * (heads + 2 * kv heads of a device) * head_dim]: each
    device's query, key and value heads stand together."""
    axis = _groups[group].axis
    query, updated = xla_gpu.torch.rotary_and_cache(
        _mine(group, qkv.clone(), None, axis),
        _mine(group, positions.clone(), None),
        _mine(group, table.clone(), None, None, None),
        _mine(group, cache, None, None, axis, None),
        _mine(group, slots.clone(), None),
    )
    query = _whole(group, query, _query_shape(qkv, cache), None, axis, None)
    return query, _whole(group, updated, cache.shape, None, None, axis, None)


def _query_shape(qkv: Tensor, cache: Tensor) -> torch.Size:
    head_dim = cache.shape[3]
    return torch.Size((qkv.shape[0], qkv.shape[1] // head_dim - cache.shape[2], head_dim))


@rotary_and_cache.register_fake
def _(qkv: Tensor, positions: Tensor, table: Tensor, cache: Tensor, slots: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(_query_shape(qkv, cache)), torch.empty_like(cache)


@torch.library.custom_op("paged_llama::largest", mutates_args=())
def largest(logits: Tensor, group: int) -> Tensor:
    """The largest of each row's logits on each device, and where it stands, as parts of a sum over the devices.

    logits: [rows, vocabulary], divided along the vocabulary. Returns float32 [devices, devices, 2, rows], divided along
    the first dimension: each device fills its own place of the second, in which a sum gathers them. Below 2 ** 24 an
    index is exact in float32.
    """
    size, axis = _groups[group].size, _groups[group].axis
    ranks = torch.arange(size, device=logits.device)
    own, ranks = _mine(group, ranks.clone(), axis), _mine(group, ranks.clone(), None)
    part = _mine(group, logits.clone(), None, axis)
    best, chosen = part.max(-1)
    pair = torch.stack([best.float(), (chosen + own * part.shape[1]).float()])
    places = torch.where((ranks == own)[:, None, None], pair, 0.0)[None]
    return _whole(group, places, torch.Size((size, *places.shape[1:])), axis, None, None, None)


@largest.register_fake
def _(logits: Tensor, group: int) -> Tensor:
    size = _groups[group].size
    return logits.new_empty((size, size, 2, logits.shape[0]), dtype=torch.float32)
