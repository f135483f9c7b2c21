"""Programs launched through the PJRT adapter, without torch_xla: its client takes the host 0.2 to 0.4 ms for a step.

A program runs once through torch_xla, while the adapter records its executable and the buffers of its arguments. From
then on the adapter repeats that with other buffers, of arrays that are its own: torch_xla never sees them.
"""

from __future__ import annotations

import atexit
import ctypes as ct
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._core.environment import pjrt_device, switch
from .._runtime import library

# Of PJRT_Buffer_Type.
_TYPES = {
    torch.bool: 1,
    torch.int8: 2,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: 6,
    torch.float16: 10,
    torch.float32: 11,
    torch.bfloat16: 13,
}

# At the process's end torch_xla's client goes, with all buffers: arrays that are deleted after that have none.
_exiting = False
_used = False  # something was recorded


@atexit.register
def _exit() -> None:
    global _exiting
    _exiting = True
    if _used:
        library.load().cdll.xla_gpu_launch_wait()


# The array of a tensor of torch_xla, kept on it with the tensor's version: the array is not updated with the tensor.
_ATTRIBUTE = "_xla_gpu_array"


def available() -> bool:
    """Whether programs are launched directly: on GPUs, whose client is behind the adapter.

    ``XLA_GPU_DIRECT_LAUNCH=0`` leaves them to torch_xla.
    """
    return switch("XLA_GPU_DIRECT_LAUNCH", True) and pjrt_device() == "GPU"


class DeviceArray:
    """An array on every device of the engine.

    Attributes:
      shape: of it.
      dtype: of it.
      borrowed: its buffers are those of a tensor of torch_xla, which may let go of them.
    """

    __slots__ = ("borrowed", "dtype", "handle", "shape")

    def __init__(self, handle: int | None, shape: Sequence[int], dtype: torch.dtype, *, borrowed: bool = False) -> None:
        self.handle, self.shape, self.dtype, self.borrowed = handle, tuple(shape), dtype, borrowed

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def cpu(self) -> torch.Tensor:
        """Its values; waits for them."""
        values = torch.empty(self.shape, dtype=self.dtype)
        size = values.numel() * values.element_size()
        _raise(library.load().cdll.xla_gpu_array_read(self.handle, values.data_ptr(), size))
        return values

    def __del__(self) -> None:
        if self.handle is not None and not _exiting:
            library.load().cdll.xla_gpu_array_destroy(self.handle)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which those of the inference mode do not have


# What programs take and return: a tensor of torch_xla, from the first direct launch on a DeviceArray.
Array = Any


class DirectLaunch:
    """A program as it was recorded.

    Args:
      handle: the adapter's.
      places: which argument of the program each input is, then each part of the state in the program's order; -1:
        none.
      state_order: which part of the state that is.
      forms: shape and dtype of each output.
      keep: has the buffers of the other arguments.
    """

    def __init__(
        self,
        handle: int,
        places: Sequence[int],
        state_order: Sequence[int],
        forms: Sequence[tuple[torch.Size, torch.dtype]],
        keep: Sequence[Any],
    ) -> None:
        self._cdll = library.load().cdll
        self._handle = handle
        self._places = (ct.c_int32 * len(places))(*places)
        self._state_order = list(state_order)
        self._forms = list(forms)
        self._keep = keep
        self._given = (ct.c_void_p * len(places))()
        self._outputs = (ct.c_void_p * len(forms))()

    def __del__(self) -> None:
        if not _exiting:
            self._cdll.xla_gpu_launch_wait()  # what was launched needs what is kept
            self._cdll.xla_gpu_launch_destroy(self._handle)

    def note(self, tensor: torch.Tensor, *, argument: int | None = None, result: int | None = None) -> None:
        """``tensor`` is an argument, or a result, of the recorded execution; it must stay as long as its array."""
        index = argument if result is None else result
        handle = self._cdll.xla_gpu_launch_buffers(self._handle, result is not None, index)
        array = DeviceArray(handle, tensor.shape, tensor.dtype, borrowed=True)
        setattr(tensor, _ATTRIBUTE, (_version(tensor), array))

    def __call__(self, inputs: Sequence[Any], state: Sequence[Array]) -> tuple[list[DeviceArray], list[DeviceArray]]:
        """Launches the program; returns at once."""
        arrays = [self._array(value) for value in inputs]
        kept = [self._array(value) for value in state]
        given = self._given
        for index, array in enumerate(arrays):
            given[index] = array.handle
        for index, part in enumerate(self._state_order, len(arrays)):
            given[index] = kept[part].handle
        outputs = self._outputs
        borrowed = any(array.borrowed for array in arrays) or any(array.borrowed for array in kept)
        _raise(self._cdll.xla_gpu_launch_run(self._handle, self._places, given, len(self._places), len(kept), outputs))
        if borrowed:  # the caller may let go of the tensors once they are launched
            self._cdll.xla_gpu_launch_wait()
            for array in kept:  # has what the program returned
                array.borrowed = False
        return [DeviceArray(outputs[i], *form) for i, form in enumerate(self._forms)], kept

    def _array(self, value: Any) -> DeviceArray:
        if isinstance(value, DeviceArray):
            return value
        if isinstance(value, np.ndarray):
            return self._upload(value)
        version, array = getattr(value, _ATTRIBUTE, (None, None))
        if array is None or version != _version(value):  # a table that torch_xla has
            array = self._upload(value.cpu().numpy())
            setattr(value, _ATTRIBUTE, (_version(value), array))
        return array

    def _upload(self, values: npt.NDArray[Any]) -> DeviceArray:
        values = np.ascontiguousarray(values)
        dtype = torch.from_numpy(values[:0] if values.ndim else values).dtype
        handle = ct.c_void_p()
        dims = (ct.c_int64 * values.ndim)(*values.shape)
        _raise(
            self._cdll.xla_gpu_array_make(
                self._handle, values.ctypes.data, values.nbytes, _TYPES[dtype], dims, values.ndim, ct.byref(handle)
            )
        )
        return DeviceArray(handle.value, values.shape, dtype)


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode(errors="replace"))


def record(
    run: Callable[[], list[torch.Tensor]], arguments: int, results: int
) -> tuple[int | None, list[torch.Tensor]]:
    """Records the execution of a program by ``run``: the adapter's handle of it, and what ``run`` returned.

    No handle where what was executed had another number of arguments, or did not go through the adapter.
    """
    global _used
    _used = True
    cdll = library.load().cdll
    count = ct.c_size_t()
    cdll.xla_gpu_launch_record(results)
    try:
        returned = run()
    finally:
        handle = cdll.xla_gpu_launch_take_recorded(ct.byref(count))
    if handle is not None and count.value != arguments:
        cdll.xla_gpu_launch_destroy(handle)
        handle = None
    return handle, returned
