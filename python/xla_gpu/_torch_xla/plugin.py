"""torch_xla on NVIDIA GPUs: JAX's CUDA PJRT plug-in behind the library's adapter, as PJRT_DEVICE=GPU.

torch_xla loads this module at ``import torch_xla``, through the entry-point group "torch_xla.plugins", on every machine
with this package. So nothing here may fail or take time before torch_xla starts its client.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch_xla.experimental import plugins

from .._core import compatibility
from .._runtime import cuda_driver, cuda_plugin, library
from ..errors import CompatibilityError
from . import exit_order

ENVIRONMENT = "XLA_GPU_PJRT_PLUGIN"


class GpuPlugin(plugins.DevicePlugin):  # type: ignore[misc]
    """What torch_xla asks about the device type GPU. One process drives all of its GPUs, or one each under torchrun."""

    def __init__(self) -> None:
        super().__init__()
        self._only_first_gpu = False
        self._processes: _Processes | None = None

    def library_path(self) -> str:
        """The library whose GetPjrtApi() torch_xla calls.

        Raises:
          CompatibilityError: the driver, a GPU or JAX's CUDA plug-in is missing or too old.
          LibraryError: libxla_gpu_ffi.so cannot be loaded.
        """
        compatibility.torch_xla("PJRT_DEVICE=GPU")
        path = plugin_path()
        if not os.environ.get(ENVIRONMENT):
            _check_driver(path)
        _use(path)
        return str(library.load().path)

    def client_create_options(self) -> dict[str, Any]:
        """Options of the plug-in's client, from the environment variables that JAX reads for them.

        Raises:
          ValueError: a variable has a value that JAX would not take either.
        """
        options = client_options(os.environ)
        if self._only_first_gpu:
            options["visible_devices"] = [0]
        if self._processes is not None:
            options["visible_devices"] = [self._processes.local_rank]
            options["node_id"], options["num_nodes"] = self._processes.rank, self._processes.world_size
        return options

    def requires_xla_coordinator(self) -> bool:
        """Whether torch_xla starts its coordinator, through which the plug-ins of several processes find each other."""
        return self._processes is not None

    def physical_chip_count(self) -> int:
        """Processes that xmp.spawn starts: one, which drives all GPUs."""
        return 1

    def configure_single_process(self) -> None:
        """Uses the first GPU alone."""
        self._only_first_gpu = True

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """One GPU for each process that torchrun started.

        Raises:
          CompatibilityError: torchrun's variables are missing.
        """
        if local_world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise CompatibilityError(
                f"torch_xla on GPU: expected torchrun to start {local_world_size} processes, which sets "
                f"{', '.join(missing)}. xmp.spawn starts one process, which drives all GPUs"
            )
        self._processes = _Processes(local_rank, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        exit_order.rank_0_ends_last(self._processes.rank, self._processes.world_size)


def device_ordinal() -> int:
    """CUDA's number of the GPU of a process that has one."""
    plugin = plugins.default()
    processes = plugin._processes if isinstance(plugin, GpuPlugin) else None
    return 0 if processes is None else processes.local_rank


class _Processes(NamedTuple):
    """This process among those of torchrun."""

    local_rank: int
    rank: int
    world_size: int


def client_options(environ: Any) -> dict[str, Any]:
    """The plug-in's client options for the environment ``environ``; see GpuPlugin.client_create_options."""
    allocators = ("default", "platform", "bfc", "cuda_async")
    allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in allocators:
        raise ValueError(f"XLA_PYTHON_CLIENT_ALLOCATOR: expected one of {', '.join(allocators)}, got {allocator}")
    options: dict[str, Any] = {"platform_name": "cuda", "allocator": allocator}
    # JAX renamed the fraction's variable and still reads the old one.
    names = [name for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION") if environ.get(name)]
    if len(names) > 1:
        raise ValueError(f"expected one of {' and '.join(names)}, got both")
    for name in names:
        options["memory_fraction"] = _number(name, environ[name])
    if preallocate := environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"):
        options["preallocate"] = preallocate not in ("false", "False", "0")
    if megabytes := environ.get("XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"):
        size = _number("XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB", megabytes)
        options["collective_memory_size"] = int(size) * 2**20
    return options


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {text!r}") from None


def pjrt_api() -> int:
    """Address of the PJRT_Api of JAX's CUDA plug-in itself, which the adapter wraps.

    Works before the client starts and without a GPU. Raises CompatibilityError and LibraryError.
    """
    path = plugin_path()
    _use(path)
    return cuda_plugin.pjrt_api(path)


@functools.cache
def plugin_path() -> Path:
    """JAX's CUDA plug-in: $XLA_GPU_PJRT_PLUGIN where set, else the one of the installed packages jax-cuda*-pjrt.

    Of several that for the CUDA version of the installed PyTorch, whose CUDA libraries are in the process already; else
    the newest. Does not import jax. Raises CompatibilityError if there is none.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        if not Path(named).is_file():
            raise CompatibilityError(f"{ENVIRONMENT} names {named}, which is not a file")
        return Path(named)
    found = cuda_plugin.installed()
    if not found:
        raise CompatibilityError(
            "PJRT_DEVICE=GPU needs JAX's CUDA plug-in, and neither package jax-cuda12-pjrt nor jax-cuda13-pjrt is "
            f"installed. {cuda_plugin.EXTRAS}"
        )
    return found.get(_torch_cuda_major(), found[max(found)])


def _torch_cuda_major() -> int:
    import torch

    version = torch.version.cuda  # None in a build without CUDA
    return int(version.split(".")[0]) if version else -1


def _check_driver(path: Path) -> None:
    """Raises CompatibilityError unless there is a GPU and a driver for the plug-in at ``path``."""
    try:
        driver = cuda_driver.driver()
    except cuda_driver.DriverError as error:
        raise CompatibilityError(f"PJRT_DEVICE=GPU: {error}") from None
    needed = cuda_plugin.cuda_major(path)
    if needed is not None and driver.cuda[0] < needed:
        raise CompatibilityError(
            f"PJRT_DEVICE=GPU: the NVIDIA driver (version {driver.version or 'unknown'}) supports CUDA "
            f"{driver.cuda[0]}.{driver.cuda[1]}, and the installed plug-in jax-cuda{needed}-pjrt needs {needed}.0. "
            f"Update the driver, or change the plug-in. {cuda_plugin.EXTRAS}"
        )


def _use(path: Path) -> None:
    cuda_plugin.check_file(path)
    error = library.load().cdll.xla_gpu_pjrt_use_plugin(os.fsencode(path))
    if error is not None:
        raise CompatibilityError(f"PJRT_DEVICE=GPU: {error.decode(errors='replace')}")
