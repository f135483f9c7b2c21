"""linear for many rows: XLA's own matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._core import packed_int4
from ..ops.linear import GROUP


def linear(
    operands: Mapping[str, jax.Array], activation: str | None, sums: jnp.dtype | None = jnp.float32
) -> jax.Array:
    """See ops/linear.py; the operands, by name, have been checked.

    ``sums`` is the dtype of the product's result, None for that of x: so the product is differentiated, since the
    derivative of one with another dtype multiplies by cotangents of that dtype.
    """
    x, bias, residual = operands["x"], operands.get("bias"), operands.get("residual")
    weight, row_scale = _weight(x.dtype, operands)
    if row_scale is not None and sums is None and x.dtype == jnp.float16:
        # Sums of stored values, which are larger by 1 / scale, may be too large for float16.
        weight, row_scale = (weight.astype(jnp.float32) * row_scale[:, None]).astype(x.dtype), None
    # float32 comes here for its gradient, and is not multiplied in TF32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision, preferred_element_type=sums)
    product = product.astype(jnp.float32)
    if row_scale is not None:
        product = product * row_scale[None]
    if bias is not None:
        product = product + bias.astype(jnp.float32)[None]
    out = product.astype(x.dtype)
    if activation is not None:
        gate, up = jnp.split(out, 2, axis=-1)
        function = jax.nn.silu if activation == "silu_and_mul" else jax.nn.gelu
        out = function(gate.astype(jnp.float32)).astype(x.dtype) * up
    return out if residual is None else out + residual


def _weight(dtype: Any, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """The weight in ``dtype``, and what scales its rows, if that is not in it yet."""
    weight, scale, zero_point = (operands.get(name) for name in ("weight", "weight_scale", "weight_zero_point"))
    assert weight is not None
    if scale is None:
        return weight, None
    if weight.dtype == jnp.uint8:
        values = packed_int4.unpack(weight, jnp.stack).astype(jnp.float32).reshape(*scale.shape, GROUP)
        offsets: Any = 8.0
        if zero_point is not None:  # NaN for what is no zero point, as the kernel has it
            offsets = jnp.where(zero_point > 127, jnp.nan, zero_point.astype(jnp.float32))[:, :, None]
        values = (values - offsets) * scale.astype(jnp.float32)[:, :, None]
        return values.reshape(weight.shape[0], -1).astype(dtype), None
    if scale.ndim == 1:
        return weight.astype(dtype), scale
    scales = jnp.repeat(jnp.repeat(scale, GROUP, 0)[: weight.shape[0]], GROUP, 1)[:, : weight.shape[1]]
    return (weight.astype(jnp.float32) * scales).astype(dtype), None
