"""The derivatives of the operators that declare some: those of the same function in JAX's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._core.attributes import numpy_value
from .._core.operator import OpCall
from . import dense_linear

Arrays = dict[str, jax.Array]
Function = Callable[[Arrays], tuple[jax.Array, ...]]  # operands by name -> results


def with_derivative(
    call: OpCall, function: Callable[..., Any], parts: Function | None = None
) -> Callable[..., tuple[Any, ...]]:
    """``function`` of call's operands, whose results are a sequence, with its derivative, or with an error for it.

    ``parts`` is called instead where a derivative is wanted; without it the derivative is that of REFERENCES.
    """
    names = call.operand_names

    def results(*arrays: Any) -> tuple[Any, ...]:
        return tuple(function(*arrays)[: len(call.results)])

    def derivative(primals: Any, tangents: Any) -> Any:
        wanted = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        for i in wanted:
            if names[i] not in call.differentiable:
                raise ValueError(
                    f"{call.name} has no gradient for {names[i]}, {call.operands[i]}; jax.lax.stop_gradient its "
                    "arguments where none is wanted"
                )
        differentiated = _reference(call) if parts is None else parts

        def of_wanted(*values: Any) -> tuple[Any, ...]:
            operands = dict(zip(names, primals, strict=True))
            return differentiated(operands | {names[i]: value for i, value in zip(wanted, values, strict=True)})

        values, of_results = jax.jvp(of_wanted, [primals[i] for i in wanted], [tangents[i] for i in wanted])
        return differentiable(*primals) if parts is None else values, of_results

    differentiable: Any = jax.custom_jvp(results)
    differentiable.defjvp(derivative, symbolic_zeros=True)
    return cast(Callable[..., tuple[Any, ...]], differentiable)


def _reference(call: OpCall) -> Function:
    attributes = {name: numpy_value(attribute) for name, attribute in call.attributes}
    return lambda operands: REFERENCES[call.name](operands, attributes)


def _simple_add(operands: Arrays, _: dict[str, Any]) -> tuple[jax.Array, ...]:
    return (operands["a"] + operands["b"],)


def _gated(activation: Callable[[jax.Array], jax.Array]) -> Callable[[Arrays, dict[str, Any]], tuple[jax.Array, ...]]:
    def reference(operands: Arrays, _: dict[str, Any]) -> tuple[jax.Array, ...]:
        x = operands["x"]
        gate, up = jnp.split(x.astype(jnp.float32), 2, -1)
        return ((activation(gate) * up).astype(x.dtype),)

    return reference


def _rms_norm(operands: Arrays, attributes: dict[str, Any]) -> tuple[jax.Array, ...]:
    x, weight, residual = operands["x"], operands["weight"], operands.get("residual")
    total = x if residual is None else x + residual
    wide = total.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + attributes["eps"])
    factor = jnp.expand_dims(weight.astype(jnp.float32) + attributes["weight_offset"], range(x.ndim - 1))
    out = (normed * factor).astype(x.dtype)
    return (out,) if residual is None else (out, total)


def _rotary_embedding(operands: Arrays, attributes: dict[str, Any]) -> tuple[jax.Array, ...]:
    angles = operands["table"][operands["positions"]][:, None]
    cos, sin = angles[..., 0], angles[..., 1]
    half = cos.shape[-1]

    def turn(x: jax.Array) -> jax.Array:
        turned, passed = jnp.split(x.astype(jnp.float32), [2 * half], -1)
        if attributes["interleaved"]:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = jnp.split(turned, 2, -1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = jnp.stack(pair, -1).reshape(turned.shape) if attributes["interleaved"] else jnp.concatenate(pair, -1)
        return jnp.concatenate([turned, passed], -1).astype(x.dtype)

    return turn(operands["query"]), turn(operands["key"])


def _linear(operands: Arrays, attributes: dict[str, Any]) -> tuple[jax.Array, ...]:
    activation = attributes["activation"].decode()
    return (dense_linear.linear(operands, None if activation == "none" else activation, sums=None),)


# Of operands and attributes by name.
REFERENCES: dict[str, Callable[[Arrays, dict[str, Any]], tuple[jax.Array, ...]]] = {
    "simple_add": _simple_add,
    "silu_and_mul": _gated(jax.nn.silu),
    "gelu_and_mul": _gated(jax.nn.gelu),
    "rms_norm": _rms_norm,
    "rotary_embedding": _rotary_embedding,
    "linear": _linear,
}
