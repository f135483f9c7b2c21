"""The operators that sum over ranks where each rank is a process with one torch_xla device, as torchrun starts them.

Each rank calls them on its own part. The peers' memory is opened at a process group's first call; the handles travel
through torch.distributed's store.
"""

from __future__ import annotations

import collections
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from .._core.operator import Operator
from .._runtime import device_groups
from .._runtime.device_groups import Member, Settings
from . import lowering

_SETTINGS = Settings(timeout_ms=120_000, max_bytes=16 << 20)

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by process group
# Groups of the same ranks that came before: the processes of a group count alike.
_connected_before: collections.Counter[tuple[int, ...]] = collections.Counter()


def run(operator: Operator, group: Any, x: torch.Tensor, *rest: torch.Tensor, **options: Any) -> Any:
    """``operator`` over ``group``, a ProcessGroup of torch.distributed; x is exchanged by the handler or gathered."""
    kernel = getattr(torch.ops.xla_gpu, operator.name)
    number = _number(group)
    if number:
        return kernel(x, *rest, **options, group=number)
    return _of_gathered(kernel, group, x, rest, options)


def is_spmd() -> bool:
    from torch_xla import runtime

    return bool(runtime.is_spmd())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(group: Any) -> int:
    """The group's number for handlers, or 0 where there is no peer memory. All of its ranks come here at once."""
    number = _numbers.get(group)
    if number is None:
        number = _numbers[group] = _connect(group)
    return number


def _connect(group: Any) -> int:
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    if lowering.platform() == "cpu" or len(ranks) == 1:
        return 0
    count = _connected_before[ranks]
    _connected_before[ranks] += 1
    from . import plugin  # imports torch_xla

    exchange = _Exchange(ranks, torch.distributed.get_rank(), f"{'_'.join(map(str, ranks))}.{count}")
    ordinals = exchange(np.array([plugin.device_ordinal()], np.uint8))[:, 0]
    members = [Member(process, int(ordinal)) for process, ordinal in enumerate(ordinals)]
    mine = ranks.index(torch.distributed.get_rank())
    number, reason = device_groups.connect([members], f"torch_xla processes {ranks} {count}", _SETTINGS, mine, exchange)
    if reason is not None:
        warnings.warn(device_groups.no_peer_memory(f"process group of ranks {list(ranks)}", reason), stacklevel=6)
    return number


class _Exchange:
    """Takes this rank's bytes and returns those of all ranks, one row each, through torch.distributed's store."""

    def __init__(self, ranks: tuple[int, ...], rank: int, name: str) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        self._store = torch.distributed.PrefixStore(f"xla_gpu.device_group.{name}", store)
        self._ranks, self._rank = ranks, rank
        self._rounds = itertools.count()

    def __call__(self, mine: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        at = next(self._rounds)
        self._store.set(f"{at}.{self._rank}", mine.tobytes().hex())
        told = [bytes.fromhex(self._store.get(f"{at}.{rank}").decode()) for rank in self._ranks]
        return np.stack([np.frombuffer(data, np.uint8) for data in told])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_gathered(
    kernel: Callable[..., Any], group: Any, x: torch.Tensor, rest: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> Any:
    return kernel(_gather(group, x), *rest, **options)


def _gather(group: Any, x: torch.Tensor) -> torch.Tensor:
    """T[ranks, ...]: every rank's x. By XLA's all-gather, or through the host for a group of another backend."""
    shape = (torch.distributed.get_world_size(group), *x.shape)
    if torch.distributed.get_backend(group) == "xla":
        parts = torch.empty(shape, dtype=x.dtype, device=x.device)
        torch.distributed.all_gather_into_tensor(parts, x[None], group=group)
        return parts
    parts = torch.empty(shape, dtype=x.dtype)
    torch.distributed.all_gather(list(parts.unbind(0)), x.cpu().contiguous(), group=group)
    return parts.to(x.device)
