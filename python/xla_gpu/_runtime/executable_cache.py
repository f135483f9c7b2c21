"""The PJRT adapter's cache of executables, and programs compiled together (ffi/runtime/recorded_programs.h)."""

from __future__ import annotations

import contextlib
import ctypes as ct
from collections.abc import Iterator
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


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Compilations on GPUs fail in here, unless the cache has the executable, and leave their programs behind."""
    cdll = library.load().cdll
    cdll.xla_gpu_record_programs(1)
    try:
        yield
    finally:
        cdll.xla_gpu_record_programs(0)


def compile_recorded(threads: int) -> int:
    """Compiles what was recorded; the next compilation of each program gets its executable. Returns their number."""
    compiled = ct.c_int64()
    error = library.load().cdll.xla_gpu_compile_recorded(threads, ct.byref(compiled))
    if error is not None:
        raise RuntimeError(error.decode(errors="replace"))
    return compiled.value
