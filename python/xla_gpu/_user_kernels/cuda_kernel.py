"""CUDA kernels as values: a cubin, the kernel's name in it, and the sizes of its parameters."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from .._core.docstrings import docstring
from .._runtime import cuda_driver
from . import cubin as cubins
from . import nvrtc
from .docstrings import CUDA_KERNEL

# For programs that are compiled where there is no GPU to ask.
DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A kernel that ``kernel_call`` launches; made by ``cuda_kernel``.

    Attributes:
      name: as it was given to ``cuda_kernel``.
      symbol: its name in the cubin.
      arch: what it was compiled for, ``"sm_90a"``, for example.
      key: of the process's table of kernels.
      cubin: the machine code.
      parameters: bytes of each parameter; None where the cubin does not tell.
    """

    name: str
    symbol: str
    arch: str
    key: str
    cubin: bytes
    parameters: tuple[int, ...] | None

    def __repr__(self) -> str:
        return f"CudaKernel({self.name!r}, {self.arch}, {len(self.cubin)} bytes)"


_lock = threading.Lock()
_kernels: dict[str, CudaKernel] = {}


@docstring(CUDA_KERNEL)
def cuda_kernel(
    source_or_cubin: str | bytes, name: str, *, arch: str | None = None, options: Sequence[str] = ()
) -> CudaKernel:
    """Returns a CUDA kernel for kernel_call, compiled from source at run time or taken from a cubin."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"cuda_kernel: name: expected a string that is not empty, got {name!r}")
    if not isinstance(source_or_cubin, str | bytes | bytearray | memoryview):
        raise TypeError(
            f"cuda_kernel: {name}: source_or_cubin: expected CUDA source as a str or a cubin as bytes, "
            f"got {type(source_or_cubin).__name__}"
        )
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"cuda_kernel: {name}: options: expected a sequence of strings, got {options!r}")
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f"cuda_kernel: {name}: arch: expected a str, 'sm_90a', for example, got {type(arch).__name__}")
    if arch is not None and not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"cuda_kernel: {name}: arch: expected 'sm_90a', for example, got {arch!r}")
    if isinstance(source_or_cubin, str):
        return _compiled(source_or_cubin, name, arch or default_arch(), tuple(options))
    if options:
        raise ValueError(f"cuda_kernel: {name}: options: expected none for a cubin, which is compiled already")
    return from_cubin(bytes(source_or_cubin), name, name, arch)


def where(kernel: CudaKernel) -> str:
    """How the error texts of a kernel's calls begin. Raises TypeError for something else."""
    if not isinstance(kernel, CudaKernel):
        raise TypeError(f"kernel_call: kernel: expected what cuda_kernel returns, got {type(kernel).__name__}")
    return f"kernel_call: {kernel.name}"


def from_cubin(cubin: bytes, name: str, symbol: str, arch: str | None = None) -> CudaKernel:
    """The kernel ``symbol`` of a cubin. Raises ValueError if the cubin has none, or is none."""
    try:
        contents = cubins.read(cubin)
    except ValueError as error:
        raise ValueError(f"cuda_kernel: {name}: source_or_cubin: {error}") from None
    if symbol not in contents.kernels:
        known = ", ".join(sorted(contents.kernels)[:10]) or "none"
        raise ValueError(f"cuda_kernel: name: expected a kernel of the cubin, which has {known}, got {symbol!r}")
    if arch is not None and re.match(r"sm_\d+", arch)[0] != contents.arch:  # type: ignore[index]
        raise ValueError(f"cuda_kernel: {name}: arch: expected {contents.arch}, as the cubin was compiled, got {arch}")
    arch = arch or contents.arch
    digest = hashlib.sha256(b"\0".join((symbol.encode(), name.encode(), arch.encode(), cubin))).hexdigest()
    return register(CudaKernel(name, symbol, arch, digest, cubin, contents.kernels[symbol]))


def register(kernel: CudaKernel) -> CudaKernel:
    """Makes a kernel known by its key; returns the one that had the key first."""
    with _lock:
        return _kernels.setdefault(kernel.key, kernel)


def by_key(key: str) -> CudaKernel:
    """The kernel of that key, which this process must have made."""
    kernel = _kernels.get(key)
    if kernel is None:
        raise ValueError(
            f"kernel_call: kernel: expected one that this process made by cuda_kernel, got the key {key!r}; a program "
            "that holds the kernel itself is the one that torch_xla's or JAX's export makes"
        )
    return kernel


@functools.cache
def default_arch() -> str:
    """What this machine's first GPU runs; without a GPU DEFAULT_ARCH."""
    try:
        major, minor = cuda_driver.driver().gpus[0].compute_capability
    except cuda_driver.DriverError:
        return DEFAULT_ARCH
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.lru_cache(maxsize=1024)
def _compiled(source: str, name: str, arch: str, options: tuple[str, ...]) -> CudaKernel:
    try:
        cubin, symbol = nvrtc.compile_kernel(source, name, arch, options)
    except nvrtc.CompileError as error:
        raise ValueError(f"cuda_kernel: {name}: NVRTC does not compile the source for {arch}:\n{error}") from None
    return from_cubin(cubin, name, symbol, arch)
