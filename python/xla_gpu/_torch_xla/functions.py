"""The functions of xla_gpu.torch that join CUDA tensors and torch_xla."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._runtime import targets
from . import compile_backend, cuda_tensors, lowering


def register_targets() -> None:
    """Registers all known custom-call targets with torch_xla's runtime, and with it starts the runtime.

    Calls that this process traces register their own. A program that was traced elsewhere, such as one that
    ``torch_xla.stablehlo.StableHLOGraphModule.load`` reads, needs this before it runs.

    Raises:
      xla_gpu.errors.TargetError: the runtime refuses a target.
    """
    platform = lowering.platform()
    for target in targets.registered():
        if target.platform == platform:
            lowering.register(target)


def to_xla(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CUDA tensor as a torch_xla tensor on the same GPU, over the same memory.

    Programs that use it start after what PyTorch's current stream holds now. Do not change the CUDA tensor while such
    programs may run. Strided tensors, and those whose address is no multiple of 16 bytes, are copied on the device
    first. Needs PJRT_DEVICE=GPU; let XLA leave memory to PyTorch with XLA_PYTHON_CLIENT_PREALLOCATE=false. A CPU
    tensor is moved to torch_xla's device.

    Args:
      tensor: on CUDA or the CPU; its gradient is left behind.

    Returns:
      A torch_xla tensor of the same shape and dtype.

    Raises:
      TypeError: it is no dense tensor.
      ValueError: it is on another device.
      xla_gpu.errors.CompatibilityError: torch_xla's client is not this package's on a GPU.
    """
    return cuda_tensors.to_xla(tensor)


def to_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a torch_xla tensor as a CUDA tensor on the same GPU, over the same memory, without waiting for it.

    Pending operations are started (``torch_xla.sync()``), and PyTorch's current stream waits for the result. The memory
    stays as long as the CUDA tensor, whatever becomes of the XLA tensor.

    Args:
      tensor: on an XLA device of PJRT_DEVICE=GPU; its gradient is left behind.

    Returns:
      A CUDA tensor of the same shape and dtype.

    Raises:
      TypeError: it is no XLA tensor.
      ValueError: this PyTorch has no CUDA.
      xla_gpu.errors.CompatibilityError: the runtime does not share its memory.
    """
    return cuda_tensors.to_cuda(tensor)


def openxla(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Compiles a function of CUDA tensors as an XLA program: ``torch.compile(backend="xla_gpu")``.

    Arguments and results are CUDA tensors (or CPU tensors) and share memory with the program's, as by to_xla and
    to_cuda. Parameters are taken over once. Arguments that the function changes get their new values by a copy on the
    device. With PJRT_DEVICE=GPU, ``backend="openxla"`` does the same for functions of CUDA tensors, unless
    ``XLA_GPU_OPENXLA_CUDA=0`` is set.

    Args:
      graph: from torch.compile.
      example_inputs: from torch.compile.
      **options: from torch.compile.

    Returns:
      A function that torch.compile calls.
    """
    return compile_backend.backend(graph, example_inputs, **options)
