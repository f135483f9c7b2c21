"""What the PJRT adapter's cache of executables did in this process."""

from __future__ import annotations

import ctypes as ct
from typing import NamedTuple

from . import library


class ExecutableCacheInfo(NamedTuple):
    """Executables of this process while XLA_GPU_EXECUTABLE_CACHE named a folder.

    Attributes:
      loaded: came from a file.
      compiled: were compiled by XLA.
      stored: of those compiled, written to a file.
      unusable: files that were damaged, or that the plug-in refused; compiled again.
    """

    loaded: int
    compiled: int
    stored: int
    unusable: int


def info() -> ExecutableCacheInfo:
    """The counts so far."""
    counts = (ct.c_int64 * 4)()
    library.load().cdll.xla_gpu_executable_cache_counts(counts)
    return ExecutableCacheInfo(*counts)
