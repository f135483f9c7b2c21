"""JAX's CUDA PJRT plug-ins, found and asked without importing jax."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import pkgutil
import re
from pathlib import Path

from ..errors import CompatibilityError
from . import library
from .abi import api_version

_FILE_NAME = "xla_cuda_plugin.so"
EXTRAS = (
    "Install the one that fits your driver (nvidia-smi shows its CUDA version), in a checkout of xla_gpu: pip install "
    "'.[cuda12]' for CUDA 12, driver 550 or newer, or pip install '.[cuda13]' for CUDA 13, driver 580 or newer."
)


def installed() -> dict[int, Path]:
    """The plug-ins of the installed packages jax-cuda*-pjrt, by CUDA's major version."""
    namespace = importlib.util.find_spec("jax_plugins")  # a namespace package: finding it runs no code
    found = {}
    for module in pkgutil.iter_modules(namespace.submodule_search_locations if namespace else []):
        if match := re.fullmatch(r"xla_cuda(\d+)", module.name):
            path = Path(str(getattr(module.module_finder, "path", ""))) / module.name / _FILE_NAME
            if path.is_file():
                found[int(match[1])] = path
    return found


def cuda_major(path: Path) -> int | None:
    """CUDA's major version of an installed plug-in, None for a file of another origin."""
    match = re.fullmatch(r"xla_cuda(\d+)", path.parent.name)
    return int(match[1]) if match else None


def check_file(path: Path) -> None:
    """Raises CompatibilityError for a file that cannot be loaded, a download cut short above all.

    The dynamic linker maps a truncated library and the process dies of SIGBUS.
    """
    if why := library.defect(path):
        raise CompatibilityError(f"the CUDA plug-in {path} cannot be loaded: {why}. Install its package again.")


@functools.cache
def pjrt_api(path: Path) -> int:
    """Address of the PJRT_Api of the plug-in at ``path``, which stays loaded. Needs no GPU."""
    check_file(path)
    try:
        plugin = ctypes.CDLL(str(path))
        plugin.GetPjrtApi.restype = ctypes.c_void_p
    except (OSError, AttributeError) as error:
        raise CompatibilityError(f"{path} is not a PJRT plug-in: {error}. {EXTRAS}") from None
    address = plugin.GetPjrtApi()
    if not address:
        raise CompatibilityError(f"{path}: GetPjrtApi() returned null. {EXTRAS}")
    return int(address)


def ffi_version(api: int) -> tuple[int, int] | None:
    """Version of the XLA FFI API of the runtime behind a PJRT_Api; None where the plug-in does not tell."""
    ffi_api = ctypes.c_void_p()
    error = library.load().cdll.xla_gpu_pjrt_ffi_api(api, ctypes.byref(ffi_api))
    if error is not None:
        raise CompatibilityError(error.decode(errors="replace"))
    return api_version(ffi_api.value) if ffi_api.value else None
