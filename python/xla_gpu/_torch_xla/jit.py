"""Functions of XLA tensors as one XLA program for each set of shapes, called without tracing; see xla_gpu.torch.jit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
from torch_xla import runtime

from .program import _XLAC, Program


class _Result:
    """How a call's result is put together.

    Attributes:
      outputs: what the function computed, but for what takes the memory of a donated tensor.
      consumed: numbers of the donated tensors whose memory is a result's; they have that value now.
    """

    def __init__(self, result: Any, given: Sequence[torch.Tensor], donated: Sequence[int], where: str) -> None:
        self.outputs: list[torch.Tensor] = []
        self.consumed: set[int] = set()
        # Places in what build() is called with.
        places = {id(tensor): number for number, tensor in enumerate(given)}
        computed = {id(leaf): leaf for leaf in _tensors_of(result) if id(leaf) not in places}
        for leaf in computed.values():
            if leaf.device.type != "xla":
                raise ValueError(f"{where}: result: expected XLA tensors, got one on {leaf.device}")
        # XLA itself would take any donated tensor of a result's size, and copy where it is read afterwards.
        for number in donated:
            tensor = given[number]
            if _is_updated(tensor):
                continue
            for key, leaf in computed.items():
                if key not in places and leaf.shape == tensor.shape and leaf.dtype == tensor.dtype:
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


def _is_updated(tensor: torch.Tensor) -> bool:
    updated: list[bool] = _XLAC._check_tensor_need_materialization([tensor])
    return updated[0]


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(part)


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


class JitFunction:
    """What xla_gpu.torch.jit returns."""

    def __init__(
        self, function: Callable[..., Any], donate_argnums: Sequence[int], compiler_options: Mapping[str, bool | int]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._donate = frozenset(donate_argnums)
        self._options = dict(compiler_options)
        self._programs: dict[Any, tuple[Program, _Result]] = {}

    def clear_cache(self) -> None:
        """Forgets all programs: the next call traces anew, with the tensors that the function refers to by then."""
        self._programs.clear()

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function's program on these arguments; returns at once."""
        tensors: list[Any] = []
        key: list[Any] = []
        for argument in arguments:
            self._flatten(argument, tensors, key)
        signature = tuple(key)
        try:
            found = self._programs.get(signature)
        except TypeError:
            self._refuse_unhashable(arguments)
            raise
        if not all(tensor.is_xla for tensor in tensors):
            tensors = [self._on_device(tensor) for tensor in tensors]
        if found is None:
            found = self._programs[signature] = self._trace(arguments, tensors)
        program, result = found
        try:
            results = program.run(tensors)
        except RuntimeError as error:
            if "pending ir" not in str(error):
                raise
            torch_xla.sync()  # an argument that is not computed yet
            results = program.run(tensors)
        split = len(program.updated)
        updated = dict(zip(program.updated, results[:split], strict=True))
        for index, new in updated.items():
            if index not in result.consumed:
                _XLAC._replace_xla_tensor(tensors[index], new)
        return result.build(tensors, results[split:], updated)

    def _where(self) -> str:
        return f"jit({self._name})"

    def _flatten(self, value: Any, tensors: list[Any], key: list[Any]) -> None:
        """Appends the tensors of an argument, and all else that a program depends on."""
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            key.append((value.shape, value.dtype))
        elif isinstance(value, np.ndarray):
            tensor = torch.from_numpy(value)
            tensors.append(tensor)
            key.append((tensor.shape, tensor.dtype))
        elif isinstance(value, (list, tuple)):
            key.append((type(value), len(value)))
            for part in value:
                self._flatten(part, tensors, key)
        elif isinstance(value, dict):
            key.append((dict, tuple(value)))
            for part in value.values():
                self._flatten(part, tensors, key)
        else:
            key.append((type(value), value))

    def _refuse_unhashable(self, arguments: Sequence[Any]) -> None:
        for number, argument in enumerate(arguments):
            key: list[Any] = []
            self._flatten(argument, [], key)
            for part in key:
                try:
                    hash(part)
                except TypeError:
                    raise TypeError(
                        f"{self._where()}: argument {number}: expected tensors, arrays and hashable values, got "
                        f"{part[0].__name__}"
                    ) from None

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_xla:
            return tensor
        if not tensor.is_cpu:
            raise ValueError(
                f"{self._where()}: expected tensors on an XLA device or the CPU, got one on {tensor.device}"
            )
        return tensor.to(torch_xla.device())

    def _trace(self, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Program, _Result]:
        if runtime.is_spmd():
            raise RuntimeError(
                f"{self._where()}: expected one device, got torch_xla's SPMD: use torch.compile(backend='openxla')"
            )
        if len({id(tensor) for tensor in tensors}) != len(tensors):
            raise ValueError(f"{self._where()}: expected each tensor once, got one in the places of two arguments")
        for tensor in tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{self._where()}: expected tensors without gradients, got one that requires them")
        for number in self._donate:
            if not 0 <= number < len(arguments):
                raise ValueError(
                    f"{self._where()}: donate_argnums: expected numbers from 0 to {len(arguments) - 1}, got {number}"
                )
        donated: list[int] = []
        at = 0
        for number, argument in enumerate(arguments):
            own: list[Any] = []
            self._flatten(argument, own, [])
            if number in self._donate:
                donated += range(at, at + len(own))
            at += len(own)
        results: list[_Result] = []

        def traced(*given: torch.Tensor) -> list[torch.Tensor]:
            remaining = iter(given)
            with torch.no_grad():
                result = self._function(*(_with_tensors(argument, remaining) for argument in arguments))
            results.append(_Result(result, given, donated, self._where()))
            return results[-1].outputs

        program = Program(self._where(), traced, tensors, options=self._options, donated=donated)
        return program, results[-1]


def _with_tensors(value: Any, tensors: Any) -> Any:
    """An argument with the next of ``tensors`` in the places of its own."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        parts = [_with_tensors(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: _with_tensors(part, tensors) for name, part in value.items()}
    return value
