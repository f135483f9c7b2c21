"""Process groups of torch.distributed whose ranks reach each other's GPU memory.

The peers' memory is opened at a group's first call; the handles travel through torch.distributed's store.
"""

from __future__ import annotations

import collections
import itertools
import warnings
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from .._runtime import device_groups
from .._runtime.device_groups import Member, Settings

_SETTINGS = Settings(timeout_ms=120_000, max_bytes=16 << 20)

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by process group
# Groups of the same ranks that came before: the processes of a group count alike.
_connected_before: collections.Counter[tuple[int, ...]] = collections.Counter()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def number(group: Any, device: str, ordinal: int) -> int:
    """The group's number for handlers, or 0 where there is no peer memory. All of its ranks come here at once.

    ``device`` is "cpu" or "cuda"; ``ordinal`` is CUDA's number of this rank's GPU in this process.
    """
    if device == "cpu":  # of a group whose GPUs may have peer memory, too
        return 0
    known = _numbers.get(group)
    if known is None:
        known = _numbers[group] = _connect(group, ordinal)
    return known


def _connect(group: Any, ordinal: int) -> int:
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    if len(ranks) == 1:
        return 0
    count = _connected_before[ranks]
    _connected_before[ranks] += 1
    exchange = _Exchange(ranks, torch.distributed.get_rank(), f"{'_'.join(map(str, ranks))}.{count}")
    ordinals = exchange(np.array([ordinal], np.uint8))[:, 0]
    members = [Member(process, int(theirs)) for process, theirs in enumerate(ordinals)]
    mine = ranks.index(torch.distributed.get_rank())
    made, reason = device_groups.connect([members], f"processes {ranks} {count}", _SETTINGS, mine, exchange)
    if reason is not None:
        warnings.warn(
            f"process group of ranks {list(ranks)}: no peer memory: {reason}. torch.distributed gathers instead, which "
            "is slower",
            stacklevel=5,
        )
    return made


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
