"""Operators without a handler: functions of JAX's operations and other operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._core.operator import CACHED_CALLS, OpCall
from . import call as operators
from .gradients import with_derivative
from .partition import explicit_shardings

# The result, of the arrays by their arguments' names and the other arguments.
Function = Callable[..., jax.Array]


def run(function: Function, call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """``function(arrays, **options)`` with call's derivative, divided as call's results are where types say so."""
    options = tuple((name, value) for name, value in arguments.items() if name not in _arrays_of(call, arguments))
    make = _divided if any(isinstance(array, jax.core.Tracer) for array in arrays) else _program
    return make(function, call, options)(*arrays)[0]


def _arrays_of(call: OpCall, arguments: dict[str, Any]) -> set[str]:
    """The names of arguments that are arrays, or None in the place of one."""
    return {name for name, value in arguments.items() if name in call.operand_names or value is None}


# Outside of jax.jit: a program that later calls find. A call stands for its options, of which True and 1 would be the
# same here.
@functools.lru_cache(maxsize=CACHED_CALLS)
def _program(function: Function, call: OpCall, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return operators.program(call, _divided(function, call, options))


def _divided(function: Function, call: OpCall, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def of_arrays(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (function(dict(zip(call.operand_names, arrays, strict=True)), **dict(options)),)

    differentiable = with_derivative(call, of_arrays)

    def divided(*arrays: jax.Array) -> Any:
        if operators.varying_axes(list(arrays)) or (shardings := explicit_shardings(call, arrays)) is None:
            return differentiable(*arrays)
        return jax.sharding.auto_axes(differentiable, out_sharding=shardings)(*arrays)

    return divided
