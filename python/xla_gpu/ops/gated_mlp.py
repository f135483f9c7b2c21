"""gated_mlp: the MLP block of a Llama, from the norm before it to the residual behind it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning
from .linear import check_activation, check_residual, check_weight
from .rms_norm import norm_attributes

_DOCSTRING = """
``h = rms_norm(x, norm_weight)``, ``h = linear(h, gate_up_weight, activation=activation)``, ``out = linear(h,
down_weight, residual=residual)``, with the bits of these operators one after the other, as one call: on a GPU their
kernels are launched so that each starts while the one before it ends. Between two calls of a compiled program that is
not possible.

Both weights are in any of linear's formats, each with its scale and zero point as there.

Up to 64 rows it is such a chain of kernels, for decode steps. Above 64 rows of float16 or bfloat16 the front ends call
the operators one after the other, as linear does with the framework's own product.

Args:
  x: T[rows, hidden], or T[…, hidden] with any other number of axes before the last. T is float32, float16 or bfloat16.
  gate_up_weight: [2 * intermediate, hidden], the rows of the gate and then those of the up projection.
  down_weight: [out_features, intermediate]; out_features is usually hidden.
  norm_weight: T[hidden], the weight of an RMS norm of x; None: no norm.
  residual: T[rows, out_features], with the axes of x before the last, added to the result; usually x. None: nothing is
    added, as where the result is one device's part of a sum.
  gate_up_scale: linear's weight_scale of gate_up_weight.
  gate_up_zero_point: linear's weight_zero_point of gate_up_weight.
  gate_up_bias: T[2 * intermediate].
  down_scale: as gate_up_scale, of down_weight.
  down_zero_point: as gate_up_zero_point, of down_weight.
  down_bias: T[out_features].
  activation: ``"silu_and_mul"`` or ``"gelu_and_mul"`` (the tanh form).
  eps: a Python number >= 0, the norm's epsilon.
  weight_offset: as of rms_norm.
  round_once: as of rms_norm.

Returns:
  T[rows, out_features], with the axes of x before the last.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape, or a number or a string is out of its range.

Note: Zero points past 127
  As of linear: up to 64 rows, and in float32, an error on a CPU and NaN on CUDA, where ``XLA_GPU_CHECK_INPUTS=1`` makes
  it an error too; above, NaN.
"""

_OPTIONAL = (
    "norm_weight",
    "residual",
    "gate_up_scale",
    "gate_up_zero_point",
    "gate_up_bias",
    "down_scale",
    "down_zero_point",
    "down_bias",
)


def weight_checks(operator: str, prefix: str, k: str) -> Checks:
    """Names for linear's checks: those of a weight that belongs to ``operator``; k is taken from the argument k."""
    names = ("weight", "weight_scale", "weight_zero_point", "bias")
    return Checks(operator, {"x": k, **{name: f"{prefix}_{name.removeprefix('weight_')}" for name in names}})


_check = Checks("gated_mlp")
_check_gate_up = weight_checks("gated_mlp", "gate_up", "x")
_check_down = weight_checks("gated_mlp", "down", "gate_up_weight")


def _signature(
    x: ArraySpec,
    gate_up_weight: ArraySpec,
    down_weight: ArraySpec,
    *,
    activation: str = "silu_and_mul",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
    check_inputs: bool = False,
    **optional: ArraySpec | None,
) -> Signature:
    _check.dtype("x", x, FLOATS)
    rows, hidden = _check.rank("x", x, "rows, hidden")
    check_norm_weight(_check, optional.get("norm_weight"), x)
    intermediate = check_weight_of(_check_gate_up, "gate_up", x, hidden, gate_up_weight, optional) // 2
    out = ArraySpec((rows, check_weight_of(_check_down, "down", x, intermediate, down_weight, optional)), x.dtype)
    check_residual(_check, optional.get("residual"), out)
    attributes = {
        "activation": check_activation(_check, activation),
        "check_inputs": np.bool_(check_inputs),
        **norm_attributes(_check, "eps", eps, weight_offset, round_once),
        "given": given_bits(_OPTIONAL, optional),
    }
    by_rows = ("rows", None)
    partitioning = Partitioning({"x": by_rows, "residual": by_rows}, (by_rows,), {"rows": rows})
    return Signature((out,), attributes, partitioning=partitioning)


def check_weight_of(
    check: Checks, prefix: str, x: ArraySpec, k: int, array: ArraySpec, optional: Mapping[str, ArraySpec | None]
) -> int:
    """Checks the weight of a product of rows of k values in x's dtype, with what ``optional`` has for it; returns n."""
    scale, zero_point, bias = (optional.get(f"{prefix}_{name}") for name in ("scale", "zero_point", "bias"))
    return check_weight(check, x, k, array, scale, zero_point, bias)[0]


def check_norm_weight(check: Checks, norm_weight: ArraySpec | None, x: ArraySpec) -> None:
    """Checks the weight of a norm of x's rows, if there is one."""
    if norm_weight is not None:
        check.dtype("norm_weight", norm_weight, (x.dtype,), " (as x)")
        check.shape("norm_weight", norm_weight, x.shape[-1:], "hidden")


def given_bits(names: tuple[str, ...], arrays: dict[str, ArraySpec | None]) -> np.int64:
    """The attribute of handlers with optional operands: a bit for each of ``names``, whether it is given."""
    return np.int64(sum(1 << i for i, name in enumerate(names) if arrays.get(name) is not None))


OPERATOR = Operator(
    "gated_mlp",
    "(Tensor x, Tensor gate_up_weight, Tensor down_weight, *, "
    + "".join(f"Tensor? {name}=None, " for name in _OPTIONAL)
    + 'str activation="silu_and_mul", float eps=1e-06, float weight_offset=0.0, bool round_once=False) -> Tensor',
    _signature,
    _DOCSTRING,
    has_scratch=True,
    rows=("x", "residual"),
    differentiable=("x", "gate_up_weight", "down_weight", "norm_weight", "residual", "gate_up_bias", "down_bias"),
)
