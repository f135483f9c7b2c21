"""experts_mlp: the experts of a layer, made of grouped_linear and the framework's operations."""

from __future__ import annotations

from collections.abc import Mapping

from .._core.checks import Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning
from . import grouped_linear
from .gated_mlp import weight_checks
from .linear import check_activation

_DOCSTRING = """
``out[i] = sum over j of topk_weights[i, j] * mlp[topk_ids[i, j]](x[i])``, where the mlp of an expert is
``grouped_linear`` with gate_up_weight, the activation, and ``grouped_linear`` with down_weight. vLLM calls it
``fused_experts``, FlashInfer a fused MoE with selected experts. Which experts a row goes to is the caller's: see
``jax.lax.top_k`` and ``torch.topk``.

Pairs of a row and an expert are sorted by expert on the device. Nothing waits for the device, and a call of the same
shapes is the same program. Both weights are in any of grouped_linear's formats, each with its scale and zero point as
there.

Roundings: both products and the activation round to T. What topk_weights multiply is added in float32, in the order of
the columns, and rounds to T once. The sum does not depend on whether a compiler fuses multiplications with additions,
so the bits of a row depend on it, on its experts' weights and on its rows of topk_weights and topk_ids alone. What is
infinite, of either, makes the sum infinite or NaN as the product is; numbers of topk_weights below 2^-126 may count as
0.

Args:
  x: T[rows, hidden]. T is float16 or bfloat16.
  gate_up_weight: [num_experts, 2 * intermediate, hidden], of each expert the rows of the gate and then those of the up
    projection.
  down_weight: [num_experts, out_features, intermediate]; out_features is usually hidden.
  topk_weights: float32[rows, top_k] or T[rows, top_k], what each chosen expert's result is multiplied by.
  topk_ids: int32[rows, top_k] or int64[rows, top_k], the chosen experts. A number outside of 0 to num_experts - 1 is no
    expert, and adds nothing: so are padding rows marked, and experts that another device has. There are fewer than 2^30
    pairs.
  gate_up_scale: grouped_linear's weight_scale of gate_up_weight.
  gate_up_zero_point: grouped_linear's weight_zero_point of gate_up_weight.
  gate_up_bias: T[num_experts, 2 * intermediate].
  down_scale: as gate_up_scale, of down_weight.
  down_zero_point: as gate_up_zero_point, of down_weight.
  down_bias: T[num_experts, out_features], added to an expert's result before topk_weights multiply it.
  activation: ``"silu_and_mul"``, ``"gelu_and_mul"`` (the tanh form), or ``"swigluoai_and_mul"``, that of gpt-oss: with
    gate at most 7 and up from -7 to 7, ``gate * sigmoid(1.702 * gate) * (up + 1)``, rounded once.

Returns:
  T[rows, out_features]. Rows without an expert are 0.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape, or activation is another string.

Note: Zero points past 127
  As of grouped_linear: an error on a CPU, which names grouped_linear, and NaN on CUDA.
"""

ACTIVATIONS = ("silu_and_mul", "gelu_and_mul", "swigluoai_and_mul")

# Of gpt-oss.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0

# Pairs of a row and an expert up to which comparing them all with each other takes XLA less time than sorting them.
COMPARED_PAIRS = 1024

# What keeps 12 bits of a float32 number's 24. Such a number times one of T, of 11 bits at most, is a float32 number.
UPPER_BITS = ~0xFFF

_OPTIONAL = ("gate_up_scale", "gate_up_zero_point", "gate_up_bias", "down_scale", "down_zero_point", "down_bias")

_check = Checks("experts_mlp")
_check_gate_up = weight_checks("experts_mlp", "gate_up", "x")
_check_down = weight_checks("experts_mlp", "down", "gate_up_weight")


def _signature(
    x: ArraySpec,
    gate_up_weight: ArraySpec,
    down_weight: ArraySpec,
    topk_weights: ArraySpec,
    topk_ids: ArraySpec,
    *,
    activation: str = "silu_and_mul",
    check_inputs: bool = False,
    **optional: ArraySpec | None,
) -> Signature:
    del check_inputs  # that of grouped_linear
    _check.dtype("x", x, ("float16", "bfloat16"))
    rows, hidden = _check.rank("x", x, "rows, hidden")
    num_experts, n = _check_weight(_check_gate_up, "gate_up", x, hidden, gate_up_weight, optional)
    _check.array("down_weight", down_weight)
    multiple = grouped_linear.multiple_of_k(_check_down, x, down_weight, optional.get("down_scale"))
    if n % 2 or n // 2 % multiple:
        expected = f"shape [num_experts, 2 * intermediate, hidden], intermediate a multiple of {multiple}"
        raise _check.value_error("gate_up_weight", expected, gate_up_weight)
    others, out_features = _check_weight(_check_down, "down", x, n // 2, down_weight, optional)
    if others != num_experts:
        raise _check.value_error("down_weight", f"{num_experts} experts (as gate_up_weight)", down_weight)
    _check.dtype("topk_weights", topk_weights, ("float32", x.dtype), " (as x)")
    _, top_k = _check.rank("topk_weights", topk_weights, "rows, top_k")
    _check.shape("topk_weights", topk_weights, (rows, top_k), "rows, top_k")
    _check.dtype("topk_ids", topk_ids, ("int32", "int64"))
    _check.shape("topk_ids", topk_ids, (rows, top_k), "rows, top_k")
    # Symbols of tracers are not ints.
    if isinstance(rows, int) and isinstance(top_k, int) and rows * top_k > grouped_linear.MAX_ROWS:
        expected = f"up to {grouped_linear.MAX_ROWS} pairs of a row and an expert"
        raise _check.value_error("topk_ids", expected, topk_ids)
    check_activation(_check, activation, ACTIVATIONS)
    by_rows = ("rows", None)  # where types have shardings; else XLA divides the operations
    partitioning = Partitioning({"x": by_rows}, (by_rows,), {"rows": rows})
    return Signature((ArraySpec((rows, out_features), x.dtype),), {"activation": activation}, partitioning=partitioning)


def _check_weight(
    check: Checks, prefix: str, x: ArraySpec, k: int, weight: ArraySpec, optional: Mapping[str, ArraySpec | None]
) -> tuple[int, int]:
    scale, zero_point, bias = (optional.get(f"{prefix}_{name}") for name in ("scale", "zero_point", "bias"))
    return grouped_linear.check_weight(check, x, k, weight, scale, zero_point, bias)


OPERATOR = Operator(
    "experts_mlp",
    "(Tensor x, Tensor gate_up_weight, Tensor down_weight, Tensor topk_weights, Tensor topk_ids, *, "
    + "".join(f"Tensor? {name}=None, " for name in _OPTIONAL)
    + 'str activation="silu_and_mul") -> Tensor',
    _signature,
    _DOCSTRING,
)
