"""NVRTC, NVIDIA's compiler of CUDA source at run time, through its C interface. Needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .._runtime import cuda_driver
from ..errors import CompatibilityError
from . import disk_cache

_MAJORS = (13, 12)
_INSTALL = (
    "pip install nvidia-cuda-nvrtc for CUDA 13 or nvidia-cuda-nvrtc-cu12 for CUDA 12, in a checkout of xla_gpu "
    "pip install '.[kernels]'"
)


class CompileError(ValueError):
    """NVRTC refused a source; the text is its log."""


class Nvrtc(NamedTuple):
    """The loaded compiler."""

    library: ctypes.CDLL
    path: str
    version: tuple[int, int]
    include: tuple[str, ...]  # folders with cuda_fp16.h and so on


def find() -> list[Path | str]:
    """Where NVRTC may be, best first: the registry's packages, CUDA_HOME, and what the dynamic linker knows."""
    majors = sorted(_MAJORS, key=lambda major: major != _driver_major())
    found: list[Path | str] = []
    for major in majors:
        for root in _nvidia_folders():
            for folder in (f"cu{major}", "cuda_nvrtc"):
                found += sorted((root / folder / "lib").glob(f"libnvrtc.so.{major}"))
        for root in _toolkits():
            found += sorted(root.glob(f"lib64/libnvrtc.so.{major}"))
        found.append(f"libnvrtc.so.{major}")
    return found


@functools.cache
def load() -> Nvrtc:
    """The compiler. Raises CompatibilityError where none is installed."""
    for path in find():
        try:
            if isinstance(path, Path):
                # The compiler looks for its second library by name alone.
                for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return Nvrtc(library, str(path), (major.value, minor.value), tuple(map(str, _headers(major.value))))
    raise CompatibilityError(f"compiling CUDA source needs NVRTC, and it is not installed: {_INSTALL}")


def compile_kernel(source: str, name: str, arch: str, options: Sequence[str]) -> tuple[bytes, str]:
    """The cubin of ``source`` for ``arch``, and what kernel ``name`` is called in it.

    Raises:
      CompileError: the source has errors; with NVRTC's log.
      CompatibilityError: NVRTC is not installed.
    """
    nvrtc = load()
    flags = [f"--gpu-architecture={arch}", *options, *(f"--include-path={folder}" for folder in nvrtc.include)]
    version = "{}.{}".format(*nvrtc.version)
    cached = None
    if _depends_on_toolkit_alone(source, options, nvrtc.include):
        cached = disk_cache.key("nvrtc", version, source, name, arch, *options, "headers", *nvrtc.include)
        if contents := disk_cache.read(cached):
            lowered, _, cubin = contents.partition(b"\0")
            return cubin, lowered.decode()
    cubin, lowered_name = _compile(nvrtc.library, source, name, flags)
    if cached is not None:
        disk_cache.write(cached, lowered_name.encode() + b"\0" + cubin)
    return cubin, lowered_name


def _compile(library: ctypes.CDLL, source: str, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
    program = ctypes.c_void_p()
    file_name = re.sub(r"[^\w.]+", "_", name).encode() + b".cu"
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), file_name, 0, None, None))
    try:
        _check(library, library.nvrtcAddNameExpression(program, name.encode()))
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), options)
        if status != 0:
            log = _output(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            raise CompileError(log or library.nvrtcGetErrorString(status).decode())
        lowered = ctypes.c_char_p()
        _check(library, library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)))
        return _output(library, "CUBIN", program), (lowered.value or b"").decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, data))
    return data.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise CompileError(library.nvrtcGetErrorString(status).decode())


def _depends_on_toolkit_alone(source: str, options: Sequence[str], include: Sequence[str]) -> bool:
    """Whether no header of the user's own takes part, whose contents the cache's key does not have."""
    if any(re.match(r"-I|--?include|--?pre-include|-isystem", option) for option in options):
        return False
    if re.search(r"^\s*#\s*include\s*[^\s<\"]", source, re.MULTILINE):  # a macro names the header
        return False
    named = re.findall(r"#\s*include\s*(<[^>]+>|\"[^\"]+\")", source)
    return all(
        quoted[0] == "<" and any((Path(folder) / quoted[1:-1]).is_file() for folder in include) for quoted in named
    )


def _driver_major() -> int | None:
    try:
        return cuda_driver.driver().cuda[0]
    except cuda_driver.DriverError:
        return None


def _nvidia_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _toolkits() -> list[Path]:
    return [Path(root) for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]


def _headers(major: int) -> list[Path]:
    """The toolkit's headers, and libcu++'s, which some of them include (package nvidia-cuda-cccl)."""
    folders = [root / name / "include" for root in _nvidia_folders() for name in (f"cu{major}", "cuda_runtime")]
    folders += [root / "include" for root in _toolkits()]
    libraries = [folder / "cccl" for folder in folders]
    libraries += [root / name / "include" for root in _nvidia_folders() for name in ("cuda_cccl", f"cu{major}")]
    libraries += folders
    found = [folder for folder in folders if (folder / "cuda_fp16.h").is_file()][:1]
    found += [folder for folder in libraries if (folder / "nv" / "target").is_file()][:1]
    return list(dict.fromkeys(found))
