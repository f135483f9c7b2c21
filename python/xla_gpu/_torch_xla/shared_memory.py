"""Device memory of another framework as torch_xla tensors, and the other way, without a copy.

torch_xla 2.9 moves host memory alone. An address in device memory travels through it in the place of host memory, and
the PJRT adapter makes a view of it (ffi/runtime/shared_buffers.h).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._runtime import abi, library
from ..errors import CompatibilityError
from . import lowering

# DLPack's type codes, by PyTorch's names of dtypes; the bits follow from the size.
_CODES = {torch.bool: 6, torch.bfloat16: 4, torch.complex64: 5, torch.complex128: 5}
for _dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
    _CODES[_dtype] = 0
for _dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
    _CODES[_dtype] = 1
for _dtype in (torch.float16, torch.float32, torch.float64):
    _CODES[_dtype] = 2
_CODES[torch.float8_e4m3fn], _CODES[torch.float8_e5m2] = 10, 12


class Owner:
    """What owns imported memory, kept until the runtime has deleted its buffer.

    A program may still read the memory then. ``wait`` waits for the device, and is called before the memory is let go
    of, unless ``ordered`` says that the other framework's stream already waits for all programs that read it. Owners on
    one device share one ``wait``.
    """

    def __init__(self, memory: Any, wait: Callable[[], None]) -> None:
        self.memory, self.wait, self.ordered = memory, wait, False


_BUFFER_ATTEMPTS = 50  # of a tenth of a millisecond

_import_lock = threading.Lock()
_kept: dict[int, Owner] = {}
_next_id = 0

_python = ctypes.PyDLL(None)
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Carrier(torch.Tensor):  # type: ignore[misc]
    """A CPU tensor that gives its address away and is never read: torch_xla asks it for a copy on the host."""

    _forged: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, forged: torch.Tensor) -> _Carrier:
        carrier: _Carrier = torch.Tensor._make_wrapper_subclass(
            cls, forged.size(), strides=forged.stride(), dtype=forged.dtype, device="cpu"
        )
        carrier._forged = forged
        return carrier

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode and under autocast PyTorch takes the operator that is otherwise made of _to_copy.
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to):
            return args[0]._forged
        raise CompatibilityError(
            f"torch_xla of a version that is not known: it calls {func} when it takes a tensor over"
        )


class Memory(NamedTuple):
    """Row-major device memory of another framework, as an XLA tensor is to have it."""

    address: int
    shape: torch.Size
    dtype: torch.dtype
    owner: Owner = Owner(None, lambda: None)


def import_memory(memories: Sequence[Memory], device: torch.device, stream: int) -> list[torch.Tensor]:
    """torch_xla tensors on ``device`` over device memory.

    Programs that use them start after what ``stream`` holds now.

    Raises:
      CompatibilityError: the runtime does not take device memory over.
    """
    return [tensor for tensor, _ in _transfer(memories, device, stream, placeholders=False)]


def make_placeholders(memories: Sequence[Memory], device: torch.device) -> list[tuple[torch.Tensor, int]]:
    """torch_xla tensors that stand for memory in the arguments of programs, and the numbers to bind memory to them.

    Until then nothing may be done with them; what ``memories`` has tells the transfers apart. Memory must be aligned as
    a program's arguments, and is kept by whoever binds it.
    """
    return _transfer(memories, device, 0, placeholders=True)


def bind(numbers: Any, addresses: Any, count: int, stream: int) -> None:
    """Binds memory to placeholders; both are arrays of ctypes.

    Programs that start from now on get it, and start after what ``stream`` holds now.
    """
    error = library.load().cdll.xla_gpu_bind_placeholders(numbers, addresses, count, stream)
    if error is not None:
        raise CompatibilityError(f"sharing device memory with torch_xla: {error.decode(errors='replace')}")


def unbind(numbers: Any, count: int) -> None:
    """Ends a binding: a program that started with these placeholders would fail."""
    library.load().cdll.xla_gpu_bind_placeholders(numbers, None, count, None)


def _transfer(
    memories: Sequence[Memory], device: torch.device, stream: int, *, placeholders: bool
) -> list[tuple[torch.Tensor, int]]:
    if lowering.platform() != "CUDA":
        raise CompatibilityError("device memory can be shared with torch_xla on GPUs alone (PJRT_DEVICE=GPU)")
    forget_released()
    made: list[tuple[torch.Tensor, int]] = []
    batch: dict[int, Memory] = {}  # an address tells the adapter which transfer is meant, so each is there once
    for memory in memories:
        if memory.address in batch or memory.shape.numel() == 0:
            made += _transfer_batch(batch, device, stream, placeholders)
            batch = {}
        if memory.shape.numel() == 0:
            made.append((torch.empty(memory.shape, dtype=memory.dtype).to(device), -1))
        else:
            batch[memory.address] = memory
    return made + _transfer_batch(batch, device, stream, placeholders)


def _transfer_batch(
    batch: dict[int, Memory], device: torch.device, stream: int, placeholders: bool
) -> list[tuple[torch.Tensor, int]]:
    import _XLAC

    if not batch:
        return []
    global _next_id
    cdll, count = library.load().cdll, len(batch)
    carriers = [_carrier(memory.address, memory.shape, memory.dtype) for memory in batch.values()]
    addresses, unused = (ctypes.c_void_p * count)(*batch), (ctypes.c_int64 * count)()
    # Another thread may bring the same memory; its transfer must not be taken for this one.
    with _import_lock:
        numbers = range(_next_id, _next_id + count)
        _next_id += count
        ids = (ctypes.c_int64 * count)(*numbers)
        if placeholders:
            error = cdll.xla_gpu_import_placeholders(addresses, ids, count)
        else:
            error = cdll.xla_gpu_import_buffers(addresses, ids, count, stream)
        if error is not None:
            raise CompatibilityError(f"sharing device memory with torch_xla: {error.decode(errors='replace')}")
        if not placeholders:
            _kept.update(zip(numbers, (memory.owner for memory in batch.values()), strict=True))
        try:
            tensors = list(_XLAC._xla_tensors_from_aten(carriers, [str(device)] * count))
        finally:
            num_unused = cdll.xla_gpu_import_cancel(addresses, count, unused)
            for number in unused[:num_unused]:
                _kept.pop(number, None)
    if num_unused:
        raise CompatibilityError(
            "sharing device memory with torch_xla: its client is not behind this library's adapter"
        )
    return list(zip(tensors, numbers, strict=True))


# A carrier owns nothing, so it serves all tensors of its address: caches and what the allocator hands out again.
@functools.lru_cache(maxsize=4096)
def _carrier(address: int, shape: torch.Size, dtype: torch.dtype) -> _Carrier:
    size = shape.numel() * dtype.itemsize
    data = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return _Carrier(data.view(dtype).view(shape))


def forget_released() -> int:
    """Lets go of owners of memory whose buffers the runtime has deleted; returns how many are still kept."""
    ids = (ctypes.c_int64 * 64)()
    while count := library.load().cdll.xla_gpu_import_released(ids, len(ids)):
        owners = [owner for number in ids[:count] if (owner := _kept.pop(number, None)) is not None]
        unordered = [owner for owner in owners if not owner.ordered]
        for wait in {owner.wait for owner in unordered}:  # once for each device
            wait()
    return len(_kept)


def wait_for_buffer(tensor: torch.Tensor, before: Callable[[], object] = lambda: None) -> int:
    """The address of a torch_xla tensor's buffer; ``before`` is called before each request to the runtime.

    A result has no buffer until torch_xla's thread has started its program, and torch_xla raises until then. That takes
    less than a millisecond where programs run asynchronously. The last resort is to wait until they have run.
    """
    import _XLAC

    for attempt in range(_BUFFER_ATTEMPTS):
        before()
        try:
            return int(_XLAC._unsafe_buffer_pointer(tensor))
        except RuntimeError:
            if attempt < _BUFFER_ATTEMPTS - 1:
                time.sleep(1e-4)
    _XLAC._xla_wait_device_ops([])
    before()
    return int(_XLAC._unsafe_buffer_pointer(tensor))


def export_memory(tensors: Sequence[torch.Tensor], device_type: int, device_id: int, stream: int) -> list[Any]:
    """DLPack capsules over the device memory of torch_xla tensors, for which ``stream`` waits.

    The memory stays as long as the capsule's tensor, and until the stream has done what it then holds.
    """
    cdll = library.load().cdll
    described, _ = _export_args(tuple((tensor.shape, tensor.dtype) for tensor in tensors), device_type, device_id)
    args = type(described).from_buffer_copy(described)
    cdll.xla_gpu_export_begin()
    try:
        for tensor in tensors:
            wait_for_buffer(tensor)
    finally:  # ends what xla_gpu_export_begin began, and exports nothing unless each tensor named its buffer
        error = cdll.xla_gpu_export_buffers(args, len(args), stream)
    if error is not None:
        raise CompatibilityError(f"sharing torch_xla's memory: {error.decode(errors='replace')}")
    return [_python.PyCapsule_New(each.managed_tensor, b"dltensor", None) for each in args]


@functools.lru_cache(maxsize=1024)
def _export_args(described: tuple[tuple[torch.Size, torch.dtype], ...], device_type: int, device_id: int) -> Any:
    """An array of ExportArgs, and what it points to."""
    args, shapes = (abi.ExportArgs * len(described))(), []
    for each, (shape, dtype) in zip(args, described, strict=True):
        code = _CODES.get(dtype)
        if code is None:
            raise TypeError(f"sharing torch_xla's memory: expected a dtype that DLPack has, got {dtype}")
        shapes.append((ctypes.c_int64 * len(shape))(*shape))
        each.struct_size = ctypes.sizeof(abi.ExportArgs)
        each.device_type, each.device_id = device_type, device_id
        each.dtype_code, each.dtype_bits = code, 8 * dtype.itemsize
        each.rank, each.dims = len(shape), shapes[-1]
    return args, shapes
