"""all_reduce: the sum over the GPUs of a host; all_reduce_add_rms_norm: with the residual and the RMS norm after it."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .rms_norm import check_epsilon

_DOCSTRING = """
The sum is computed in float32, in the order of ranks, and rounded once. Every rank gets the same bits, and the same in
every run.

On GPUs of one host that reach each other's memory (NVLink), one kernel exchanges the data: without NCCL, and captured
in command buffers. Elsewhere (CPUs, GPUs without peer access, several hosts) the framework's all-gather brings the
parts and the handler sums them: slower, with the same bits.

Args:
  x: T[...], this rank's part, of the same shape on every rank. T is float32, float16 or bfloat16.
  group: the ranks, as described above.

Returns:
  T[...], the sum.

Raises:
  TypeError: an argument is of another type or dtype.
  ValueError: an argument has another shape, or the call is made where the group's ranks are not.

Note: A peer that does not arrive
  The GPU does not hang. After the group's time-out the result is NaN on the ranks that waited, and on all ranks from
  the next call on. The next call outside of a captured graph raises an error, and so does ``group.check()``. With
  ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the call itself waits for the device and raises
  it.
"""

_DOCSTRING_ADD_RMS_NORM = """
One kernel computes what stands between two tensor-parallel matrix products: ``reduced = all_reduce(x)``,
``sum = round(reduced + residual)`` and ``out = round(round(sum / sqrt(mean(sum ** 2) + eps)) * weight)``, where round
is to T. The mean is over the last axis, in float32. The bits of a row do not depend on the other rows.

Args:
  x: T[..., hidden], this rank's part. T is float32, float16 or bfloat16.
  residual: T[..., hidden], of x's shape, the same on every rank.
  weight: T[hidden].
  eps: a Python number >= 0, added to the mean.
  group: as for all_reduce.

Returns:
  ``(out, sum)``, both of x's shape and dtype.

Raises:
  TypeError: as all_reduce.
  ValueError: as all_reduce.
"""

_check = Checks("all_reduce")
_check_norm = Checks("all_reduce_add_rms_norm")


def _signature(x: ArraySpec, *, group: int = 0, check_inputs: bool = False) -> Signature:
    _check.dtype("x", x, FLOATS)
    number = _check.integer("group", group, 0)
    if number == 0 and (len(x.shape) < 1 or x.shape[0] < 1):
        raise _check.value_error("x", "the parts of at least one rank, [ranks, ...], without a group", x)
    out = x if number else ArraySpec(x.shape[1:], x.dtype)
    return Signature((out,), {"group": np.int64(number), "check_inputs": np.bool_(check_inputs)})


def _signature_norm(
    x: ArraySpec,
    residual: ArraySpec,
    weight: ArraySpec,
    *,
    eps: float,
    group: int = 0,
    check_inputs: bool = False,
) -> Signature:
    check = _check_norm
    check.dtype("x", x, FLOATS)
    check.dtype("residual", residual, (x.dtype,), " (as x)")
    check.dtype("weight", weight, (x.dtype,), " (as x)")
    number = check.integer("group", group, 0)
    if len(residual.shape) < 1:
        raise check.value_error("residual", "rank 1 or more, [..., hidden]", residual)
    if number:
        if x.shape != residual.shape:
            raise check.value_error("x", f"shape {list(residual.shape)} (as residual)", x)
    elif len(x.shape) < 1 or x.shape[0] < 1 or x.shape[1:] != residual.shape:
        raise check.value_error("x", f"the parts of at least one rank, [ranks, *{list(residual.shape)}]", x)
    check.shape("weight", weight, (residual.shape[-1],), "hidden")
    epsilon = check_epsilon(check, "eps", eps)
    values = {"group": np.int64(number), "eps": epsilon, "check_inputs": np.bool_(check_inputs)}
    return Signature((residual, residual), values)


# Without a group's number x holds the parts of all ranks, [ranks, ...]: what the front ends' functions pass where there
# is no peer memory.
OPERATOR = Operator("all_reduce", "(Tensor x, *, int group=0) -> Tensor", _signature, _DOCSTRING)
OPERATOR_ADD_RMS_NORM = Operator(
    "all_reduce_add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, *, float eps, int group=0) -> (Tensor, Tensor)",
    _signature_norm,
    _DOCSTRING_ADD_RMS_NORM,
)
