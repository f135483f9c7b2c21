"""What the PJRT adapter does for compilations: executables kept in files, programs compiled together, XLA's options."""

from __future__ import annotations

import contextlib
import ctypes as ct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


def check_options(where: str, options: Any) -> None:
    """Raises TypeError or ValueError for what are no options of XLA by name; ``where`` begins the text."""
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: expected a mapping, got {type(options).__name__}")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, bool | int):
            got = f"{name!r}: {value!r}"
            raise TypeError(f"{where}: expected names of options and bools or ints, got {got}")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{where}: expected {name} to be of 64 bits, got {value}")


# The options of the innermost compile_options.
_appended: Mapping[str, bool | int] = {}


@contextlib.contextmanager
def compile_options(options: Mapping[str, bool | int]) -> Iterator[None]:
    """Programs compiled or recorded in here get these of XLA's options, by the names that XLA_FLAGS has for them.

    Inside of another such context they come on top of its options. On GPUs through the adapter alone. Not for several
    threads: the options are those of the process.
    """
    if not options:
        yield
        return
    outer = _appended
    _append({**outer, **options})
    try:
        yield
    finally:
        _append(outer)


def _append(options: Mapping[str, bool | int]) -> None:
    global _appended
    entries = b"".join(_override(name, value) for name, value in options.items())
    _raise(library.load().cdll.xla_gpu_append_compile_options(entries, len(entries)))
    _appended = options


def _override(name: str, value: bool | int) -> bytes:
    """An entry of CompileOptionsProto.env_option_overrides, field 7: a map of names to OptionOverrideProto."""
    # Of OptionOverrideProto: bool_field is 2, int_field 3.
    number = bytes([0x10 if isinstance(value, bool) else 0x18]) + _varint(int(value))
    entry = b"\x0a" + _varint(len(name)) + name.encode() + b"\x12" + _varint(len(number)) + number
    return b"\x3a" + _varint(len(entry)) + entry


def _varint(value: int) -> bytes:
    digits = bytearray()
    value &= (1 << 64) - 1  # negative numbers are those of 64 bits
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


@contextlib.contextmanager
def compile_recorded(threads: int) -> Iterator[int]:
    """Compiles what was recorded, and what is recorded in here, in ``threads`` threads; gives the number so far.

    After recording, the next compilation of each program waits for its executable. At the end all are compiled; where
    the body raises, those that no thread has begun are dropped.
    """
    cdll = library.load().cdll
    count = ct.c_int64()
    _raise(cdll.xla_gpu_compile_recorded(threads, ct.byref(count)))
    drop = True
    try:
        yield count.value
        drop = False
    finally:
        _raise(cdll.xla_gpu_finish_recorded(drop, ct.byref(count)))


def preload(names: Sequence[str], threads: int) -> None:
    """Begins to load these files of the cache's folder in threads; compilations of their programs get what is there.

    To be ended by ``finish_preloading``. It needs the client to have compiled something.
    """
    if names:
        _raise(library.load().cdll.xla_gpu_preload_executables("\n".join(names).encode(), threads))


def finish_preloading() -> None:
    """Ends those threads, and frees the executables that no compilation took."""
    _raise(library.load().cdll.xla_gpu_preload_executables(None, 0))


def used() -> list[str]:
    """The files that compilations of this process took executables from, or wrote."""
    names: bytes = library.load().cdll.xla_gpu_used_executables()
    return names.decode().splitlines()


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode(errors="replace"))
