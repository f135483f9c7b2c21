"""What this machine has, found without importing a framework."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def gpu_count() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def no_gpu() -> str | None:
    """A reason to skip, or None."""
    return None if gpu_count() else "no NVIDIA GPU on this machine"


def default_pjrt_device() -> str:
    """GPU where torch_xla can run on one: a GPU, and JAX's CUDA plug-in."""
    plugin = (
        any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)) if _has("jax_plugins") else False
    )
    return "GPU" if gpu_count() and _has("torch_xla") and plugin else "CPU"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
