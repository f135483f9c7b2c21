"""Functions of XLA tensors as one XLA program for each set of shapes, called without tracing; see xla_gpu.torch.jit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch_xla import runtime

from .._core.dtypes import DTYPES
from .program import _XLAC, Program, compute_pending, fallback_error, fallbacks
from .proxy_programs import ProxyProgram
from .traced_tensors import (
    UNSIGNED,
    Captured,
    compute,
    distinct,
    invalidate,
    is_buffer,
    is_changed,
    is_updated,
    of_dtype,
    tensors_of,
    values_taken,
)

# What torch_xla counts with the operations that it has no lowering for.
_READING = {"aten::_local_scalar_dense"}

# A trace beside which another thread takes a value begins anew.
_ATTEMPTS = 3

# Modes of PyTorch in which operations are recorded, or have no values.
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

_trace = threading.local()

# One trace at a time, and no call beside it: torch_xla's pending computations are the process's.
_lock = threading.RLock()


class _ValueTakenError(RuntimeError):
    """A value was taken from the device while a function was traced."""


class _Result:
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


@functools.cache  # NumPy puts the name together anew each time
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype | None:
    """PyTorch's dtype; None where PyTorch or XLA has none."""
    found = getattr(torch, dtype.name, None) if dtype.name in DTYPES and dtype.isnative else None
    return found if isinstance(found, torch.dtype) else None


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


@dataclasses.dataclass
class _Compiled:
    """A program for arguments of one structure; what torch_xla executes in its place, where that may be."""

    program: Program
    result: _Result
    proxy: ProxyProgram | None
    unsigned: bool  # results have dtypes of these


def _launch(run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> Any:
    try:
        return run(tensors)
    except RuntimeError as error:
        if "pending ir" not in str(error):
            raise
        compute_pending(tensors)
        return run(tensors)


class JitFunction:
    """What xla_gpu.torch.jit returns."""

    def __init__(
        self, function: Callable[..., Any], donate_argnums: Sequence[int], compiler_options: Mapping[str, bool | int]
    ) -> None:
        functools.update_wrapper(self, function, updated=())  # its attributes would hide the methods here
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._donate = frozenset(donate_argnums)
        self._options = dict(compiler_options)
        self._programs: dict[Any, _Compiled] = {}

    def clear_cache(self) -> None:
        """Forgets all programs: the next call traces anew, with the tensors that the function refers to by then."""
        self._programs.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the function's program on these arguments; returns at once."""
        if named:
            raise TypeError(f"{self._where()}: expected arguments by position, got {', '.join(named)} by name")
        tensors: list[Any] = []
        # What the trace depends on beside the arguments. It is without gradients, whatever the caller's mode.
        autocast = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None
        key: list[Any] = [torch.get_default_dtype(), autocast]
        for argument in arguments:
            self._flatten(argument, tensors, key)
        if getattr(_trace, "active", False):  # part of another one's program
            remaining = iter([self._on_device(tensor) for tensor in tensors])
            return self._function(*(_with_tensors(argument, remaining) for argument in arguments))
        self._check_tensors(tensors)
        signature = tuple(key)
        try:
            found = self._programs.get(signature)
        except TypeError:
            self._refuse_unhashable(arguments)
            raise
        with _lock:
            given = tensors
            if not all(tensor.is_xla for tensor in tensors):
                tensors = [tensor if tensor.is_xla else self._on_device(tensor) for tensor in tensors]
            if found is None:
                found = self._programs.get(signature)
            if found is None:
                found = self._programs[signature] = self._trace(arguments, tensors)
            if tensors is not given:
                self._check_updated(given, found)
            return self._run(found, tensors)

    def _run(self, compiled: _Compiled, tensors: Sequence[torch.Tensor]) -> Any:
        program, result = compiled.program, compiled.result
        if not (program.outputs or program.updated):  # nothing is computed
            return result.build(tensors, [], {})
        results = _launch((compiled.proxy or program).run, tensors)
        if compiled.unsigned:
            dtypes = [*(tensors[index].dtype for index in program.updated), *(dtype for _, dtype in program.outputs)]
            results = [of_dtype(tensor, dtype) for tensor, dtype in zip(results, dtypes, strict=True)]
        split = len(program.updated)
        updated = dict(zip(program.updated, results[:split], strict=True))
        for index, tensor in updated.items():
            if index not in result.consumed:
                _XLAC._replace_xla_tensor(tensors[index], tensor)
        return result.build(tensors, results[split:], updated)

    def _where(self) -> str:
        return f"jit({self._name})"

    def _check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        # What follows hands torch_xla the tensors' buffers, which wrappers do not have: it hangs, or the process ends.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{self._where()} cannot run under torch.vmap or another transformation of torch.func: transform the "
                "function, and pass jit what that gives"
            )
        traced = torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACERS))
        subclasses = not _PLAIN.issuperset(map(type, tensors))
        if traced or (subclasses and any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in tensors)):
            raise RuntimeError(
                f"{self._where()} cannot be traced by torch.export or make_fx, nor called with fake tensors: trace the "
                "function itself"
            )
        if len(set(map(id, tensors))) != len(tensors):
            raise ValueError(f"{self._where()}: expected each tensor once, got one in the places of two arguments")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ValueError(f"{self._where()}: expected tensors without gradients, got one that requires them")
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise ValueError(f"{self._where()}: expected tensors without gradients, got one with a tangent")

    def _check_updated(self, given: Sequence[torch.Tensor], compiled: _Compiled) -> None:
        for index in compiled.program.updated:
            if index not in compiled.result.consumed and not given[index].is_xla:
                raise ValueError(
                    f"{self._where()}: expected XLA tensors where the function updates them in place, got "
                    f"{given[index].dtype}{list(given[index].shape)} on {given[index].device}"
                )

    def _flatten(self, value: Any, tensors: list[Any], key: list[Any]) -> None:
        """Appends the tensors of an argument, and all else that a program depends on."""
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            key.append((value.shape, value.dtype))
        elif type(value) is list and value and all(isinstance(part, torch.Tensor) for part in value):
            tensors += value
            key.append((list, *[part.shape for part in value], *[part.dtype for part in value]))
        elif isinstance(value, np.ndarray):
            tensor = self._from_numpy(value)
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
        elif isinstance(value, (float, complex, np.generic)):
            number = np.asarray(value)
            key.append((type(value), number.dtype, number.tobytes()))  # -0.0 is not 0.0, and NaN is the same as NaN
        else:
            key.append((type(value), value))

    def _from_numpy(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        dtype = _dtype_of(array.dtype)
        if dtype is None:
            raise TypeError(f"{self._where()}: expected arrays of a dtype that PyTorch and XLA have, got {array.dtype}")
        # PyTorch has neither negative strides nor memory that cannot be written.
        flags = array.flags
        plain = array if flags.c_contiguous and flags.writeable else array.copy()
        if array.dtype.kind == "V":  # of ml_dtypes
            return torch.from_numpy(plain.view(f"i{array.dtype.itemsize}")).view(dtype)
        return torch.from_numpy(plain)

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
        (on_device,) = _XLAC._xla_tensors_from_aten([tensor.detach()], [_XLAC._xla_get_default_device()], None)
        if on_device.dtype != tensor.dtype:  # uint32 comes as int32 of the same bits
            return tensor.detach().to(torch_xla.device())
        return on_device

    def _trace(self, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> _Compiled:
        if runtime.is_spmd():
            raise RuntimeError(
                f"{self._where()}: expected one device, got torch_xla's SPMD: use torch.compile(backend='openxla')"
            )
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
                # Memory of a number may be that of all tensors with this value.
                donated += [index for index, part in enumerate(own, at) if part.dim()]
            at += len(own)
        results: list[_Result] = []
        kept: list[weakref.ref[torch.Tensor]] = []

        def traced(*given: torch.Tensor) -> list[torch.Tensor]:
            remaining = iter(given)
            before = [tensor.detach().clone() for tensor in given]
            with torch.no_grad(), self._only_traced(given, kept):
                result = self._function(*(_with_tensors(argument, remaining) for argument in arguments))
            if len({_XLAC._xla_get_tensor_id(tensor) for tensor in given}) != len(given):
                for tensor, original in zip(given, before, strict=True):
                    tensor.data = original
                raise ValueError(
                    f"{self._where()}: expected updates in place by copy_(), got an argument that became another one "
                    "by set_() or .data"
                )
            for tensor, original in zip(given, before, strict=True):
                if is_changed(tensor, original) and not is_updated(tensor):
                    compute(tensor)
            results.append(_Result(result, given, donated, self._where()))
            return results[-1].outputs

        given = distinct(tensors, donated)
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    program = Program(self._where(), traced, given, options=self._options, donated=donated)
                    break
                except _ValueTakenError:  # by another thread, perhaps
                    if attempt == _ATTEMPTS - 1:
                        raise
        finally:
            for result in results:
                result.outputs.clear()
            invalidate(kept)
        proxy = ProxyProgram.make(program, given)
        dtypes = {*(tensors[index].dtype for index in program.updated), *(dtype for _, dtype in program.outputs)}
        return _Compiled(program, results[-1], proxy, not UNSIGNED.isdisjoint(dtypes))

    @contextlib.contextmanager
    def _only_traced(self, given: Sequence[torch.Tensor], kept: list[weakref.ref[torch.Tensor]]) -> Iterator[None]:
        """Refuses what a program cannot repeat: values that are needed in here, and updates of other tensors.

        Adds to ``kept`` what is computed in here, which has no value outside.
        """
        taken, before = values_taken(), fallbacks()
        _trace.active = True
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # casts of weights are this program's
        try:
            with Captured(given) as captured:
                yield
        finally:
            _trace.active = False
            torch.set_autocast_cache_enabled(cached)
            torch.clear_autocast_cache()  # torch.autocast as a decorator brings a setting of its own
            kept += captured.pending()
            updated = captured.restore()
        for tensor in updated:
            raise ValueError(
                f"{self._where()}: expected updates in place of arguments alone, got one of another tensor, "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        if on_host := {name for name, count in fallbacks().items() if count != before.get(name)} - _READING:
            raise fallback_error(self._where(), on_host)
        if values_taken() != taken:
            raise _ValueTakenError(
                f"{self._where()}: expected a function of tensors alone, got one that needs the value of one, as "
                "item(), bool(), cpu() or sync() do: later calls would have the first one's"
            )


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
