"""All-reduce over several devices."""

from __future__ import annotations

import torch

from .._core.docstrings import docstring
from .._torch import process_group
from .._torch_xla.device_group import DeviceGroup
from ..ops import all_reduce as _all_reduce


@docstring(_all_reduce.OPERATOR.docstring)
def all_reduce(x: torch.Tensor, *, group: torch.distributed.ProcessGroup | DeviceGroup | None = None) -> torch.Tensor:
    """The sum of x over the ranks of a process group of torch.distributed; None: the default group.

    Each rank is a process with one device, as torchrun starts them. At a group's first call all of its ranks open each
    other's GPU memory: the handles travel through torch.distributed's store. Where a GPU cannot reach a peer's memory
    it warns, and there and on the CPU torch.distributed gathers the parts, whatever its backend is.

    Under torch_xla's SPMD ``group`` is a DeviceGroup and x holds the parts of all ranks, T[ranks, ...], divided over
    its axis along the first dimension; the result is T[...], whole on every device.
    """
    return process_group.run(_all_reduce.OPERATOR, group, x)


@docstring(_all_reduce.OPERATOR_ADD_RMS_NORM.docstring)
def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    group: torch.distributed.ProcessGroup | DeviceGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """all_reduce over the ranks of a group, the residual added, and the RMS norm of that sum."""
    out, sum_ = process_group.run(_all_reduce.OPERATOR_ADD_RMS_NORM, group, x, residual, weight, eps=eps)
    return out, sum_
