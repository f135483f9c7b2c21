"""Operators that chain the kernels of others: by those, one after the other, where the rows are many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._core.operator import CACHED_CALLS, OpCall, Operator
from ..ops import attention_block as attention
from ..ops import linear, rms_norm
from . import dense_linear
from .call import _bind, _run, program, varying_axes
from .gradients import with_derivative
from .partition import explicit_shardings

_Make = Callable[[OpCall, dict[str, Any]], Callable[..., Any]]


def product(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/linear.py; the arguments have been checked."""
    if linear.uses_kernel(call):
        return _run(call, arrays)
    return _called(_product_function, call, arrays, arguments)[0]


def gated_mlp(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/gated_mlp.py; the arguments have been checked."""
    return _called(_gated_mlp_function, call, arrays, arguments)[0]


def attention_block(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/attention_block.py; the arguments have been checked."""
    if attention.uses_kernels(call):
        return _run(call, arrays)
    return _called(_attention_block_function, call, arrays, arguments)


def _called(make: _Make, call: OpCall, arrays: list[Any], arguments: Mapping[str, Any]) -> Any:
    """What ``make(call, options)`` returns, called; outside of jax.jit as a program that later calls find.

    The options are the arguments without arrays: functions of jax.custom_jvp are part of cycles, and would keep theirs.
    """
    options = {name: None if name in call.operand_names else value for name, value in arguments.items()}
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return make(call, options)(*arrays)
    return _program(make, call, tuple(options.items()))(*arrays)


# A call stands for its options, of which True and 1 would be the same here.
@functools.lru_cache(maxsize=CACHED_CALLS)
def _program(make: _Make, call: OpCall, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return program(call, make(call, dict(options)))


def _product_function(call: OpCall, options: dict[str, Any]) -> Callable[..., Any]:
    def dense(*arrays: Any) -> tuple[Any, ...]:
        return (dense_linear.linear(dict(zip(call.operand_names, arrays, strict=True)), options["activation"]),)

    differentiable = with_derivative(call, dense)

    def divided(*arrays: Any) -> Any:
        if varying_axes(list(arrays)) or (shardings := explicit_shardings(call, arrays)) is None:
            return differentiable(*arrays)
        # As the kernel's results: JAX's product refuses operands of which a mesh axis divides several axes, and so
        # would its derivative.
        return jax.sharding.auto_axes(differentiable, out_sharding=shardings)(*arrays)

    return divided


def _gated_mlp_function(call: OpCall, options: dict[str, Any]) -> Callable[..., Any]:
    def parts(operands: dict[str, Any]) -> tuple[Any, ...]:
        given = {**options, **operands}
        hidden = _product(given, "gate_up", _norm(given), activation=given["activation"])
        return (_product(given, "down", hidden, residual=given["residual"]),)

    def function(*arrays: Any) -> tuple[Any, ...]:
        if linear.uses_kernel(call):
            return (_run(call, list(arrays)),)
        return parts(dict(zip(call.operand_names, arrays, strict=True)))

    return with_derivative(call, function, parts)


def _attention_block_function(call: OpCall, options: dict[str, Any]) -> Callable[..., Any]:
    def parts(*arrays: Any) -> Any:
        given = {**options, **dict(zip(call.operand_names, arrays, strict=True))}

        # The middle is one call, which looks at all values before it writes any.
        products = dict.fromkeys(("qkv_weight", "out_weight", *attention.OF_PRODUCTS))
        middle = {**given, "x": _product(given, "qkv", _norm(given)), **products}
        attended, cache = _part(attention.OPERATOR, **middle)
        return _product(given, "out", attended, residual=given["residual"]), cache

    return with_derivative(call, parts)


def _norm(given: Mapping[str, Any]) -> Any:
    """x, normed where there is a weight for it."""
    if given["norm_weight"] is None:
        return given["x"]
    options = {name: given[name] for name in ("eps", "weight_offset", "round_once")}
    return _part(rms_norm.OPERATOR, x=given["x"], weight=given["norm_weight"], **options)


def _product(given: Mapping[str, Any], prefix: str, x: Any, **options: Any) -> Any:
    weight, scale, zero_point, bias = (given[f"{prefix}_{name}"] for name in ("weight", "scale", "zero_point", "bias"))
    if weight is None:
        return x
    arguments = {"x": x, "weight": weight, "weight_scale": scale, "weight_zero_point": zero_point, "bias": bias}
    arguments |= {"residual": None, "activation": None, **options}
    return product(*_bind(linear.OPERATOR, arguments), arguments)


def _part(operator: Operator, **arguments: Any) -> Any:
    return _run(*_bind(operator, arguments))
