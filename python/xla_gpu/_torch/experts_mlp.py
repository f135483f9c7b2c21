"""experts_mlp in PyTorch's operations and grouped_linear; see ops/experts_mlp.py."""

from __future__ import annotations

from typing import Any

import torch

from .._core.operator import OpCall
from .._torch_xla import float_bits
from ..ops import experts_mlp as declaration
from .dispatch import Results
from .tensors import check_operands

Tensors = dict[str, torch.Tensor]


def run(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    """See ops/experts_mlp.py; the arguments have been checked."""
    check_operands(call.name, call.operand_names, tensors)
    given = dict(zip(call.operand_names, tensors, strict=True))
    return (experts(given, arguments.get("activation", "silu_and_mul")),)


def experts(given: Tensors, activation: str) -> torch.Tensor:
    """The result; tensors by the names of their arguments."""
    x, ids = given["x"], given["topk_ids"]
    num_experts, out_features = given["gate_up_weight"].shape[0], given["down_weight"].shape[1]
    if ids.numel() == 0:  # torch_xla has no sort or sum of nothing
        return torch.zeros(x.shape[0], out_features, dtype=x.dtype, device=x.device)
    is_expert = (ids >= 0) & (ids < num_experts)
    # Pairs without an expert are the last ones: grouped_linear gives them 0.
    expert_of_pair = torch.where(is_expert, ids, num_experts).to(torch.int32).reshape(-1)
    sizes, pair_at, place_of = in_order(expert_of_pair, num_experts)
    hidden = _product(given, "gate_up", x.index_select(0, pair_at // ids.shape[1]), sizes)
    out = _product(given, "down", _activated(hidden, activation), sizes)
    weights = given["topk_weights"]
    return _weighted_sum(out, place_of.view(ids.shape), torch.where(is_expert, weights, torch.zeros_like(weights)))


def in_order(expert_of_pair: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of a row and an expert in the order of experts; those of the number num_experts are the last ones.

    Args:
      expert_of_pair: int32[pairs], numbers from 0 to num_experts, which is none of the experts.
      num_experts: how many there are.

    Returns:
      How many pairs each expert has, int32[num_experts], which pair comes at each place, int[pairs], and the place of
      each pair, int[pairs].
    """
    everyone = torch.arange(num_experts, dtype=torch.int32, device=expert_of_pair.device)
    sizes = (expert_of_pair[:, None] == everyone).sum(0, dtype=torch.int32)
    return sizes, *_places(expert_of_pair)


def _places(expert_of_pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = expert_of_pair.shape[0]
    index = torch.arange(pairs, dtype=torch.int32, device=expert_of_pair.device)
    if pairs <= declaration.COMPARED_PAIRS:
        key = expert_of_pair * pairs + index
        place_of = (key[None] < key[:, None]).sum(1, dtype=torch.int32)
        is_at = place_of[None] == index[:, None]
        return torch.where(is_at, index, torch.zeros_like(index)).sum(1, dtype=torch.int32), place_of
    pair_at = expert_of_pair.sort()[1] + 0  # an index that is one of several results of a node aborts torch_xla 2.9
    return pair_at, torch.zeros_like(index).scatter(0, pair_at, index)


def _product(given: Tensors, prefix: str, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    scale, zero_point, bias = (given.get(f"{prefix}_{name}") for name in ("scale", "zero_point", "bias"))
    out: torch.Tensor = torch.ops.xla_gpu.grouped_linear(
        x, given[f"{prefix}_weight"], sizes, weight_scale=scale, weight_zero_point=zero_point, bias=bias
    )
    return out


def _activated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    if activation != "swigluoai_and_mul":
        out: torch.Tensor = getattr(torch.ops.xla_gpu, activation)(hidden)
        return out
    return swigluoai_and_mul(*hidden.chunk(2, -1))


def swigluoai_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of two tensors of one dtype and shape, in float32 and rounded to their dtype."""
    dtype, limit = gate.dtype, declaration.SWIGLU_LIMIT
    gate, up = gate.float(), up.float()
    # clamp makes a number of NaN on torch_xla.
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up > limit, limit, up)
    up = torch.where(up < -limit, -limit, up)
    return (gate * torch.sigmoid(gate * declaration.SWIGLU_ALPHA) * (up + 1)).to(dtype)


def _weighted_sum(out: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """T[rows, out_features] of out: T[pairs, out_features]; the places in it, and weights, are [rows, top_k]."""
    wide = weights.float()
    lower = None
    if weights.dtype is torch.float32:
        upper = _upper_bits(weights)
        # Of an infinity 0, not NaN.
        wide, lower = upper, torch.where(weights.isinf(), torch.zeros_like(weights), weights - upper)
    total = None  # not 0: XLA leaves out additions to it, which make a 0 of a -0
    for j in range(places.shape[1]):  # a sum along an axis has no order
        chosen = out.index_select(0, places[:, j]).float()
        # Each product is a float32 number: fused with the addition it is the same.
        if lower is not None:  # which may be 0: infinities are left to the upper part
            finite = torch.where(chosen.isinf(), 0.0, chosen)
            total = _plus_product(total, finite, lower[:, j, None])
        total = _plus_product(total, chosen, wide[:, j, None])
    assert total is not None
    return total.to(out.dtype)


def _plus_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b if total is None else total.addcmul(a, b)


def _upper_bits(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type == "xla":
        return float_bits.with_bits(weights, declaration.UPPER_BITS)
    return (weights.view(torch.int32) & declaration.UPPER_BITS).view(torch.float32)
