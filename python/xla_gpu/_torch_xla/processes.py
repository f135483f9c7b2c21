"""The operators that sum over ranks under torchrun, one process for each GPU: each rank calls them on its own part."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._core.operator import Operator
from .._runtime import device_groups
from .._runtime.device_groups import Member, Settings
from . import lowering

_SETTINGS = Settings(timeout_ms=120_000, max_bytes=16 << 20)


def run(operator: Operator, x: torch.Tensor, *rest: torch.Tensor, **options: Any) -> Any:
    """``operator`` over all ranks: x is exchanged by the handler, or gathered first."""
    kernel = getattr(torch.ops.xla_gpu, operator.name)
    number = _connected()
    if number:
        return kernel(x, *rest, **options, group=number)
    import torch_xla.core.xla_model as xm

    parts = xm.all_gather(x[None], 0, pin_layout=False)  # pinned, it cannot stand beside torch_xla's all_reduce
    return kernel(parts, *rest, **options)


def is_spmd() -> bool:
    from torch_xla import runtime

    return bool(runtime.is_spmd())


@functools.cache
def _connected() -> int:
    """The number for handlers of the group of all ranks, or 0 where there is no peer memory. All ranks come here."""
    from torch_xla import runtime

    ranks = runtime.world_size()
    if lowering.platform() == "cpu" or ranks == 1:
        return 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    groups = [[Member(rank, rank % local) for rank in range(ranks)]]
    number, reason = device_groups.connect(groups, "torchrun", _SETTINGS, runtime.global_ordinal(), _exchange)
    if reason is not None:
        warnings.warn(device_groups.no_peer_memory("of torchrun's ranks", reason), stacklevel=4)
    return number


def _exchange(mine: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    import torch_xla.core.xla_model as xm

    payloads = xm.rendezvous("xla_gpu.device_group", mine.tobytes())
    return np.stack([np.frombuffer(payload, np.uint8) for payload in payloads])
