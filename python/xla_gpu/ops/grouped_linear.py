"""grouped_linear: products of groups of rows, each with a weight matrix of its own, plain or quantised."""

from __future__ import annotations

import numpy as np

from .._core.checks import Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning
from .linear import GROUP

_DOCSTRING = """
``out[i] = x[i] @ weight[group of i].T * scale + bias[group of i]``, for rows in the order of their groups: the first
``group_sizes[0]`` rows are of group 0, and so on. The experts of a layer are such groups. Sums are in float32, and
results round to T once.

| weight, of G groups | weight_scale | weight_zero_point |
|---|---|---|
| T[G, n, k] | None | None |
| float8_e4m3fn[G, n, k] | float32[G, n] or float32[G, ceil(n / 128), ceil(k / 128)] | None |
| int8[G, n, k] | float32[G, n] | None |
| uint8[G, n, k / 2], int4 of ``pack_weight`` | T[G, n, k / 128] | None, for 8, or uint8[G, n, k / 128] |
| uint8[G, n, k / 2], mxfp4 | uint8[G, n, k / 32] | None |

The first four are ``linear``'s, a matrix for each group, whose int4 ``quantization.pack_weight`` packs. mxfp4 is
as checkpoints store it: two values of e2m1 in a byte, the one of even index in the lower half, and for each 32 values
the exponent of a power of two, with 127 added.

Which rows belong to which group is read on the device: calls of the same shapes launch the same kernel. The bits of a
row depend on it and on its group's weight alone.

Args:
  x: T[rows, k]. T is float16 or bfloat16. k is a multiple of 16, with mxfp4 of 32, with packed int4 of 128. Rows are
    fewer than 2^30.
  weight: as above; n is a multiple of 16, and G is 1 to 1024.
  group_sizes: int32[G], how many rows each group has. Their sum may be less than rows: results of rows behind
    it are 0. Sizes below 0 count as 0, and rows past the last one are not there.
  weight_scale: as above. Exponents of mxfp4 above 33 (15 in float16) make weights infinite or NaN.
  weight_zero_point: as above; values of 0 to 127.
  bias: T[G, n].

Returns:
  T[rows, n].

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape.

Note: Zero points past 127
  On a CPU the call fails. On CUDA the features that use them are NaN, also with ``XLA_GPU_CHECK_INPUTS=1``.
"""

MXFP4_GROUP = 32  # values with one scale
MAX_GROUPS = 1024
MAX_ROWS = (1 << 30) - 1
_MULTIPLE = 16  # of n and k
_MAX_SIZE = (1 << 29) - 1

_check = Checks("grouped_linear")


def _signature(
    x: ArraySpec,
    weight: ArraySpec,
    group_sizes: ArraySpec,
    *,
    weight_scale: ArraySpec | None = None,
    weight_zero_point: ArraySpec | None = None,
    bias: ArraySpec | None = None,
    check_inputs: bool = False,
) -> Signature:
    del check_inputs  # every size of a group has a defined result, and zero points past 127 give NaN
    _check.dtype("x", x, ("float16", "bfloat16"))
    rows, k = _check.rank("x", x, "rows, k")
    if isinstance(rows, int) and rows > MAX_ROWS:  # not a symbol of a tracer, which handlers check
        raise _check.value_error("x", f"up to {MAX_ROWS} rows", x)
    num_groups, n = check_weight(_check, x, k, weight, weight_scale, weight_zero_point, bias)
    _check.dtype("group_sizes", group_sizes, ("int32",))
    _check.shape("group_sizes", group_sizes, (num_groups,), "num_groups")
    attributes = {
        "bias": np.bool_(bias is not None),
        "weight_scale": np.bool_(weight_scale is not None),
        "weight_zero_point": np.bool_(weight_zero_point is not None),
    }
    blocks = weight.dtype == "float8_e4m3fn" and weight_scale is not None and len(weight_scale.shape) == 3
    partitioning = _partitioning(n, GROUP if blocks else _MULTIPLE, weight_scale)
    return Signature((ArraySpec((rows, n), x.dtype),), attributes, partitioning=partitioning)


def check_weight(
    check: Checks,
    x: ArraySpec,
    k: int,
    weight: ArraySpec,
    scale: ArraySpec | None,
    zero_point: ArraySpec | None,
    bias: ArraySpec | None,
) -> tuple[int, int]:
    """Checks the weights [num_groups, n, k] of groups, in any format, to be multiplied by rows of x's dtype.

    ``check`` names the arguments as of linear.check_weight. Returns num_groups and n.
    """
    check.dtype("weight", weight, (x.dtype, "float8_e4m3fn", "int8", "uint8"), " (as x, or quantised)")
    packed = weight.dtype == "uint8"
    num_groups, n, stored = check.rank("weight", weight, f"num_groups, n, {'k / 2' if packed else 'k'}")
    mxfp4 = packed and _is_mxfp4(check, x, scale)
    check.size("x", "k", k, x, multiple_of_k(check, x, weight, scale), _MAX_SIZE)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise check.value_error("weight", f"1 to {MAX_GROUPS} groups", weight)
    check.size("weight", "n", n, weight, _MULTIPLE, _MAX_SIZE)
    if stored != (k // 2 if packed else k):
        of = check.argument("x")
        expected = f"shape [num_groups, n, {k // 2 if packed else k}] (k = {k}, from {of})"
        raise check.value_error("weight", expected, weight)
    _check_scale(check, x, weight, (num_groups, n, k), scale)
    if zero_point is not None:
        if not packed or mxfp4:
            raise check.value_error("weight_zero_point", "None, since weight is not packed int4", zero_point)
        check.dtype("weight_zero_point", zero_point, ("uint8",))
        check.shape("weight_zero_point", zero_point, (num_groups, n, k // GROUP), "num_groups, n, k / 128")
    if bias is not None:
        check.dtype("bias", bias, (x.dtype,), " (as x)")
        check.shape("bias", bias, (num_groups, n), "num_groups, n")
    return num_groups, n


def multiple_of_k(check: Checks, x: ArraySpec, weight: ArraySpec, scale: ArraySpec | None) -> int:
    """Of which number k is a multiple in the format of a weight."""
    if weight.dtype != "uint8":
        return _MULTIPLE
    return MXFP4_GROUP if _is_mxfp4(check, x, scale) else GROUP


def _is_mxfp4(check: Checks, x: ArraySpec, scale: ArraySpec | None) -> bool:
    """Whether a weight in uint8 is, else it is packed int4; checked before k, whose multiple depends on it."""
    if scale is None:
        raise check.value_error("weight_scale", "an array, since weight is uint8", None)
    check.dtype("weight_scale", scale, (x.dtype, "uint8"), " (of packed int4, or of mxfp4)")
    return scale.dtype == "uint8"


def _check_scale(
    check: Checks, x: ArraySpec, weight: ArraySpec, sizes: tuple[int, int, int], scale: ArraySpec | None
) -> None:
    """``sizes``: num_groups, n and k."""
    num_groups, n, k = sizes
    if weight.dtype == x.dtype:
        if scale is not None:
            raise check.value_error("weight_scale", "None, since weight is of x's dtype", scale)
        return
    if scale is None:
        raise check.value_error("weight_scale", f"an array, since weight is {weight.dtype}", None)
    if weight.dtype == "uint8":
        size = MXFP4_GROUP if scale.dtype == "uint8" else GROUP
        check.shape("weight_scale", scale, (num_groups, n, k // size), f"num_groups, n, k / {size}")
        return
    check.dtype("weight_scale", scale, ("float32",))
    if weight.dtype == "float8_e4m3fn" and len(scale.shape) == 3:
        blocks = (num_groups, -(-n // GROUP), -(-k // GROUP))
        check.shape("weight_scale", scale, blocks, "num_groups, ceil(n / 128), ceil(k / 128)")
        return
    check.shape("weight_scale", scale, (num_groups, n), "num_groups, n")


def _partitioning(n: int, unit: int, scale: ArraySpec | None) -> Partitioning:
    """Over features, as linear. Rows belong to groups: all are needed."""
    features = f"blocks_of_{unit}_features" if n % unit == 0 else None
    return Partitioning(
        operands={
            "x": (None, None),
            "weight": (None, features, None),
            "group_sizes": (None,),
            "weight_scale": (None, features) if scale is None or len(scale.shape) == 2 else (None, features, None),
            "weight_zero_point": (None, features, None),
            "bias": (None, features),
        },
        results=((None, features),),
        sizes={features: n // unit} if features else {},
    )


OPERATOR = Operator(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor group_sizes, *, Tensor? weight_scale=None, Tensor? weight_zero_point=None, "
    "Tensor? bias=None) -> Tensor",
    _signature,
    _DOCSTRING,
)
