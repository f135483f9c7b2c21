"""The build backend: scikit-build-core, with a CUDA compiler from the registry where the machine has none.

PEP 517 lets a backend name further build requirements. nvcc found in PATH, CUDA_HOME or CUDACXX is used as it is; else
NVIDIA's wheels, which hold a whole compiler, are asked for. XLA_GPU_CUDA=OFF needs neither.
"""

import os
import shutil
from typing import Any

from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import get_requires_for_build_editable as _requires_for_editable
from scikit_build_core.build import get_requires_for_build_sdist as get_requires_for_build_sdist
from scikit_build_core.build import get_requires_for_build_wheel as _requires_for_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# All of one minor version: nvcc's own metadata does not pin nvvm, and a newer one writes PTX that this ptxas refuses.
CUDA_COMPILER = [
    f"{package}==13.0.*"
    for package in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
]


def _cuda_requirements() -> list[str]:
    if os.environ.get("XLA_GPU_CUDA", "ON").upper() in ("OFF", "0", "FALSE", "NO"):
        return []
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if os.environ.get("CUDACXX") or any(shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes):
        return []
    return [] if shutil.which("nvcc") else CUDA_COMPILER


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Build requirements of a wheel."""
    return [*_requires_for_wheel(config_settings), *_cuda_requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Build requirements of an editable install."""
    return [*_requires_for_editable(config_settings), *_cuda_requirements()]
