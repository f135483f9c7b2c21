"""Operators that chain the kernels of others: by those, one after the other, where the rows are many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.operator import OpCall, Operator
from ..ops import attention_block as attention
from ..ops import linear, rms_norm
from . import dense_linear
from .call import _bind, _run
from .gradients import with_derivative


def product(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/linear.py; the arguments have been checked."""
    if linear.uses_kernel(call):
        return _run(call, arrays)

    activation = arguments["activation"]

    def dense(*arrays: Any) -> tuple[Any, ...]:
        return (dense_linear.linear(dict(zip(call.operand_names, arrays, strict=True)), activation),)

    return with_derivative(call, dense)(*arrays)[0]


def gated_mlp(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/gated_mlp.py; the arguments have been checked."""
    options = _without_operands(call, arguments)

    def parts(operands: dict[str, Any]) -> tuple[Any, ...]:
        given = {**options, **operands}
        hidden = _product(given, "gate_up", _norm(given), activation=given["activation"])
        return (_product(given, "down", hidden, residual=given["residual"]),)

    def function(*arrays: Any) -> tuple[Any, ...]:
        if linear.uses_kernel(call):
            return (_run(call, list(arrays)),)
        return parts(dict(zip(call.operand_names, arrays, strict=True)))

    return with_derivative(call, function, parts)(*arrays)[0]


def attention_block(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/attention_block.py; the arguments have been checked."""
    if attention.uses_kernels(call):
        return _run(call, arrays)

    options = _without_operands(call, arguments)

    def parts(*arrays: Any) -> Any:
        given = {**options, **dict(zip(call.operand_names, arrays, strict=True))}

        # The middle is one call, which looks at all values before it writes any.
        products = dict.fromkeys(("qkv_weight", "out_weight", *attention.OF_PRODUCTS))
        middle = {**given, "x": _product(given, "qkv", _norm(given)), **products}
        attended, cache = _part(attention.OPERATOR, **middle)
        return _product(given, "out", attended, residual=given["residual"]), cache

    return with_derivative(call, parts)(*arrays)


def _without_operands(call: OpCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without arrays: functions of jax.custom_jvp are part of cycles, and would keep theirs."""
    return {name: None if name in call.operand_names else value for name, value in arguments.items()}


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
