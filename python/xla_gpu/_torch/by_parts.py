"""Operators that chain the kernels of others: by those, one after the other, where the rows are many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._core.operator import OpCall
from ..ops import attention_block as attention
from ..ops import linear
from .dispatch import Results, run


def gated_mlp(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    """See ops/gated_mlp.py; the arguments have been checked."""
    if linear.uses_kernel(call):
        return run(call, tensors)
    return (differentiable_gated_mlp(arguments),)


def differentiable_gated_mlp(arguments: Mapping[str, Any]) -> torch.Tensor:
    """The operators that gated_mlp is made of, each with its gradient, for any number of rows."""
    hidden = _product(arguments, "gate_up", _norm(arguments), activation=arguments.get("activation", "silu_and_mul"))
    return _product(arguments, "down", hidden, residual=arguments.get("residual"))


def attention_block(
    call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any], in_place: bool = False
) -> Results:
    """See ops/attention_block.py; the arguments have been checked."""
    if attention.uses_kernels(call):
        return run(call, tensors, in_place)

    # The middle is one call, which looks at all values before it writes any.
    middle = {name: value for name, value in arguments.items() if name not in attention.OF_PRODUCTS}
    middle |= {"x": _product(arguments, "qkv", _norm(arguments)), "qkv_weight": None, "out_weight": None}
    if in_place:
        attended, cache = torch.ops.xla_gpu.attention_block_(**middle), arguments["kv_cache"]
    else:
        attended, cache = torch.ops.xla_gpu.attention_block(**middle)
    return _product(arguments, "out", attended, residual=arguments.get("residual")), cache


def _norm(given: Mapping[str, Any]) -> torch.Tensor:
    """x, normed where there is a weight for it."""
    x, weight = given["x"], given.get("norm_weight")
    if weight is None:
        return x
    options = {name: given[name] for name in ("weight_offset", "round_once") if name in given}
    return torch.ops.xla_gpu.rms_norm(x, weight, eps=given.get("eps", 1e-6), **options)[0]


def _product(given: Mapping[str, Any], prefix: str, x: torch.Tensor, **options: Any) -> torch.Tensor:
    if given[f"{prefix}_weight"] is None:
        return x
    scale, zero_point, bias = (given.get(f"{prefix}_{name}") for name in ("scale", "zero_point", "bias"))
    return torch.ops.xla_gpu.linear(
        x, given[f"{prefix}_weight"], weight_scale=scale, weight_zero_point=zero_point, bias=bias, **options
    )
