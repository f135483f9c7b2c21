"""torch.ops.xla_gpu.*: the operators as torch.library ones, for XLA, CPU, CUDA and fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .._core.operator import OpCall, Operator, check_inputs_requested
from .._torch_xla import lowering
from . import eager
from .tensors import check_no_gradient, check_operands, spec, torch_dtype

LIBRARY = torch.library.Library("xla_gpu", "FRAGMENT")
BACKENDS = ("CPU", "CUDA", "XLA")

Results = tuple[torch.Tensor, ...]


def run(call: OpCall, tensors: Sequence[torch.Tensor], in_place: bool = False) -> Results:
    """Runs ``call`` on tensors of one device. Every operator and ffi_call end here."""
    device = check_operands(call.name, call.operand_names, tensors)
    if device.type == "xla":
        return lowering.run(call, tensors)
    return eager.run(call, tensors, in_place)


def fake_results(call: OpCall, tensors: Sequence[torch.Tensor]) -> Results:
    """Results without values, for fake and meta tensors."""
    device = check_operands(call.name, call.operand_names, tensors)
    return tuple(
        torch.empty(result.shape, dtype=torch_dtype(call.name, result.dtype), device=device) for result in call.results
    )


class Binder:
    """Turns the arguments of an operator's kernel into its OpCall and the operand tensors."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._names = [argument.name for argument in torch._C.parse_schema(f"_{operator.schema}").arguments]
        # typed: True, 1 and 1.0 are equal, and only one of them is a window.
        self._bind = functools.lru_cache(maxsize=4096, typed=True)(operator.bind)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By name; those that have their default may be absent."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def bind(self, arguments: dict[str, Any], traced: bool) -> tuple[OpCall, list[torch.Tensor]]:
        tensors, values = [], dict(arguments)
        for operand in self._operator.operands:
            tensor = values.get(operand)
            if tensor is not None:
                tensors.append(tensor)
                values[operand] = spec(f"{self._operator.name}: {operand}", tensor)
        # Fake tensors may have symbols for sizes, which no cache can take.
        bind = self._operator.bind if traced else self._bind
        return bind(**values, check_inputs=check_inputs_requested()), tensors


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backends: Sequence[str] = BACKENDS,
) -> None:
    """Defines torch.ops.xla_gpu.<name> with one kernel for all ``backends``."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for backend in backends:
        LIBRARY.impl(name, kernel, backend)
    LIBRARY.impl(name, _refusing_gradients(name, schema), "Autograd")
    torch.library.register_fake(f"xla_gpu::{name}", fake, lib=LIBRARY)


def _refusing_gradients(name: str, schema: str) -> Callable[..., Any]:
    """The kernel that runs before those of backends, which do not always see what autograd marked.

    torch_xla and torch.func unwrap the tensors first, and a gradient of zero would be the silent result.
    """
    names = [argument.name for argument in torch._C.parse_schema(f"_{schema}").arguments]
    operator = getattr(torch.ops.xla_gpu, name).default
    public_name = name.removeprefix("_")

    def before(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
                for tensor in value if isinstance(value, list) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        check_no_gradient(public_name, argument, tensor)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return before


def define_operator(operator: Operator, calls: Callable[..., Results] | None = None) -> None:
    """Defines an operator; ``calls(call, tensors, arguments)``, if given, takes the place of ``run(call, tensors)``."""
    binder = Binder(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = binder.arguments(args, kwargs)
        call, tensors = binder.bind(arguments, traced=False)
        return _unpacked(run(call, tensors) if calls is None else calls(call, tensors, arguments))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return _unpacked(fake_results(*binder.bind(binder.arguments(args, kwargs), traced=True)))

    define(operator.name, operator.schema, kernel, fake)


def call(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator for the functions of xla_gpu.torch.

    The dispatcher's own texts about arguments of a wrong type name neither what was expected nor our documentation's
    types; the declaration's do.
    """
    try:
        return getattr(torch.ops.xla_gpu, operator.name)(*args, **kwargs)
    except RuntimeError:
        binder = Binder(operator)
        values = binder.arguments(args, kwargs)
        for name in operator.operands:
            if isinstance(values.get(name), torch.Tensor):
                values[name] = spec(f"{operator.name}: {name}", values[name])
        operator.bind(**values)
        raise


def _unpacked(results: Results) -> Any:
    return results[0] if len(results) == 1 else results
