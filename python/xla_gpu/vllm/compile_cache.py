"""What of compiling is kept between starts: XLA's choices of kernels for matrix products, which take most of the time.

Whole executables are not kept: torch_xla 2.9's persistent cache gives the same program another key in each process on a
GPU, see docs/reliability.md.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

# The folder; empty: nothing is kept.
ENVIRONMENT = "XLA_GPU_VLLM_CACHE"

_FLAG = "--xla_gpu_per_fusion_autotune_cache_dir"
_DISTRIBUTIONS = ("torch_xla", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


def use(environ: MutableMapping[str, str]) -> Path | None:
    """Sets XLA's flag for the cache, before the client starts; returns the folder.

    The versions of torch_xla and of the plug-in name the folder; XLA's own key has the GPU, the product and its shapes.
    What the user set in XLA_FLAGS is kept.
    """
    folder = environ.get(ENVIRONMENT, "~/.cache/xla_gpu/vllm")
    flags = environ.get("XLA_FLAGS", "")
    if environ.get("PJRT_DEVICE", "").upper() != "GPU" or not folder or _FLAG in flags:
        return None
    versions = []
    for name in _DISTRIBUTIONS:
        try:
            versions.append(f"{name}-{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    path = Path(os.path.expanduser(folder), "autotune", "_".join(versions))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a home that cannot be written: compile as without a cache
    environ["XLA_FLAGS"] = f"{flags} {_FLAG}={path}".strip()
    return path
