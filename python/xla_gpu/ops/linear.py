"""linear: the product with a weight matrix, plain or quantised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, OpCall, Operator, Signature
from .._core.partitioning import Axes, Partitioning

_DOCSTRING = """
``out = x @ weight.T * scale + bias``, then the activation, then the residual. Sums are in float32. Results round to T
where a model in plain PyTorch rounds: after the bias, after the activation function, after its product, and after the
residual.

| weight | weight_scale | weight_zero_point |
|---|---|---|
| T[n, k] | None | None |
| float8_e4m3fn[n, k] | float32[1], float32[n] or float32[ceil(n / 128), ceil(k / 128)] | None |
| int8[n, k] | float32[n] | None |
| uint8[n, k / 2], from ``xla_gpu.quantization.pack_weight`` | T[n, k / 128] | None, for 8, or uint8[n, k / 128] |

A weight's value is ``(stored - zero_point) * scale``. Stored values are exact in T; scales apply to sums in float32.

Up to 64 rows a kernel of this library streams the weights, and the bits of a row do not depend on the other rows nor on
how many there are. Above 64 rows of float16 or bfloat16 the front ends use the
framework's own matrix product, from weights converted to T.

Args:
  x: T[rows, k], or T[…, k] with any other number of axes before the last. T is float32, float16 or bfloat16. k is a
    multiple of 16, with packed int4 of 128.
  weight: as above; n is a multiple of 16.
  weight_scale: as above.
  weight_zero_point: as above; values of 0 to 127.
  bias: T[n].
  residual: T[rows, out_features], with the axes of x before the last, added to the result.
  activation: ``"silu_and_mul"`` or ``"gelu_and_mul"`` (the tanh form): the first n / 2 features are gates,
    ``out = activation(x @ gate.T) * (x @ up.T)`` for ``weight = concatenate([gate, up])``.

Returns:
  T[rows, out_features], with the axes of x before the last; out_features is n, or n / 2 with an activation.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape, or activation is another string.

Note: Zero points past 127
  Above 64 rows of float16 or bfloat16 the features that use them are NaN. Otherwise the call fails on a CPU; on CUDA
  these features are NaN, and with ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the call fails
  as on a CPU.
"""

MAX_KERNEL_ROWS = 64  # above, the front ends use their framework's matrix product
GROUP = 128  # elements of a quantisation group, and of a side of a float8 block
_MULTIPLE = 16  # of n and k
_MAX_SIZE = (1 << 31) - 1

ACTIVATIONS = ("silu_and_mul", "gelu_and_mul")

_check = Checks("linear")


def _signature(
    x: ArraySpec,
    weight: ArraySpec,
    *,
    weight_scale: ArraySpec | None = None,
    weight_zero_point: ArraySpec | None = None,
    bias: ArraySpec | None = None,
    residual: ArraySpec | None = None,
    activation: str | None = None,
    check_inputs: bool = False,
) -> Signature:
    _check.dtype("x", x, FLOATS)
    rows, k = _check.rank("x", x, "rows, k")
    n, scale_axes = check_weight(_check, x, k, weight, weight_scale, weight_zero_point, bias)
    if activation is not None:
        check_activation(_check, activation)
    out = ArraySpec((rows, n if activation is None else n // 2), x.dtype)
    check_residual(_check, residual, out)
    attributes = {
        "activation": activation or "none",
        "bias": np.bool_(bias is not None),
        "check_inputs": np.bool_(check_inputs),
        "residual": np.bool_(residual is not None),
        "weight_scale": np.bool_(weight_scale is not None),
        "weight_zero_point": np.bool_(weight_zero_point is not None),
    }
    return Signature((out,), attributes, partitioning=_partitioning(rows, n, weight, activation, scale_axes))


def check_weight(
    check: Checks,
    x: ArraySpec,
    k: int,
    weight: ArraySpec,
    scale: ArraySpec | None,
    zero_point: ArraySpec | None,
    bias: ArraySpec | None,
) -> tuple[int, Axes]:
    """Checks a weight [n, k] in any format, to be multiplied by rows of x's dtype, and what belongs to it.

    ``check`` names the arguments x, weight, weight_scale, weight_zero_point and bias as the operator does. Returns n
    and the axes of weight_scale.
    """
    check.dtype("weight", weight, (x.dtype, "float8_e4m3fn", "int8", "uint8"), " (as x, or quantised)")
    n, stored = check.rank("weight", weight, "n, k / 2" if weight.dtype == "uint8" else "n, k")
    int4 = weight.dtype == "uint8"
    check.size("x", "k", k, x, GROUP if int4 else _MULTIPLE, _MAX_SIZE)
    check.size("weight", "n", n, weight, _MULTIPLE, _MAX_SIZE)
    if stored != (k // 2 if int4 else k):
        of = check.argument("x")  # in a block the second product's k is another argument's
        raise check.value_error("weight", f"shape [n, {k // 2 if int4 else k}] (k = {k}, from {of})", weight)
    scale_axes = check_scale(check, x, weight, n, k, scale, zero_point)
    if bias is not None:
        check.dtype("bias", bias, (x.dtype,), " (as x)")
        check.shape("bias", bias, (n,), "n")
    return n, scale_axes


def check_activation(check: Checks, activation: str, known: Sequence[str] = ACTIVATIONS) -> str:
    """Returns the name of an activation, checked."""
    if not isinstance(activation, str):
        raise check.type_error("activation", " or ".join(known), type(activation).__name__)
    if activation not in known:
        raise check.value_error("activation", " or ".join(known), repr(activation))
    return activation


def check_residual(check: Checks, residual: ArraySpec | None, out: ArraySpec) -> None:
    """Checks what is added to a result, if there is any."""
    if residual is not None:
        check.dtype("residual", residual, (out.dtype,), " (as x)")
        check.shape("residual", residual, out.shape, "rows, out_features")


def check_scale(
    check: Checks,
    x: ArraySpec,
    weight: ArraySpec,
    n: int,
    k: int,
    scale: ArraySpec | None,
    zero_point: ArraySpec | None,
) -> Axes:
    """Checks the scales of a weight [n, k] for rows of x's dtype; returns the axes of weight_scale."""
    int4 = weight.dtype == "uint8"
    if zero_point is not None and not int4:
        raise check.value_error("weight_zero_point", "None, since weight is not packed int4", zero_point)
    if weight.dtype == x.dtype:
        if scale is not None:
            raise check.value_error("weight_scale", "None, since weight is of x's dtype", scale)
        return ()
    if scale is None:
        raise check.value_error("weight_scale", f"an array, since weight is {weight.dtype}", None)
    blocks, groups = -(-n // GROUP), -(-k // GROUP)
    if int4:
        check.dtype("weight_scale", scale, (x.dtype,), " (as x)")
        check.shape("weight_scale", scale, (n, groups), "n, k / 128")
        if zero_point is not None:
            check.dtype("weight_zero_point", zero_point, ("uint8",))
            check.shape("weight_zero_point", zero_point, (n, groups), "n, k / 128")
        return ("features", None)
    check.dtype("weight_scale", scale, ("float32",))
    if scale.shape == (n,):
        return ("features",)
    if weight.dtype == "int8":
        raise check.value_error("weight_scale", f"shape [{n}]", scale)
    if scale.shape == (1,):
        return (None,)
    if scale.shape == (blocks, groups):
        return ("features", None)
    raise check.value_error("weight_scale", f"shape [1], [{n}] or [{blocks}, {groups}]", scale)


def _partitioning(rows: int, n: int, weight: ArraySpec, activation: str | None, scale_axes: Axes) -> Partitioning:
    """Over rows, and over features where an activation does not pair those of the two halves."""
    # A share is whole tiles of 16 features; with float8's scales of blocks it is whole blocks.
    unit = GROUP if len(scale_axes) == 2 and weight.dtype != "uint8" else _MULTIPLE
    features = f"blocks_of_{unit}_features" if activation is None and n % unit == 0 else None
    return Partitioning(
        operands={
            "x": ("rows", None),
            "weight": (features, None),
            "weight_scale": tuple(features if axis == "features" else axis for axis in scale_axes),
            "weight_zero_point": (features, None),
            "bias": (features,),
            "residual": ("rows", features),
        },
        results=(("rows", features),),
        sizes={"rows": rows, features: n // unit} if features else {"rows": rows},
    )


OPERATOR = Operator(
    "linear",
    "(Tensor x, Tensor weight, *, Tensor? weight_scale=None, Tensor? weight_zero_point=None, Tensor? bias=None, "
    "Tensor? residual=None, str? activation=None) -> Tensor",
    _signature,
    _DOCSTRING,
    has_scratch=True,
    rows=("x", "residual"),
    differentiable=("x", "weight", "bias", "residual"),
)


def uses_kernel(call: OpCall) -> bool:
    """Whether a front end calls the kernel. float32 has no second path: XLA would multiply it in TF32."""
    x = call.operands[0]
    return x.dtype == "float32" or x.shape[0] <= MAX_KERNEL_ROWS
