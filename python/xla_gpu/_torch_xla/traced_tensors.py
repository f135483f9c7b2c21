"""The tensors of a trace: which ones it updated, which ones it captured, and what it is traced with; see jit.py."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_xla
from torch.overrides import TorchFunctionMode

from .program import _XLAC, Program

# Arguments up to this size are copied for the trace.
_COPIED_BYTES = 1 << 20

# torch_xla gives a program's results of these dtypes signed ones.
UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}


def is_updated(tensor: torch.Tensor) -> bool:
    updated: list[bool] = _XLAC._check_tensor_need_materialization([tensor])
    return updated[0]


def is_changed(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether it was updated since ``before`` was cloned, be it by nothing but the memory of another tensor."""
    return is_updated(tensor) or len(_XLAC._get_tensors_xla_device_data_node([tensor, before])[0]) != 1


def is_buffer(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but memory of the device: torch_xla leaves it out of a program's results."""
    return not is_updated(tensor) and _XLAC._get_tensors_xla_device_data_node([tensor])[0] == [
        _XLAC._xla_get_tensor_id(tensor)
    ]


def tensors_of(value: Any, where: str | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a result; with ``where`` parts of it whose tensors would not be found are refused."""
    if isinstance(value, torch.Tensor):
        yield value
    elif where is not None and dataclasses.is_dataclass(value):
        raise TypeError(
            f"{where}: result: expected tensors, lists, tuples, dicts and other values, got the dataclass "
            f"{type(value).__name__}"
        )
    elif where is not None and (isinstance(value, Iterator) or _is_set_of_tensors(value)):
        raise TypeError(
            f"{where}: result: expected tensors, lists, tuples, dicts and other values, got a {type(value).__name__}"
        )
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part, where)


def _is_set_of_tensors(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and any(isinstance(part, torch.Tensor) for part in value)


class Captured(TorchFunctionMode):  # type: ignore[misc]
    """Sees the tensors that a function uses: those that are neither arguments nor its own results are captured."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in given}
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of([args, kwargs]):
            if id(tensor) in self._known or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                continue
            if tensor.is_xla:
                self._known[id(tensor)] = tensor
                with torch.no_grad():
                    self._saved.append((tensor, tensor.clone()))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor
                self._made.append(weakref.ref(tensor))
        return result

    def pending(self) -> list[weakref.ref[torch.Tensor]]:
        """What the function computed, and will not be computed outside of its program."""
        made = [tensor for tensor in (reference() for reference in self._made) if tensor is not None and tensor.is_xla]
        updated = _XLAC._check_tensor_need_materialization(made)
        return [weakref.ref(tensor) for tensor, new in zip(made, updated, strict=True) if new]

    def restore(self) -> list[torch.Tensor]:
        """The captured tensors that were updated, which have their values again."""
        updated = [pair for pair in self._saved if is_changed(*pair)]
        for tensor, original in updated:
            _XLAC._replace_xla_tensor(tensor, original)
        return [tensor for tensor, _ in updated]


def invalidate(kept: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Gives what a function kept of its trace memory that is gone: to read it or to compute with it is an error.

    It would end the process else, since torch_xla looks for its value without asking whether there is one.
    """
    if not any(reference() is not None for reference in kept):
        return
    gc.collect()
    tensors = [tensor for tensor in (reference() for reference in kept) if tensor is not None]
    if not tensors:
        return
    # Memory of a number from the host may be that of all tensors with this value, and is not donated: it is computed.
    gone = [
        torch.zeros(tensor.shape or 1, dtype=tensor.dtype).to(torch_xla.device()).reshape(tensor.shape).clone()
        for tensor in tensors
    ]

    def others(*given: torch.Tensor) -> list[torch.Tensor]:
        # Each of its own dtype: memory that no result takes stays.
        return [tensor.logical_not() if tensor.dtype == torch.bool else tensor + 1 for tensor in given]

    given_up = Program("jit: kept tensors", others, gone, donated=range(len(gone)))
    given_up.run(gone)
    for tensor, memory in zip(tensors, gone, strict=True):
        _XLAC._replace_xla_tensor(tensor, memory)


def compute(tensor: torch.Tensor) -> None:
    """Makes memory, of an argument that took another one's value, something that a program computes and returns."""
    if _XLAC._get_tensors_xla_device_data_node([tensor])[0] == [_XLAC._xla_get_tensor_id(tensor)]:
        new = uploaded(tensor)  # of the host; under this number it would be the argument
    else:
        new = tensor.clone()
    _XLAC._xla_optimization_barrier_([new])
    tensor.copy_(new)


def distinct(tensors: Sequence[torch.Tensor], donated: Sequence[int]) -> list[torch.Tensor]:
    """What to trace with: tensors whose memory nothing else has, as far as that is cheap.

    torch_xla tells a program's parameters by their memory. Numbers of one value share it, and so does what the function
    reads and is also given.
    """
    torch_xla.sync()
    made: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors):
        small = number not in donated and tensor.numel() * tensor.element_size() <= _COPIED_BYTES
        if small or len(_XLAC._get_tensors_xla_device_data_node([*made, tensor])[0]) != len(made) + 1:
            tensor = uploaded(tensor)
        made.append(tensor)
    torch_xla.sync()
    return made


def uploaded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own."""
    (copy,) = _XLAC._xla_tensors_from_aten([tensor.detach().cpu()], [str(torch_xla.device())], None)
    return copy if copy.dtype == tensor.dtype else copy.to(tensor.dtype)  # uint32 came as int32 of the same bits


def of_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor with the dtype that its bits have."""
    if tensor.dtype == dtype:
        return tensor
    named = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    _XLAC._replace_xla_tensor(named, tensor)
    return named
