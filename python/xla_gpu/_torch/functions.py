"""The functions of xla_gpu.torch: operators called with Python's conventions and their declarations' error texts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from .._core.checks import Checks
from .._core.docstrings import docstring
from .._core.operator import IntOperand, Operator
from . import operators  # noqa: F401 - defines torch.ops.xla_gpu.*
from .tensors import check_dense, check_operands, spec

_Function = TypeVar("_Function", bound=Callable[..., Any])


def function(operator: Operator, in_place: bool = False) -> Callable[[_Function], _Function]:
    """Makes a function that calls ``operator``, or its in-place form, of a declaration: a signature and a docstring."""

    def decorate(declaration: _Function) -> _Function:
        overloads = getattr(torch.ops.xla_gpu, f"{operator.name}_" if in_place else operator.name)
        signature = inspect.signature(declaration)
        int_operands = [_IntOperand(operator, operand) for operand in operator.int_operands]
        plain_values = [(operator.arguments.index(name), name, kind) for name, kind in operator.plain_values]

        @functools.wraps(declaration)
        def function(*args: Any, **kwargs: Any) -> Any:
            for operand in int_operands:
                args, kwargs = operand.as_tensor(args, kwargs)
            for index, name, kind in plain_values:
                if index >= len(args) and name not in kwargs:
                    continue
                if _is_converted(kind, given := args[index] if index < len(args) else kwargs[name]):
                    raise TypeError(
                        f"{operator.name}: {name}: expected {kind} known when the call is traced, "
                        f"got {type(given).__name__}"
                    )
            axes = None
            if operator.rows:
                args, kwargs, axes = _with_rows(operator, args, kwargs)
            try:
                results = overloads(*args, **kwargs)
            except RuntimeError:
                _check(operator, signature, args, kwargs)
                raise
            if isinstance(results, list):  # of a varying number
                return results[0] if len(results) == 1 else tuple(results)
            return results if axes is None else results.reshape(*axes, results.shape[-1])

        return docstring(operator.docstring)(function)  # type: ignore[return-value]

    return decorate


def _with_rows(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...] | None]:
    """The arguments, those of operator.rows as [rows, n], and the axes that stood in the place of rows, if not one."""
    first, *others = operator.rows
    x = args[0] if args else kwargs.get(first)
    if not isinstance(x, torch.Tensor) or x.dim() in (0, 2):
        return args, kwargs, None
    given = {first: x, **{name: kwargs[name] for name in others if isinstance(kwargs.get(name), torch.Tensor)}}
    for name, tensor in given.items():
        check_dense(operator.name, name, tensor)
    specs = {name: spec(f"{operator.name}: {name}", tensor) for name, tensor in given.items()}
    axes = operator.axes_of_rows(**specs)
    given = {name: tensor.reshape(math.prod(axes), tensor.shape[-1]) for name, tensor in given.items()}
    if args:
        args = (given.pop(first), *args[1:])
    return args, {**kwargs, **given}, axes


# NOTE: torch.compile traces isinstance with a tuple, but not with a union.
_CONVERTED = {
    "an int": (bool, np.bool_, np.floating),  # of a float the dispatcher takes the whole part
    "a number": (bool, np.bool_, np.ndarray, torch.Tensor),  # of an array of one element that
}


def _is_converted(kind: str, value: Any) -> bool:
    """Whether the dispatcher would take ``value`` for one of ``kind`` that it is not."""
    if kind == "a bool":  # it asks whatever it gets for its truth
        return not isinstance(value, (bool, np.bool_))
    if kind == "an int" and isinstance(value, (np.ndarray, torch.Tensor)):
        return "int" not in str(value.dtype)
    return isinstance(value, _CONVERTED[kind])


def call(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Calls ``operator``, for functions with a body of their own."""
    try:
        return getattr(torch.ops.xla_gpu, operator.name)(*args, **kwargs)
    except RuntimeError:
        check_values(operator, dict(zip(operator.arguments, args, strict=False), **kwargs))
        raise


# The dispatcher's texts about arguments of a wrong type name neither what was expected nor our documentation's types.
# Where it raises, the declaration's checks come first.


def _check(operator: Operator, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the declaration says against the arguments, if anything."""
    try:
        values = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{operator.name}: {error}") from None
    check_values(operator, values)


def check_values(operator: Operator, values: dict[str, Any]) -> None:
    """Raises what the declaration says against the arguments of these names, if anything."""
    tensors = {name: values[name] for name in operator.operands if isinstance(values.get(name), torch.Tensor)}
    for name, tensor in tensors.items():
        check_dense(operator.name, name, tensor)
        values[name] = spec(f"{operator.name}: {name}", tensor)
    operator.bind(**values)
    check_operands(operator.name, tuple(tensors), tuple(tensors.values()))


class _IntOperand:
    """An operand that may be an int."""

    def __init__(self, operator: Operator, operand: IntOperand) -> None:
        self._checks, self._operand = Checks(operator.name), operand
        self._name, self._bounding_name = operand.name, operand.bounded_by
        self._index, self._bounding_index = map(operator.arguments.index, (self._name, self._bounding_name))

    def as_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with an int as int32[1] on the device of the array that bounds it; a tensor has one axis."""
        index = self._index
        value = args[index] if index < len(args) else kwargs.get(self._name)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return self._replaced(args, kwargs, value.reshape(1))
        is_missing = index >= len(args) and self._name not in kwargs  # which the signature says
        if is_missing or isinstance(value, torch.Tensor):
            return args, kwargs
        bounding = args[self._bounding_index] if self._bounding_index < len(args) else kwargs.get(self._bounding_name)
        if not isinstance(bounding, torch.Tensor):  # the operator says what is wrong with it
            return args, kwargs
        number = self._checks.int_operand(self._operand, value, bounding.shape)
        return self._replaced(args, kwargs, _int32(number, bounding.device))

    def _replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._index < len(args):
            return (*args[: self._index], tensor, *args[self._index + 1 :]), kwargs
        return args, {**kwargs, self._name: tensor}


def _int32(number: int, device: torch.device) -> torch.Tensor:
    if device.type == "xla" and not torch.compiler.is_compiling():
        # An upload: as a constant of the lazy graph every number would be compiled anew.
        return torch.tensor([number], dtype=torch.int32).to(device)
    # No upload here: it would wait for the device, and cannot be captured into a CUDA graph.
    return torch.full((1,), number, dtype=torch.int32, device=device)
