"""Attributes of a call, typed as ``jax.ffi.ffi_call`` types them, hashable and exact to the bit.

| Python value | the handler sees |
|---|---|
| ``bool`` / ``int`` / ``float`` | bool / int64_t / double |
| NumPy (or ml_dtypes bfloat16) scalar | that scalar type |
| NumPy array of any rank | a Span of its elements, row-major |
| ``str`` / ``bytes`` | std::string_view |
| ``dict`` with such values | ffi::Dictionary |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .dtypes import DTYPES

_SCALARS = {name for name in DTYPES if not name.startswith(("complex", "float8"))}


# Values are held as raw little-endian bytes, never as numbers: 2.0, np.float32(2.0) and 2 are equal and hash alike in
# Python, as are 0.0 and -0.0, and a cache keyed by them would hand one call the other's program.
class Scalar(NamedTuple):
    dtype: str
    data: bytes


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Text(NamedTuple):
    data: bytes


class Dictionary(NamedTuple):
    items: tuple[tuple[str, Attribute], ...]


Attribute = Scalar | Array | Text | Dictionary
Attributes = tuple[tuple[str, Attribute], ...]  # sorted by name


def attributes(where: str, values: Mapping[str, Any]) -> Attributes:
    """The typed attributes for ``values``; ``where`` begins the error texts."""
    return tuple((name, _attribute(where, name, values[name])) for name in sorted(values))


def numpy_value(attribute: Attribute) -> Any:
    """The value that makes jax.ffi.ffi_call send the same attribute."""
    if isinstance(attribute, Scalar):
        return np.frombuffer(attribute.data, _numpy_dtype(attribute.dtype))[0]
    if isinstance(attribute, Array):
        return np.frombuffer(attribute.data, _numpy_dtype(attribute.dtype)).reshape(attribute.shape)
    if isinstance(attribute, Text):
        return attribute.data
    return {name: numpy_value(value) for name, value in attribute.items}


def _attribute(where: str, name: str, value: Any) -> Attribute:
    if isinstance(value, str | bytes):
        return Text(value.encode() if isinstance(value, str) else value)
    if isinstance(value, Mapping):
        return Dictionary(attributes(f"{where}: attribute {name}", value))
    if isinstance(value, np.ndarray):
        dtype = value.dtype.name
        if dtype not in _SCALARS:
            raise TypeError(f"{where}: attribute {name}: expected an array of real numbers, got dtype {dtype}")
        native = value.astype(value.dtype.newbyteorder("="), order="C", copy=False)
        return Array(dtype, value.shape, native.tobytes())
    if isinstance(value, np.generic):
        typed: Any = value
    elif isinstance(value, bool):
        typed = np.bool_(value)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{where}: attribute {name}: expected an integer of 64 bits, got {value}")
        typed = np.int64(value)
    elif isinstance(value, float):
        typed = np.float64(value)
    else:
        raise TypeError(
            f"{where}: attribute {name}: expected a bool, int, float, str, bytes, dict, NumPy scalar or NumPy array, "
            f"got {type(value).__name__}"
        )
    if typed.dtype.name not in _SCALARS:
        raise TypeError(f"{where}: attribute {name}: expected a real number, got dtype {typed.dtype.name}")
    return Scalar(typed.dtype.name, typed.tobytes())


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # comes with jaxlib; only who used it to make the attribute gets here

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)
