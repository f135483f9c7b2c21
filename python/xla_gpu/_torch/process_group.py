"""The operators that sum over ranks. On eager tensors torch.distributed gathers the parts and the handler adds them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from .._core.operator import Operator
from .._torch_xla import device_group, processes
from . import functions


def run(operator: Operator, group: Any, x: torch.Tensor, *rest: torch.Tensor, **options: Any) -> Any:
    """``operator`` over ``group``, a torch.distributed.ProcessGroup, None for the default one, or a DeviceGroup."""
    if isinstance(group, device_group.DeviceGroup):
        return device_group.run(operator, group, x, *rest, **options)
    name = operator.name
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: x: expected a tensor, got {type(x).__name__}")
    if x.device.type != "xla":
        return functions.call(operator, _gather(_checked(name, group), x), *rest, **options)
    if processes.is_spmd():
        raise TypeError(
            f"{name}: group: expected an xla_gpu.torch.DeviceGroup for a tensor of torch_xla under SPMD, got "
            f"{type(group).__name__}"
        )
    return processes.run(operator, _checked(name, group), x, *rest, **options)


def _checked(name: str, group: Any) -> Any:
    """The process group that ``group`` means."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            f"{name}: group: expected a process group of torch.distributed, which is not initialised here: call "
            "torch.distributed.init_process_group() in every process first (torchrun starts them)"
        )
    if group is None:
        return distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"{name}: group: expected a torch.distributed.ProcessGroup or None (the default group), "
            f"got {type(group).__name__}"
        )
    return group


def _gather(group: Any, x: torch.Tensor) -> torch.Tensor:
    """T[ranks, ...]: every rank's x."""
    parts = x.new_empty((torch.distributed.get_world_size(group), *x.shape))
    # In pieces: gloo has no all_gather_into_tensor for every dtype.
    torch.distributed.all_gather(list(parts.unbind(0)), x.contiguous(), group=group)
    return parts
