"""CUDA tensors of PyTorch as torch_xla tensors on the same GPU, and the other way."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import dlpack

from .._core import compatibility
from . import shared_memory

_log = logging.getLogger("xla_gpu")
_ALIGNMENT = 16  # bytes: what XLA's programs rely on for their arguments
_DLPACK_CUDA = 2


class Counts(NamedTuple):
    """What sharing has done in this process."""

    shared: int  # tensors taken over without a copy
    copied: int  # copied on the device first, since they were strided or misaligned


_lock = threading.Lock()
_shared = _copied = 0


def counts() -> Counts:
    """What sharing has done in this process so far."""
    return Counts(_shared, _copied)


def to_xla(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """See xla_gpu.torch.to_xla. ``device`` is the CUDA device on whose XLA device a CPU tensor is wanted."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_xla: tensor: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"to_xla: tensor: expected a dense tensor, got layout {tensor.layout}")
    if tensor.device.type == "xla":
        return tensor
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor.to(xla_device(device or tensor.device))
    if tensor.device.type != "cuda":
        raise ValueError(f"to_xla: tensor: expected one on CUDA or the CPU, got one on {tensor.device}")
    return take_over([tensor])[0][0]


def take_over(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[shared_memory.Owner]]:
    """``to_xla`` of CUDA tensors of one device, with what keeps their memory."""
    if not tensors:
        return [], []
    refuse_capture("to_xla")
    device, memories = tensors[0].device, []
    wait = _wait_for(device)
    for memory in row_major(tensors):
        owner = shared_memory.Owner(memory, wait)
        memories.append(shared_memory.Memory(memory.data_ptr(), memory.shape, memory.dtype, owner))
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):  # the stream may be the current device's default one, whose number is 0 everywhere
        taken = shared_memory.import_memory(memories, xla_device(device), stream)
    return taken, [memory.owner for memory in memories]


@functools.cache
def _wait_for(device: torch.device) -> Callable[[], None]:
    """Waits for a CUDA device, whichever is current when it is called."""
    return functools.partial(torch.cuda.synchronize, device)


def row_major(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, or copies of them, as XLA's programs take memory: row-major and aligned."""
    global _shared, _copied
    memories, copied = [], 0
    for tensor in tensors:
        if not is_row_major(tensor):
            memory = tensor.resolve_conj().resolve_neg().contiguous()
            if memory.data_ptr() % _ALIGNMENT:
                memory = memory.clone()
            copied += 1
            _log.debug("to_xla: a tensor of strides %s was copied on the device", tensor.stride())
            tensor = memory
        memories.append(tensor)
    with _lock:
        _shared, _copied = _shared + len(tensors) - copied, _copied + copied
    return memories


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether XLA's programs take the tensor's memory as it is: row-major and aligned."""
    plain = not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def refuse_capture(where: str) -> None:
    """Raises RuntimeError while PyTorch captures a CUDA graph, which would not hold the programs of XLA."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{where}: expected no capture of a CUDA graph, since XLA runs its programs on streams of its own: call "
            "it outside of torch.cuda.graph; XLA makes CUDA graphs of what it compiles by itself"
        )


def xla_device(device: torch.device) -> torch.device:
    """The XLA device on the GPU of a CUDA device; for the CPU torch_xla's default one."""
    torch_xla = compatibility.torch_xla("the torch_xla front end")
    if device.type == "xla":
        return device
    if device.type != "cuda":
        default: torch.device = torch_xla.device()
        return default
    return _xla_device(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _xla_device(index: int) -> torch.device:
    import torch_xla

    device: torch.device = torch_xla.device(index)
    return device


def to_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """See xla_gpu.torch.to_cuda."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
        got = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"to_cuda: tensor: expected an XLA tensor, got {got}")
    if not torch.cuda.is_available():
        raise ValueError(f"to_cuda: expected a PyTorch that sees a CUDA device, got torch {torch.__version__}")
    import _XLAC
    import torch_xla

    refuse_capture("to_cuda")
    tensor = tensor.detach()
    if any(_XLAC._check_tensor_need_materialization([tensor])):  # a pending tensor has no memory yet
        torch_xla.sync()
    return export([tensor])[0]


def export(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """CUDA tensors over the memory of XLA tensors of one device, whose programs were started."""
    if not tensors:
        return []
    index = tensors[0].device.index or 0
    device = torch.device("cuda", index)
    stream: Any = torch.cuda.current_stream(device)
    full = [tensor for tensor in tensors if tensor.numel() > 0]
    with torch.cuda.device(device):  # as in take_over
        capsules = iter(shared_memory.export_memory(full, _DLPACK_CUDA, index, stream.cuda_stream) if full else [])
    return [
        dlpack.from_dlpack(next(capsules))
        if tensor.numel() > 0
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for tensor in tensors
    ]
