"""Operators that chain the kernels of others: by those, one after the other, where the rows are many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.operator import OpCall, Operator
from ..ops import attention_block as attention
from ..ops import linear, rms_norm
from . import dense_linear
from .call import _bind, _run, _without_gradient


def gated_mlp(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/gated_mlp.py; the arguments have been checked."""
    if linear.uses_kernel(call):
        return _run(call, arrays)

    def parts(*arrays: Any) -> Any:
        given = {**arguments, **dict(zip(call.operand_names, arrays, strict=True))}
        hidden = _product(given, "gate_up", _norm(given), activation=given["activation"])
        return _product(given, "down", hidden, residual=given["residual"])

    return _without_gradient(call.name, parts)(*arrays)


def attention_block(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/attention_block.py; the arguments have been checked."""
    if attention.uses_kernels(call):
        return _run(call, arrays)

    def parts(*arrays: Any) -> Any:
        given = {**arguments, **dict(zip(call.operand_names, arrays, strict=True))}

        # The middle is one call, which looks at all values before it writes any.
        products = dict.fromkeys(("qkv_weight", "out_weight", *attention.OF_PRODUCTS))
        middle = {**given, "x": _product(given, "qkv", _norm(given)), **products}
        attended, cache = _part(attention.OPERATOR, **middle)
        return _product(given, "out", attended, residual=given["residual"]), cache

    return _without_gradient(call.name, parts)(*arrays)


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
    return dense_linear.run(*_bind(linear.OPERATOR, arguments), arguments)


def _part(operator: Operator, **arguments: Any) -> Any:
    return _run(*_bind(operator, arguments))
