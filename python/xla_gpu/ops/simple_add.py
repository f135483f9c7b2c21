"""simple_add: element-wise addition. The smallest operator, and the template for new ones."""

from __future__ import annotations

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import elementwise

_DOCSTRING = """
Args:
  a: T[...], of any shape. T is float32, float16 or bfloat16.
  b: T[...], of the shape and dtype of a. Nothing is broadcast or converted.

Returns:
  T[...], of the shape and dtype of a, rounded to nearest even.

Raises:
  TypeError: an argument is no array, or its dtype is not the one expected.
  ValueError: the shapes differ.
"""

_check = Checks("simple_add")


def _signature(a: ArraySpec, b: ArraySpec, *, check_inputs: bool = False) -> Signature:
    del check_inputs  # no value of an element is wrong
    _check.dtype("a", a, FLOATS)
    _check.dtype("b", b, (a.dtype,), " (as a)")
    if b.shape != a.shape:
        raise _check.value_error("b", f"shape {list(a.shape)} (as a)", b)
    return Signature(results=(a,), partitioning=elementwise({"a": len(a.shape), "b": len(a.shape)}, a.shape))


OPERATOR = Operator("simple_add", "(Tensor a, Tensor b) -> Tensor", _signature, _DOCSTRING, differentiable=("a", "b"))
