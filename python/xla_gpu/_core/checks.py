"""Checks of static arguments, with one form of error text: "operator: argument: expected …, got …"."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import dtypes
from .operator import ArraySpec, IntOperand

FLOATS = dtypes.FLOATS
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")
SMALLEST_FLOAT32 = 2.0**-149  # above 0


def type_name(value: object) -> str:
    """The type of what was given for an array, with a way on where it holds several."""
    name = type(value).__name__
    if isinstance(value, tuple) and hasattr(value, "arguments"):  # quantization.LinearWeight
        return f"{name}, whose arrays are arguments of their own, as in linear(x, **weight.arguments())"
    return name


class Checks:
    """The checks of one operator; ``renamed`` maps names that checks use to those that its users know."""

    def __init__(self, name: str, renamed: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._renamed = renamed or {}

    def argument(self, argument: str) -> str:
        return self._renamed.get(argument, argument)

    def value_error(self, argument: str, expected: str, got: object) -> ValueError:
        return ValueError(f"{self.name}: {self.argument(argument)}: expected {expected}, got {got}")

    def type_error(self, argument: str, expected: str, got: object) -> TypeError:
        return TypeError(f"{self.name}: {self.argument(argument)}: expected {expected}, got {got}")

    def array(self, argument: str, value: Any) -> ArraySpec:
        if not isinstance(value, ArraySpec):
            raise self.type_error(argument, "a tensor", type_name(value))
        return value

    def dtype(self, argument: str, spec: ArraySpec, allowed: Sequence[str], reason: str = "") -> None:
        self.array(argument, spec)
        if spec.dtype not in allowed:
            raise self.type_error(argument, f"dtype {' or '.join(allowed)}{reason}", spec)

    def rank(self, argument: str, spec: ArraySpec, axes: str) -> tuple[int, ...]:
        """The dimensions of ``spec``; ``axes`` are their names, "num_tokens, num_heads, head_dim"."""
        rank = axes.count(",") + 1
        if len(self.array(argument, spec).shape) != rank:
            raise self.value_error(argument, f"rank {rank} [{axes}]", spec)
        return spec.shape

    def shape(self, argument: str, spec: ArraySpec, shape: Sequence[int], axes: str) -> None:
        self.rank(argument, spec, axes)
        if spec.shape != tuple(shape):
            raise self.value_error(argument, f"shape [{', '.join(map(str, shape))}] ([{axes}])", spec)

    def size(self, argument: str, name: str, value: int, spec: ArraySpec, multiple: int, maximum: int) -> None:
        """A dimension of ``spec``, which ``name`` names."""
        if value < multiple or value % multiple:
            raise self.value_error(argument, f"{name} a multiple of {multiple}", spec)
        if isinstance(value, int) and value > maximum:  # not a symbol of a tracer, which handlers check
            raise self.value_error(argument, f"{name} up to {maximum}", spec)

    def integer(
        self,
        argument: str,
        value: Any,
        minimum: int,
        maximum: int = 2**63 - 1,
        expected: str = "an int known when the call is traced",
    ) -> int:
        try:
            # index() would take a bool, which is a slip wherever a count is meant.
            # NOTE: torch.compile traces isinstance with a tuple, but not with a union.
            number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
        except TypeError:
            number = None
        if number is None:
            raise self.type_error(argument, expected, type(value).__name__)
        if number < minimum:
            raise self.value_error(argument, f"an int >= {minimum}", number)
        if number > maximum:
            raise self.value_error(argument, f"an int <= {maximum}", number)
        return number

    def boolean(self, argument: str, value: Any) -> bool:
        # NOTE: torch.compile traces isinstance with a tuple, but not with a union.
        if not isinstance(value, (bool, np.bool_)):
            raise self.type_error(argument, "a bool known when the call is traced", type(value).__name__)
        return bool(value)

    def int_operand(self, operand: IntOperand, value: Any, bounding_shape: Sequence[int]) -> int:
        """An int given for ``operand``; ``bounding_shape`` is that of the array that bounds it."""
        expected = "a tensor int32[1], or an int known when the call is traced"
        if len(bounding_shape) != 1:  # which is an error of that array's, with a text of its own
            return self.integer(operand.name, value, 0, expected=expected)
        return self.integer(operand.name, value, 0, max(bounding_shape[0] - operand.others, 0), expected)

    def float32(
        self,
        argument: str,
        value: Any,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        expected: str = "a finite float32 number",
    ) -> np.float32:
        """``value`` rounded to float32, the type in which handlers take numbers; finite, and in its limits."""
        given = self.number(argument, value)
        with np.errstate(over="ignore"):
            number = np.float32(given)
        if not (math.isfinite(number) and minimum <= number <= maximum):
            raise self.value_error(argument, expected, given)
        return number

    def number(self, argument: str, value: Any) -> float:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.floating | np.integer):
            raise self.type_error(argument, "a number known when the call is traced", type(value).__name__)
        try:
            return float(value)
        except OverflowError:
            return math.inf
