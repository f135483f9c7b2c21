"""simple_add: element-wise addition. The smallest operator, and the template for new ones."""

from __future__ import annotations

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, OpCall, Operator

CONTRACT = """
Args:
  a: T[...] of any shape; T is float32, float16 or bfloat16.
  b: as a, of the same shape and dtype; nothing is broadcast.

Returns:
  a + b, of the same shape and dtype.

Raises:
  TypeError: an argument has another dtype.
  ValueError: the shapes differ.
"""

_check = Checks("simple_add")


def _bind(a: ArraySpec, b: ArraySpec, *, check_inputs: bool = False) -> OpCall:
    del check_inputs  # no value of an element is wrong
    _check.dtype("a", a, FLOATS)
    _check.dtype("b", b, (a.dtype,), " (as a)")
    if b.shape != a.shape:
        raise _check.value_error("b", f"shape {list(a.shape)} (as a)", b)
    return OpCall("simple_add", "xla_gpu_simple_add", ("a", "b"), (a, b), (a,))


OPERATOR = Operator("simple_add", "(Tensor a, Tensor b) -> Tensor", ("a", "b"), _bind)
