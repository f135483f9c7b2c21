"""Finds and loads libxla_gpu_ffi.so, once."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.resources
import json
import os
import platform
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LibraryError
from . import abi

FILE_NAME = "libxla_gpu_ffi.so"
ENVIRONMENT = "XLA_GPU_LIBRARY"


class HandlerEntry(NamedTuple):
    target: str
    platform: str  # "Host" or "CUDA"
    execute: int  # address
    scratch_bytes: int  # address of the handler that computes the size of the scratch memory; 0: takes none


class Library:
    """The loaded library."""

    def __init__(self, path: Path, cdll: ctypes.CDLL) -> None:
        self.path = path
        self.cdll = cdll

    def handlers(self) -> list[HandlerEntry]:
        """The library's own handlers, in the order of its table."""
        count = ctypes.c_size_t()
        table = self.cdll.xla_gpu_handlers(ctypes.byref(count))
        return [
            HandlerEntry(row.target.decode(), row.platform.decode(), row.execute, row.scratch_bytes or 0)
            for row in table[: count.value]
        ]

    def build_info(self) -> dict[str, Any]:
        """The build: version, ffi_api, cuda, cuda_architectures, compiler; and host_isa, host_processors found here."""
        info: dict[str, Any] = json.loads(self.cdll.xla_gpu_build_info())
        return info

    def ffi_api(self) -> tuple[int, int]:
        """The XLA FFI API version that the library was built against."""
        major, minor = self.build_info()["ffi_api"]
        return major, minor

    def handler_version(self, address: int) -> tuple[int, int]:
        """The XLA FFI API version that the handler at ``address`` was built against, which it tells itself."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        error = self.cdll.xla_gpu_handler_version(address, ctypes.byref(major), ctypes.byref(minor), None)
        if error:
            raise ValueError(error.decode())
        return major.value, minor.value


@functools.cache
def load() -> Library:
    """The library: $XLA_GPU_LIBRARY where set, else the one that was installed with the package.

    Raises:
      LibraryError: it is missing, truncated, of another processor architecture, or not this package's library.
    """
    path = find()
    # Asked first: the dynamic linker's texts are cryptic, and of a truncated file it may die by a signal.
    if reason := defect(path):
        raise LibraryError(f"{path} cannot be loaded: {reason}")
    try:
        cdll = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from error
    for name, (result, arguments) in abi.SIGNATURES.items():
        try:
            function = getattr(cdll, name)
        except AttributeError:
            raise LibraryError(
                f"{path} has no function {name}: it is not the {FILE_NAME} that belongs to this version of xla_gpu. "
                "Build and install the package again."
            ) from None
        function.restype, function.argtypes = result, arguments
    library = Library(path, cdll)
    _check_version(library)
    return library


def _check_version(library: Library) -> None:
    """Raises LibraryError for a library of another version than the package: its handlers may bind other arguments."""
    try:
        from .. import __version__ as package
    except importlib.metadata.PackageNotFoundError:  # only its files were copied
        return
    built = library.build_info().get("version")
    if built != re.match(r"[0-9.]*", package)[0]:  # type: ignore[index]
        raise LibraryError(
            f"{library.path} is of version {built}, and the package xla_gpu is of version {package}: handlers and "
            "declarations must be of one version. Build and install the package again."
        )


def find() -> Path:
    """Where the library is, without loading it. Raises LibraryError if there is none."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        path = Path(named).absolute()  # of a name without a slash the dynamic linker would search its own folders
        if not path.is_file():
            raise LibraryError(f"{ENVIRONMENT} names {named}, which is not a file")
        return path
    path = Path(str(importlib.resources.files("xla_gpu").joinpath("lib", FILE_NAME)))
    if not path.is_file():
        raise LibraryError(
            f"{path} does not exist: the package was not installed by pip. "
            f"Run `pip install .`, or build with CMake and set {ENVIRONMENT} to the path of {FILE_NAME}."
        )
    return path


_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}  # ELF's e_machine


def defect(path: Path) -> str | None:
    """What the file's ELF header says against loading it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF":
        return f"it is not an ELF library (it has {size} bytes)"
    if len(header) < 64:
        return f"it is truncated to {size} bytes"
    (machine,) = struct.unpack_from("<H", header, 0x12)
    name = _MACHINES.get(machine, f"machine {machine}")
    if name != platform.machine():
        return f"it was built for {name}, and this machine is {platform.machine()}"
    (sections,) = struct.unpack_from("<Q", header, 0x28)
    entry, count = struct.unpack_from("<HH", header, 0x3A)
    whole = sections + entry * count  # the table of sections stands last in the file
    return f"it is truncated to {size} of at least {whole} bytes" if size < whole else None
