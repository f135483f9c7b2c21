"""Arguments of Triton functions as lists of numbers, and as the values that grids and heuristics see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .launch import Arguments, Result

# Kinds of arguments in their encoded form, which passes through torch.compile: kind and value of each.
OPERAND, RESULT, INT, FLOAT, BOOL, NONE, NUMPY = range(7)  # NUMPY + i: a scalar of dtype SCALARS[i]

# Triton's names of dtypes.
TYPES = {
    "bool": "i1",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
SCALARS = tuple(name for name in TYPES if not name.startswith("float8"))
ALIGNED = 16  # bytes: what the front ends promise for operands and results, and Triton specialises on


class Described(NamedTuple):
    """An array as grids and heuristics see it."""

    shape: tuple[int, ...]
    dtype: str  # NumPy's name

    def numel(self) -> int:
        """Its elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def encode(where: str, arguments: Sequence[Any], results: Sequence[int], is_array: Callable[[Any], bool]) -> Arguments:
    """The arguments as numbers; see launch.encode. Their meaning is left to ``bind``."""
    encoded: list[int] = []
    floats: list[float] = []
    arrays: list[Any] = []
    placed: list[int] = []
    for i, value in enumerate(arguments):
        if is_array(value):
            encoded += [OPERAND, len(arrays)]
            arrays.append(value)
        elif isinstance(value, Result):
            encoded += [RESULT, value.index]
            placed.append(value.index)
        elif value is None:
            encoded += [NONE, 0]
        elif isinstance(value, np.generic):
            encoded += _encoded_scalar(f"{where}: argument {i}", value)
        elif isinstance(value, bool):
            encoded += [BOOL, int(value)]
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{where}: argument {i}: expected an integer of 64 bits, got {value}")
            encoded += [INT, value]
        elif isinstance(value, float):
            encoded += [FLOAT, len(floats)]
            floats.append(value)
        else:
            raise TypeError(
                f"{where}: argument {i}: expected an array, a number, None or Result, got {type(value).__name__}; "
                "constants are given to triton_call by their names"
            )
    if not placed:
        for index in results:
            encoded += [RESULT, index]
    elif sorted(placed) != list(results):
        raise ValueError(f"{where}: arguments: expected Result of each of {list(results)} once, got {sorted(placed)}")
    return Arguments(encoded, floats, arrays)


def _encoded_scalar(where: str, value: np.generic) -> list[int]:
    if value.dtype.name not in SCALARS:
        raise TypeError(f"{where}: expected a number that Triton knows, got {value.dtype.name}")
    bits = int.from_bytes(value.tobytes().ljust(8, b"\0"), "little", signed=True)
    return [NUMPY + SCALARS.index(value.dtype.name), bits]


def values(encoded: Sequence[int], floats: Sequence[float], arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The arguments as Python values, results included, as grids and heuristics see them."""
    found: list[Any] = []
    for kind, value in zip(encoded[::2], encoded[1::2], strict=True):
        if kind == OPERAND:
            found.append(arrays[value])
        elif kind == RESULT:
            found.append(results[value])
        elif kind == FLOAT:
            found.append(floats[value])
        elif kind >= NUMPY:
            found.append(_numpy_value(kind, value).item())
        else:
            found.append(None if kind == NONE else bool(value) if kind == BOOL else value)
    return found


def _numpy_value(kind: int, bits: int) -> Any:
    name = SCALARS[kind - NUMPY]
    if name == "bfloat16":  # which NumPy has not by itself
        return np.frombuffer((bits << 16 & 0xFFFFFFFF).to_bytes(4, "little"), np.float32)[0]
    dtype = np.dtype(name)
    return np.frombuffer((bits & (2**64 - 1)).to_bytes(8, "little")[: dtype.itemsize], dtype)[0]
