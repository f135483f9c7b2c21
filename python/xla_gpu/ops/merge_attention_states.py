"""merge_attention_states: one attention result from two over disjoint sets of keys."""

from __future__ import annotations

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning

_DOCSTRING = """
The states are results of paged_attention_with_lse for the same queries over disjoint sets of keys: a prefix that many
sequences share and the rest of each, or the shards of a long context. The result is the attention over the union:
``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``, computed in
float32 (Dao et al., 2023, Flash-Decoding; Ye et al., 2024, Cascade Inference).

Args:
  out_a: T[num_tokens, num_heads, head_dim]. T is float32, float16 or bfloat16.
  lse_a: float32[num_tokens, num_heads], natural logarithm; -inf for rows that saw no key.
  out_b: of the shape and dtype of out_a.
  lse_b: of the shape and dtype of lse_a.

Returns:
  ``(out, lse)``, of the shapes and dtypes of out_a and lse_a. A row that saw no key on either side is 0, with lse
  -inf.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape.
"""

_check = Checks("merge_attention_states")


def _signature(
    out_a: ArraySpec, lse_a: ArraySpec, out_b: ArraySpec, lse_b: ArraySpec, *, check_inputs: bool = False
) -> Signature:
    del check_inputs  # no value of an element is wrong
    axes = "num_tokens, num_heads, head_dim"
    _check.dtype("out_a", out_a, FLOATS)
    num_tokens, num_heads, _ = _check.rank("out_a", out_a, axes)
    _check.dtype("lse_a", lse_a, ("float32",))
    _check.shape("lse_a", lse_a, (num_tokens, num_heads), "num_tokens, num_heads")
    _check.dtype("out_b", out_b, (out_a.dtype,), " (as out_a)")
    _check.shape("out_b", out_b, out_a.shape, axes)
    _check.dtype("lse_b", lse_b, ("float32",))
    _check.shape("lse_b", lse_b, lse_a.shape, "num_tokens, num_heads")
    state = (("num_tokens", "num_heads", None), ("num_tokens", "num_heads"))
    operands = {"out_a": state[0], "lse_a": state[1], "out_b": state[0], "lse_b": state[1]}
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads}
    return Signature(results=(out_a, lse_a), partitioning=Partitioning(operands, state, sizes))


OPERATOR = Operator(
    "merge_attention_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    _signature,
    _DOCSTRING,
)
