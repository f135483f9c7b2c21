"""The build backend: scikit-build-core, with a CUDA compiler from the registry where the machine has none.

PEP 517 lets a backend name further build requirements. nvcc found in PATH, CUDA_HOME or CUDACXX is used as it is; else
NVIDIA's wheels, which hold a whole compiler, are requested. Compilers, GPU and driver are checked first: what cannot
work ends in one line, before a compiler is downloaded and anything compiled. XLA_GPU_CUDA=OFF needs none of this.
"""

import os
import re
import shlex
from typing import Any

import cuda_toolchain
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
    f"{package}=={'.'.join(map(str, cuda_toolchain.WHEELS_VERSION))}.*"
    for package in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
]


def _definition(name: str, config_settings: dict[str, Any]) -> str:
    """What ``-C cmake.define.<name>=``, ``-C cmake.args=`` or CMAKE_ARGS sets a CMake variable to; "" if none does."""
    if value := config_settings.get(f"cmake.define.{name}"):
        return str(value)
    given = config_settings.get("cmake.args", [])
    text = " ".join([*([given] if isinstance(given, str) else given), os.environ.get("CMAKE_ARGS", "")])
    values = re.findall(rf"^-D\n?{name}(?::\w+)?=(.*)$", "\n".join(shlex.split(text)), re.MULTILINE)
    return str(values[-1]) if values else ""


def _cuda_requirements(config_settings: dict[str, Any]) -> list[str]:
    """The compiler's wheels, where the machine has no nvcc. Raises Unusable for what a build would fail of."""
    cuda_toolchain.check_cxx(os.environ)
    wanted = _definition("XLA_GPU_CUDA", config_settings) or os.environ.get("XLA_GPU_CUDA") or "ON"
    if wanted.upper() in ("OFF", "0", "FALSE", "NO"):
        return []
    asked = _definition("CMAKE_CUDA_ARCHITECTURES", config_settings) or os.environ.get("CUDAARCHS", "")
    nvcc = _definition("CMAKE_CUDA_COMPILER", config_settings) or cuda_toolchain.find_nvcc(os.environ)
    if nvcc is not None:
        given = {"CUDAHOSTCXX": "CMAKE_CUDA_HOST_COMPILER", "CUDAFLAGS": "CMAKE_CUDA_FLAGS"}
        defined = {name: value for name, variable in given.items() if (value := _definition(variable, config_settings))}
        cuda_toolchain.toolchain(nvcc, asked, {**os.environ, **defined})
        return []
    if asked in ("", "native"):
        cuda_toolchain.usable_gpus(cuda_toolchain.WHEELS_VERSION)
    return CUDA_COMPILER


def _requirements(theirs: list[str], config_settings: dict[str, Any] | None) -> list[str]:
    try:
        return [*theirs, *_cuda_requirements(config_settings or {})]
    except cuda_toolchain.Unusable as error:
        # A line, and no traceback: pip shows what a backend writes when it fails.
        raise SystemExit(f"xla_gpu cannot be built here: {error}") from None


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Build requirements of a wheel."""
    return _requirements(_requires_for_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Build requirements of an editable install."""
    return _requirements(_requires_for_editable(config_settings), config_settings)
