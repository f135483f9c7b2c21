"""Functions of XLA tensors as one XLA program for each set of shapes, called without tracing; see xla_gpu.torch.jit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch_xla
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch_xla import runtime

from .counters import fallback_error, fallbacks, fallbacks_since, values_taken
from .program import _XLAC, Program, compute_pending
from .proxy_programs import ProxyProgram
from .structures import Result, flatten, refuse_unhashable, with_tensors
from .traced_tensors import (
    UNSIGNED,
    Captured,
    compute,
    distinct,
    invalidate,
    is_changed,
    is_updated,
    of_dtype,
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


@dataclasses.dataclass
class _Compiled:
    """A program for arguments of one structure; what torch_xla executes in its place, where that may be."""

    program: Program
    result: Result
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
        self._where = f"jit({getattr(function, '__name__', type(function).__name__)})"  # begins its error texts
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
            raise TypeError(f"{self._where}: expected arguments by position, got {', '.join(named)} by name")
        tensors: list[Any] = []
        # What the trace depends on beside the arguments. It is without gradients, whatever the caller's mode.
        autocast = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None
        key: list[Any] = [torch.get_default_dtype(), autocast]
        for argument in arguments:
            flatten(self._where, argument, tensors, key)
        if getattr(_trace, "active", False):  # part of another one's program
            remaining = iter([self._on_device(tensor) for tensor in tensors])
            return self._function(*(with_tensors(argument, remaining) for argument in arguments))
        self._check_tensors(tensors)
        signature = tuple(key)
        try:
            found = self._programs.get(signature)
        except TypeError:
            refuse_unhashable(self._where, arguments)
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

    def _check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        # What follows hands torch_xla the tensors' buffers, which wrappers do not have: it hangs, or the process ends.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{self._where} cannot run under torch.vmap or another transformation of torch.func: transform the "
                "function, and pass jit what that gives"
            )
        traced = torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACERS))
        subclasses = not _PLAIN.issuperset(map(type, tensors))
        if traced or (subclasses and any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in tensors)):
            raise RuntimeError(
                f"{self._where} cannot be traced by torch.export or make_fx, nor called with fake tensors: trace the "
                "function itself"
            )
        if len(set(map(id, tensors))) != len(tensors):
            raise ValueError(f"{self._where}: expected each tensor once, got one in the places of two arguments")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ValueError(f"{self._where}: expected tensors without gradients, got one that requires them")
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise ValueError(f"{self._where}: expected tensors without gradients, got one with a tangent")

    def _check_updated(self, given: Sequence[torch.Tensor], compiled: _Compiled) -> None:
        for index in compiled.program.updated:
            if index not in compiled.result.consumed and not given[index].is_xla:
                raise ValueError(
                    f"{self._where}: expected XLA tensors where the function updates them in place, got "
                    f"{given[index].dtype}{list(given[index].shape)} on {given[index].device}"
                )

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_xla:
            return tensor
        if not tensor.is_cpu:
            raise ValueError(f"{self._where}: expected tensors on an XLA device or the CPU, got one on {tensor.device}")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise ValueError(f"{self._where}: expected dense tensors, got a {kind} one of {tensor.dtype}")
        (on_device,) = _XLAC._xla_tensors_from_aten([tensor.detach()], [_XLAC._xla_get_default_device()], None)
        if on_device.dtype != tensor.dtype:  # uint32 comes as int32 of the same bits
            return tensor.detach().to(torch_xla.device())
        return on_device

    def _trace(self, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> _Compiled:
        if runtime.is_spmd():
            raise RuntimeError(
                f"{self._where}: expected one device, got torch_xla's SPMD: use torch.compile(backend='openxla')"
            )
        for number in self._donate:
            if not 0 <= number < len(arguments):
                raise ValueError(
                    f"{self._where}: donate_argnums: expected numbers from 0 to {len(arguments) - 1}, got {number}"
                )
        donated: list[int] = []
        at = 0
        for number, argument in enumerate(arguments):
            own: list[Any] = []
            flatten(self._where, argument, own, [])
            if number in self._donate:
                # Memory of a number may be that of all tensors with this value.
                donated += [index for index, part in enumerate(own, at) if part.dim()]
            at += len(own)
        results: list[Result] = []
        kept: list[weakref.ref[torch.Tensor]] = []

        def traced(*given: torch.Tensor) -> list[torch.Tensor]:
            remaining = iter(given)
            before = [tensor.detach().clone() for tensor in given]
            with torch.no_grad(), self._only_traced(given, kept):
                result = self._function(*(with_tensors(argument, remaining) for argument in arguments))
            if len({_XLAC._xla_get_tensor_id(tensor) for tensor in given}) != len(given):
                for tensor, original in zip(given, before, strict=True):
                    tensor.data = original
                raise ValueError(
                    f"{self._where}: expected updates in place by copy_(), got an argument that became another one "
                    "by set_() or .data"
                )
            for tensor, original in zip(given, before, strict=True):
                if is_changed(tensor, original) and not is_updated(tensor):
                    compute(tensor)
            results.append(Result(result, given, donated, self._where))
            return results[-1].outputs

        given = distinct(tensors, donated)
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    program = Program(self._where, traced, given, options=self._options, donated=donated)
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
                f"{self._where}: expected updates in place of arguments alone, got one of another tensor, "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        if on_host := fallbacks_since(before) - _READING:
            raise fallback_error(self._where, on_host)
        if values_taken() != taken:
            raise _ValueTakenError(
                f"{self._where}: expected a function of tensors alone, got one that needs the value of one, as "
                "item(), bool(), cpu() or sync() do: later calls would have the first one's"
            )
