"""Packed int4: eight values of k in four bytes.

Byte 0 holds values 0 (low nibble) and 2 (high), byte 1 values 4 and 6, byte 2 values 1 and 3, byte 3 values 5 and 7:
nibbles 0 to 7 of a 32-bit word hold values 0, 2, 4, 6, 1, 3, 5, 7. Two neighbours are then
in the same bits of a register's halves, and a kernel converts both with one mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# An array of NumPy, PyTorch or JAX: the functions use what all three spell alike.
Array = Any


def pack(values: Array) -> Array:
    """uint8[n, k] of 0 to 15 as uint8[n, k / 2]; k is a multiple of 8."""
    n, k = values.shape
    nibbles = values.reshape(n, k // 8, 4, 2).swapaxes(2, 3).reshape(n, k // 2, 2)
    return nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)


def unpack(packed: Array, stack: Callable[[tuple[Array, ...], int], Array]) -> Array:
    """uint8[n, k / 2] as uint8[n, k]; ``stack`` is that of the array's library."""
    n, half = packed.shape
    nibbles = stack((packed & 15, packed >> 4), 2)
    return nibbles.reshape(n, half // 4, 2, 4).swapaxes(2, 3).reshape(n, 2 * half)
