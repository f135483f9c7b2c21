"""Arguments and results of functions of jit: the tensors in them, and how either is made anew with others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._core.dtypes import DTYPES
from .program import _XLAC
from .traced_tensors import is_buffer, is_updated, tensors_of

# ---- Arguments -------------------------------------------------------------------------------------------------------


def flatten(where: str, value: Any, tensors: list[Any], key: list[Any]) -> None:
    """Appends the tensors of an argument, and all else that a program depends on."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key.append((value.shape, value.dtype))
    elif type(value) is list and value and all(isinstance(part, torch.Tensor) for part in value):
        tensors += value
        key.append((list, *[part.shape for part in value], *[part.dtype for part in value]))
    elif isinstance(value, np.ndarray):
        tensor = _from_numpy(where, value)
        tensors.append(tensor)
        key.append((tensor.shape, tensor.dtype))
    elif isinstance(value, (list, tuple)):
        key.append((type(value), len(value)))
        for part in value:
            flatten(where, part, tensors, key)
    elif isinstance(value, dict):
        key.append((dict, tuple(value)))
        for part in value.values():
            flatten(where, part, tensors, key)
    elif isinstance(value, (float, complex, np.generic)):
        number = np.asarray(value)
        key.append((type(value), number.dtype, number.tobytes()))  # -0.0 is not 0.0, and NaN is the same as NaN
    else:
        key.append((type(value), value))


def refuse_unhashable(where: str, arguments: Sequence[Any]) -> None:
    """Raises TypeError for the argument whose key cannot be hashed."""
    for number, argument in enumerate(arguments):
        key: list[Any] = []
        flatten(where, argument, [], key)
        for part in key:
            try:
                hash(part)
            except TypeError:
                raise TypeError(
                    f"{where}: argument {number}: expected tensors, arrays and hashable values, got {part[0].__name__}"
                ) from None


def with_tensors(value: Any, tensors: Any) -> Any:
    """An argument with the next of ``tensors`` in the places of its own."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        parts = [with_tensors(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: with_tensors(part, tensors) for name, part in value.items()}
    return value


def _from_numpy(where: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    dtype = _dtype_of(array.dtype)
    if dtype is None:
        raise TypeError(f"{where}: expected arrays of a dtype that PyTorch and XLA have, got {array.dtype}")
    # PyTorch has neither negative strides nor memory that cannot be written.
    flags = array.flags
    plain = array if flags.c_contiguous and flags.writeable else array.copy()
    if array.dtype.kind == "V":  # of ml_dtypes
        return torch.from_numpy(plain.view(f"i{array.dtype.itemsize}")).view(dtype)
    return torch.from_numpy(plain)


@functools.cache  # NumPy puts the name together anew each time
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype | None:
    """PyTorch's dtype; None where PyTorch or XLA has none."""
    found = getattr(torch, dtype.name, None) if dtype.name in DTYPES and dtype.isnative else None
    return found if isinstance(found, torch.dtype) else None


# ---- Results ---------------------------------------------------------------------------------------------------------


class Result:
    """How the result of a call is built from what its program returns.

    Attributes:
      outputs: what the function computed, but for what takes the memory of a donated tensor.
      consumed: numbers of the donated tensors whose memory is a result's; they have that value now.
    """

    def __init__(self, result: Any, given: Sequence[torch.Tensor], donated: Sequence[int], where: str) -> None:
        self.outputs: list[torch.Tensor] = []
        self.consumed: set[int] = set()
        places: dict[int, int] = {}  # in what build() is called with
        computed: dict[int, torch.Tensor] = {}
        copied: set[int] = set()
        # By torch_xla's numbers, which a tensor and its detach() share.
        numbers = {_XLAC._xla_get_tensor_id(tensor): number for number, tensor in enumerate(given)}
        for leaf in tensors_of(result, where):
            if leaf.device.type != "xla":
                raise ValueError(f"{where}: result: expected XLA tensors, got one on {leaf.device}")
            number = numbers.get(_XLAC._xla_get_tensor_id(leaf))
            if number is not None and (number not in donated or is_updated(leaf)):
                places[id(leaf)] = number
            elif is_buffer(leaf):  # a donated tensor, or one that was captured: no result by itself
                computed[id(leaf)] = leaf.clone()
                copied.add(id(leaf))
            else:
                computed[id(leaf)] = leaf
        # XLA itself would take any donated tensor of a result's size, and copy where it is read afterwards.
        for number in donated:
            tensor = given[number]
            if is_updated(tensor):
                continue
            for key, leaf in computed.items():
                if key in places or key in copied:
                    continue
                if leaf.shape == tensor.shape and leaf.dtype == tensor.dtype:
                    tensor.copy_(leaf)
                    places[key] = len(given) + number
                    self.consumed.add(number)
                    break
        for key, leaf in computed.items():
            if key not in places:
                places[key] = 2 * len(given) + len(self.outputs)
                self.outputs.append(leaf)
        self._build = _builder(result, places)
        self._num_given = len(given)

    def build(self, tensors: Sequence[torch.Tensor], outputs: Sequence[Any], updated: Mapping[int, Any]) -> Any:
        """The result of a call with ``tensors``, from the outputs and the new values of some of the tensors."""
        return self._build([*tensors, *map(updated.get, range(self._num_given)), *outputs])


def _builder(value: Any, places: Mapping[int, int]) -> Callable[[Sequence[Any]], Any]:
    """What makes a value like ``value`` of the tensors at these places."""
    if isinstance(value, torch.Tensor):
        return operator.itemgetter(places[id(value)])
    if isinstance(value, (list, tuple)):
        parts = [_builder(part, places) for part in value]
        make = getattr(type(value), "_make", type(value))
        return lambda tensors: make([part(tensors) for part in parts])
    if isinstance(value, dict):
        entries = {name: _builder(part, places) for name, part in value.items()}
        return lambda tensors: {name: part(tensors) for name, part in entries.items()}
    return lambda tensors: value
