"""The operators that sum over the ranks of a process group.

The handler exchanges the parts through the peers' memory. Where a GPU cannot reach that, and on the CPU,
torch.distributed gathers them and the handler adds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from .._core.operator import Operator
from .._torch_xla import device_group
from . import functions, peer_groups


def run(operator: Operator, group: Any, x: torch.Tensor, *rest: torch.Tensor, **options: Any) -> Any:
    """``operator`` over ``group``, a torch.distributed.ProcessGroup, None for the default one, or a DeviceGroup."""
    if isinstance(group, device_group.DeviceGroup):
        return device_group.run(operator, group, x, *rest, **options)
    name = operator.name
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: x: expected a tensor, got {type(x).__name__}")
    if x.device.type == "xla" and device_group.is_spmd():
        raise TypeError(
            f"{name}: group: expected an xla_gpu.torch.DeviceGroup for a tensor of torch_xla under SPMD, got "
            f"{type(group).__name__}"
        )
    group = _checked(name, group)
    if number := peer_groups.number(group, *_device(x)):
        return functions.call(operator, x, *rest, **options, group=number)
    return _of_gathered(operator, group, x, rest, options)


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


def _device(x: torch.Tensor) -> tuple[str, int]:
    """The platform of x, "cpu" or "cuda", and CUDA's number of the GPU."""
    if x.device.type == "xla":
        return device_group.device()
    return ("cuda", x.device.index or 0) if x.device.type == "cuda" else ("cpu", 0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_gathered(
    operator: Operator, group: Any, x: torch.Tensor, rest: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> Any:
    # As the caller has them: with a group x is a rank's own.
    functions.check_values(operator, dict(zip(operator.arguments, (x, *rest), strict=False), **options, group=1))
    return functions.call(operator, _gather(group, x), *rest, **options)


def _gather(group: Any, x: torch.Tensor) -> torch.Tensor:
    """T[ranks, ...]: every rank's x. Of torch_xla's tensors through the host where the group's backend is not "xla"."""
    shape = (torch.distributed.get_world_size(group), *x.shape)
    if shape[0] == 1:  # XLA's collectives are for all processes to run
        return x[None]
    if x.device.type == "xla" and torch.distributed.get_backend(group) == "xla":
        parts = x.new_empty(shape)
        torch.distributed.all_gather_into_tensor(parts, x[None], group=group)
        return parts
    mine = x.cpu() if x.device.type == "xla" else x
    parts = mine.new_empty(shape)
    # In pieces: gloo has no all_gather_into_tensor for every dtype.
    torch.distributed.all_gather(list(parts.unbind(0)), mine.contiguous(), group=group)
    return parts.to(x.device)
