"""Device groups of the library: GPUs of one host that reach each other's memory, and all_reduce through it."""

from __future__ import annotations

import ctypes
import hashlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import HandlerError
from . import abi, library

MAX_RANKS = 8
_MAX_TIMEOUT_S = 10**9  # 31 years: no limit


class Member(NamedTuple):
    """One GPU of a group."""

    process: int
    device_ordinal: int  # in that process


class Settings(NamedTuple):
    timeout_ms: int
    max_bytes: int
    low_latency_bytes: int = -1


def check_arguments(timeout_s: float, max_bytes: int) -> None:
    """Raises TypeError and ValueError for arguments of a front end's DeviceGroup that make no sense."""
    for name, value in {"timeout_s": timeout_s, "max_bytes": max_bytes}.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(f"DeviceGroup: {name}: expected a number, got {type(value).__name__}")
    if not 0.001 <= timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"DeviceGroup: timeout_s: expected 0.001 to {_MAX_TIMEOUT_S} seconds, got {timeout_s}")
    if not 1 << 16 <= max_bytes <= 1 << 34:  # as xla_gpu_group_allocate has it
        raise ValueError(f"DeviceGroup: max_bytes: expected 64 KiB to 16 GiB, got {max_bytes}")


def no_peer_memory(axis: str, reason: str) -> str:
    """The warning of a group that falls back."""
    return f"DeviceGroup: axis {axis!r}: no peer memory: {reason}. XLA's all-gather is used instead, which is slower"


# Takes this process's bytes, returns those of all processes, by their index. Every process calls it at once.
Exchange = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]


def connect(
    groups: Sequence[Sequence[Member]], name: str, settings: Settings, process: int, exchange: Exchange
) -> tuple[int, str | None]:
    """Connects the members of each of ``groups``, which share one number: a GPU is in one of them.

    Every process of the program calls this with the same arguments but for ``process``, its own index.

    Returns:
      (number, None), or (0, the reason) where some GPU cannot reach a peer's memory: the same answer in all processes.
    """
    members = [member for group in groups for member in group]
    number = _number(groups, name, settings)
    ranks = len(groups[0])
    failure: str | None = None
    mine = np.zeros((len(members), abi.GROUP_HANDLE_BYTES), np.uint8)
    if not 2 <= ranks <= MAX_RANKS:
        failure = f"expected 2 to {MAX_RANKS} devices, got {ranks}"
    for group in groups:
        failure = failure or _one_gpu_twice(group)
    for index, member in enumerate(members):
        if member.process == process and failure is None:
            failure = _allocate(number, member, index % ranks, ranks, settings, mine[index])
    told = exchange(np.concatenate([_host(), mine.ravel(), _flag(failure)]))
    hosts, handles = told[:, :_HOST_BYTES], told[:, _HOST_BYTES:-1].reshape(-1, *mine.shape)
    for start in range(0, len(members), ranks):
        group = members[start : start + ranks]
        if any((hosts[m.process] != hosts[group[0].process]).any() for m in group):
            failure = failure or "its devices are on several hosts"
    if failure is None and told[:, -1].any():
        failure = f"process {int(np.flatnonzero(told[:, -1])[0])} reported an error"
    if failure is None:
        for index, member in enumerate(members):
            if member.process == process and failure is None:
                start = index - index % ranks
                opened = [handles[m.process, start + r] for r, m in enumerate(members[start : start + ranks])]
                ordinals = [m.device_ordinal if m.process == process else -1 for m in members[start : start + ranks]]
                failure = _connect(number, member, ordinals, np.concatenate(opened))
    failed = exchange(_flag(failure))[:, 0]
    if failure is None and failed.any():
        failure = f"process {int(np.flatnonzero(failed)[0])} reported an error"
    return (0, failure) if failure is not None else (number, None)


class Group:
    """What DeviceGroup has in every front end."""

    _number: int  # for handlers; 0 without peer memory

    @property
    def uses_peer_memory(self) -> bool:
        """Whether the kernels exchange data themselves; else XLA's all-gather does."""
        return self._number != 0

    def check(self) -> None:
        """Raises xla_gpu.errors.HandlerError if a call of the group timed out on a GPU of this process."""
        if self._number:
            check(self._number)


def check(number: int) -> None:
    """Raises HandlerError if a call of the group timed out on a GPU of this process."""
    error = library.load().cdll.xla_gpu_group_error(number)
    if error is not None:
        raise HandlerError(f"device group: {error.decode(errors='replace')}")


def _one_gpu_twice(group: Sequence[Member]) -> str | None:
    """Why ranks of one process need a GPU each, if two of the group have the same."""
    for rank, member in enumerate(group):
        if (first := list(group).index(member)) != rank:
            return (
                f"expected another GPU for each rank of a process, got GPU {member.device_ordinal} for ranks {first} "
                f"and {rank}, whose kernels wait for each other and need not fit on it together"
            )
    return None


_HOST_BYTES = 32


def _host() -> npt.NDArray[np.uint8]:
    """The same bytes in the processes of one running system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"
    return np.frombuffer(hashlib.sha256(identity.encode()).digest(), np.uint8)


def _flag(failure: str | None) -> npt.NDArray[np.uint8]:
    return np.array([failure is not None], np.uint8)


def _number(groups: Sequence[Sequence[Member]], name: str, settings: Settings) -> int:
    """Of the content: programs that name it are the same in every process, and may be cached on disk."""
    text = repr(([list(map(tuple, group)) for group in groups], name, tuple(settings)))
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _allocate(
    number: int, member: Member, rank: int, ranks: int, settings: Settings, handle: npt.NDArray[np.uint8]
) -> str | None:
    args = abi.GroupMember(
        struct_size=ctypes.sizeof(abi.GroupMember),
        group=number,
        ranks=ranks,
        rank=rank,
        device_ordinal=member.device_ordinal,
        timeout_ms=settings.timeout_ms,
        max_bytes=settings.max_bytes,
        low_latency_bytes=settings.low_latency_bytes,
    )
    error = library.load().cdll.xla_gpu_group_allocate(ctypes.byref(args), handle.ctypes.data)
    return None if error is None else error.decode(errors="replace")


def _connect(number: int, member: Member, ordinals: list[int], handles: npt.NDArray[np.uint8]) -> str | None:
    devices = (ctypes.c_int32 * len(ordinals))(*ordinals)
    handles = np.ascontiguousarray(handles)
    error = library.load().cdll.xla_gpu_group_connect(number, member.device_ordinal, devices, handles.ctypes.data)
    return None if error is None else error.decode(errors="replace")
