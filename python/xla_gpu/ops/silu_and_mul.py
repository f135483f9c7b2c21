"""silu_and_mul and gelu_and_mul: the activation of a gated feed-forward layer."""

from __future__ import annotations

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .rms_norm import by_rows

_DOCSTRING = """
``round(round(%s(x[..., :size])) * x[..., size:])``, where round is to T and the arithmetic in float32: the
roundings of the models in Hugging Face transformers. x is the product with the gate's and the other matrix side by
side%s.

Args:
  x: T[..., 2 * size]. T is float32, float16 or bfloat16.

Returns:
  T[..., size].

Raises:
  TypeError: x is no array, or has another dtype.
  ValueError: x's last dimension is not even.
"""


def _operator(name: str, docstring: str) -> Operator:
    check = Checks(name)

    def signature(x: ArraySpec, *, check_inputs: bool = False) -> Signature:
        del check_inputs  # no value of an element is wrong
        check.dtype("x", x, FLOATS)
        if len(x.shape) < 1 or x.shape[-1] % 2 != 0:
            raise check.value_error("x", "rank 1 or more and an even last dimension, [..., 2 * size]", x)
        out = ArraySpec((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
        return Signature((out,), partitioning=by_rows(("x",), x.shape, 1))

    return Operator(name, "(Tensor x) -> Tensor", signature, docstring, differentiable=("x",))


OPERATOR = _operator("silu_and_mul", _DOCSTRING % ("silu", ""))
OPERATOR_GELU = _operator(
    "gelu_and_mul", _DOCSTRING % ("gelu", "; gelu is approximated by tanh, as torch's gelu(approximate='tanh')")
)
