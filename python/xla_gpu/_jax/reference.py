"""The operators in JAX's own operations, without a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._core import ragged_reference

_ARRAYS = ragged_reference.Arrays(
    jnp, jnp.arange, cast=lambda array, dtype: array.astype(dtype), take=lambda array, indices: array[indices]
)


def ragged_paged_attention(*operands: jax.Array, **options: Any) -> Any:
    """See _core/ragged_reference.py."""
    with jax.default_matmul_precision("highest"):  # products of float32, not of what the GPU rounds them to
        return ragged_reference.ragged_paged_attention(_ARRAYS, *operands, **options)
