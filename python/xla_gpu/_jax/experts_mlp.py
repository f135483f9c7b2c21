"""experts_mlp in JAX's operations and grouped_linear; see ops/experts_mlp.py."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from .._core.operator import OpCall
from ..ops import experts_mlp as declaration
from ..ops import grouped_linear, silu_and_mul
from . import call as operators
from . import composite

Arrays = dict[str, jax.Array]


def run(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """See ops/experts_mlp.py; the arguments have been checked."""
    ids = arrays[call.operand_names.index("topk_ids")]
    if not isinstance(ids.shape[1], int):  # the sum is unrolled
        raise ValueError(f"{call.name}: topk_ids: expected a known top_k, got {ids.dtype.name}{list(ids.shape)}")
    return composite.run(_experts, call, arrays, arguments)


def _experts(arrays: Arrays, activation: str) -> jax.Array:
    x, ids = arrays["x"], arrays["topk_ids"]
    num_experts = arrays["gate_up_weight"].shape[0]
    is_expert = (ids >= 0) & (ids < num_experts)
    # Pairs without an expert are the last ones: grouped_linear gives them 0.
    expert_of_pair = jnp.where(is_expert, ids, num_experts).astype(jnp.int32).reshape(-1)
    sizes = jnp.sum(expert_of_pair[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None], 0, dtype=jnp.int32)
    pair_at, place_of = _in_order(expert_of_pair)
    row_at = pair_at // jnp.int32(max(ids.shape[1], 1))
    hidden = _product(arrays, "gate_up", x.at[row_at].get(mode="promise_in_bounds"), sizes)
    out = _product(arrays, "down", _activated(hidden, activation), sizes)
    weights = jnp.where(is_expert, arrays["topk_weights"], jnp.zeros((), arrays["topk_weights"].dtype))
    return _weighted_sum(out, place_of.reshape(ids.shape), weights)


def _in_order(expert_of_pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which pair comes at each place in the order of experts, and the place of each pair: int32[pairs]."""
    pairs = expert_of_pair.shape[0]
    index = jnp.arange(pairs, dtype=jnp.int32)
    if isinstance(pairs, int) and pairs <= declaration.COMPARED_PAIRS:  # not a symbol of jax.export
        key = expert_of_pair * jnp.int32(pairs) + index
        place_of = jnp.sum(key[None] < key[:, None], 1, dtype=jnp.int32)
        is_at = place_of[None] == index[:, None]
        return jnp.sum(jnp.where(is_at, index[None], jnp.int32(0)), 1, dtype=jnp.int32), place_of
    pair_at = jnp.argsort(expert_of_pair).astype(jnp.int32)
    return pair_at, jnp.zeros_like(index).at[pair_at].set(index, unique_indices=True, mode="promise_in_bounds")


def _product(arrays: Arrays, prefix: str, x: jax.Array, sizes: jax.Array) -> jax.Array:
    scale, zero_point, bias = (arrays.get(f"{prefix}_{name}") for name in ("scale", "zero_point", "bias"))
    out: jax.Array = operators.call(
        grouped_linear.OPERATOR,
        x=x,
        weight=arrays[f"{prefix}_weight"],
        group_sizes=sizes,
        weight_scale=scale,
        weight_zero_point=zero_point,
        bias=bias,
    )
    return out


def _activated(hidden: jax.Array, activation: str) -> jax.Array:
    by_name = {"silu_and_mul": silu_and_mul.OPERATOR, "gelu_and_mul": silu_and_mul.OPERATOR_GELU}
    if activation in by_name:
        out: jax.Array = operators.call(by_name[activation], x=hidden)
        return out
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, -1)
    limit = declaration.SWIGLU_LIMIT
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (gate * jax.nn.sigmoid(gate * declaration.SWIGLU_ALPHA) * (up + 1)).astype(hidden.dtype)


def _weighted_sum(out: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
    """T[rows, out_features] of out: T[pairs, out_features]; the places in it, and weights, are [rows, top_k]."""
    wide, lower = weights.astype(jnp.float32), None
    if weights.dtype == jnp.float32:
        bits = jax.lax.bitcast_convert_type(wide, jnp.int32)
        upper = jax.lax.bitcast_convert_type(bits & jnp.int32(declaration.UPPER_BITS), jnp.float32)
        # Of an infinity 0, not NaN.
        wide, lower = upper, jnp.where(jnp.isinf(wide), jnp.float32(0), wide - upper)
    products = []
    for j in range(places.shape[1]):
        chosen = out.at[places[:, j]].get(mode="promise_in_bounds").astype(jnp.float32)
        # Each product is a float32 number: fused with the addition it is the same.
        if lower is not None:  # which may be 0: infinities are left to the upper part
            finite = jnp.where(jnp.isinf(chosen), jnp.float32(0), chosen)
            products.append(finite * lower[:, j, None])
        products.append(chosen * wide[:, j, None])
    if not products:
        return jnp.zeros((places.shape[0], out.shape[1]), out.dtype)
    # One by one, since a sum along an axis has no order; not from 0, to which XLA leaves out additions, which make a 0
    # of a -0.
    total: jax.Array = functools.reduce(operator.add, products)
    return total.astype(out.dtype)
