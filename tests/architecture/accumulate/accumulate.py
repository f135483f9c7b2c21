"""accumulate: total + scale * reversed(x). An operator with scratch memory and an in-place form, for a test."""

from __future__ import annotations

from .._core.checks import Checks
from .._core.operator import ArraySpec, Operator, Signature

_DOCSTRING = """
Args:
  x: float32[n].
  total: float32[n].
  scale: a number.

Returns:
  total + scale * reversed(x).
"""

_check = Checks("accumulate")


def _signature(x: ArraySpec, total: ArraySpec, *, scale: float, check_inputs: bool = False) -> Signature:
    del check_inputs  # no value of an element is wrong
    _check.dtype("x", x, ("float32",))
    _check.rank("x", x, "n")
    _check.dtype("total", total, ("float32",))
    _check.shape("total", total, x.shape, "n")
    return Signature(results=(total,), attributes={"scale": _check.float32("scale", scale)})


OPERATOR = Operator(
    "accumulate",
    "(Tensor x, Tensor total, *, float scale) -> Tensor",
    _signature,
    _DOCSTRING,
    in_place="total",
    has_scratch=True,
)
