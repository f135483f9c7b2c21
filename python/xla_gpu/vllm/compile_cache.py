"""What of compiling is kept between starts: whole executables, and XLA's choices of kernels for matrix products.

The library's PJRT adapter keeps the executables (see docs/reliability.md). The choices serve where a program changed,
with other buckets for example: finding them is what takes most of a compilation.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

# The folder; empty: nothing is kept.
ENVIRONMENT = "XLA_GPU_VLLM_CACHE"

_EXECUTABLES = "XLA_GPU_EXECUTABLE_CACHE"
_FLAG = "--xla_gpu_per_fusion_autotune_cache_dir"
_DISTRIBUTIONS = ("torch_xla", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


def use(environ: MutableMapping[str, str]) -> Path | None:
    """Sets the variable and XLA's flag for both caches, before the client starts; returns the folder.

    The versions of torch_xla and of the plug-in name the folder; the rest is in the keys: the GPU, the program, the
    flags. What the user set is kept.
    """
    folder = environ.get(ENVIRONMENT, "~/.cache/xla_gpu/vllm")
    if environ.get("PJRT_DEVICE", "").upper() != "GPU" or not folder:
        return None
    versions = []
    for name in _DISTRIBUTIONS:
        try:
            versions.append(f"{name}-{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    path = Path(os.path.expanduser(folder), "_".join(versions))
    try:
        for name in ("autotune", "executables"):
            (path / name).mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a home that cannot be written: compile as without a cache
    flags = environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        environ["XLA_FLAGS"] = f"{flags} {_FLAG}={path / 'autotune'}".strip()
    environ.setdefault(_EXECUTABLES, str(path / "executables"))
    return path
