"""rms_norm: the RMS norm of rows, with or without a residual that is added first."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning

_DOCSTRING = """
``sum = round(x + residual)``, or x where there is no residual, and ``out = round(round(sum / sqrt(mean(sum ** 2) +
eps)) * (weight + weight_offset))``, where round is to T. The mean is over the last axis; all arithmetic is in float32.
The bits of a row do not depend on the other rows.

Models of Llama's and Qwen's kind take the defaults. Gemma's have ``weight_offset=1.0, round_once=True``. These are the
roundings of the models in Hugging Face transformers.

Args:
  x: T[..., size]. T is float32, float16 or bfloat16.
  weight: T[size].
  eps: a Python number >= 0, added to the mean.
  residual: T[..., size], of x's shape, or None.
  weight_offset: a Python number, added to the weight.
  round_once: False: the normed row is rounded to T before it is multiplied by the weight. True: it is multiplied in
    float32 and rounded once. For float32 they are the same.

Returns:
  ``out``, of x's shape and dtype; with a residual ``(out, sum)``. (``torch.ops.xla_gpu.rms_norm`` returns a list of one
  or two tensors.)

Raises:
  TypeError: an argument is of another type or dtype.
  ValueError: an argument has another shape, or a number is out of its range.
"""

_check = Checks("rms_norm")


def _signature(
    x: ArraySpec,
    weight: ArraySpec,
    *,
    eps: float,
    residual: ArraySpec | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
    check_inputs: bool = False,
) -> Signature:
    del check_inputs  # no value of an element is wrong
    _check.dtype("x", x, FLOATS)
    if len(x.shape) < 1:
        raise _check.value_error("x", "rank 1 or more, [..., size]", x)
    _check.dtype("weight", weight, (x.dtype,), " (as x)")
    _check.shape("weight", weight, (x.shape[-1],), "size")
    if residual is not None:
        _check.dtype("residual", residual, (x.dtype,), " (as x)")
        if residual.shape != x.shape:
            raise _check.value_error("residual", f"shape {list(x.shape)} (as x)", residual)
    attributes = {
        **norm_attributes(_check, "eps", eps, weight_offset, round_once),
        "has_residual": np.bool_(residual is not None),
    }
    results = (x,) if residual is None else (x, x)
    return Signature(results, attributes, partitioning=by_rows(("x", "residual"), x.shape, len(results)))


def norm_attributes(
    check: Checks, name: str, eps: float, weight_offset: float, round_once: bool
) -> dict[str, np.float32 | np.bool_]:
    """The attributes of an RMS norm, checked; ``name`` is that of the epsilon."""
    return {
        name: check_epsilon(check, name, eps),
        "weight_offset": check.float32("weight_offset", weight_offset),
        "round_once": np.bool_(check.boolean("round_once", round_once)),
    }


def check_epsilon(check: Checks, name: str, eps: float) -> np.float32:
    """The epsilon of an RMS norm as handlers take it."""
    return check.float32(name, eps, 0, expected="a finite number >= 0")


def by_rows(operands: tuple[str, ...], shape: tuple[int, ...], results: int) -> Partitioning:
    """Every axis but the last is independent."""
    axes = (*(f"d{i}" for i in range(len(shape) - 1)), None)
    sizes = {axis: size for axis, size in zip(axes, shape, strict=True) if axis is not None}
    return Partitioning(dict.fromkeys(operands, axes), (axes,) * results, sizes)


OPERATOR = Operator(
    "rms_norm",
    "(Tensor x, Tensor weight, *, float eps, Tensor? residual=None, float weight_offset=0.0, bool round_once=False) "
    "-> Tensor[]",
    _signature,
    _DOCSTRING,
    differentiable=("x", "weight", "residual"),
)
