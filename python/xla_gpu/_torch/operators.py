"""The definitions of the operators in torch.ops.xla_gpu, and what PyTorch needs beyond their declarations."""

from __future__ import annotations

from typing import Any

import torch

from .._core.operator import OpCall
from ..ops import OPERATORS, ragged_paged_attention
from . import reference
from .dispatch import Results, define_operator, run
from .tensors import check_operands

# ---- ragged_paged_attention: numbers where paged_attention takes tensors ---------------------------------------------


def _ragged(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    k_scale, v_scale = (ragged_paged_attention.number(name, arguments.get(name)) for name in ("k_scale", "v_scale"))
    if not arguments.get("use_kernel", True):
        check_operands(call.name, call.operand_names[: len(tensors)], tensors)
        out = reference.ragged_paged_attention(
            *tensors,
            sm_scale=arguments.get("sm_scale", 1.0),
            sliding_window=arguments.get("sliding_window"),
            soft_cap=arguments.get("soft_cap"),
            k_scale=k_scale,
            v_scale=v_scale,
        )
    elif call.operands[len(tensors) :]:  # a float8 cache: the handler applies the scales
        device = tensors[0].device
        scales = [torch.full((1,), scale, dtype=torch.float32, device=device) for scale in (k_scale, v_scale)]
        (out,) = run(call, [*tensors, *scales])
    else:
        (out,) = run(call, tensors)  # k_scale is a factor of scale already
        if v_scale != 1.0:
            out = (out.float() * v_scale).to(out.dtype)
    return (out,)


for _operator in OPERATORS:
    define_operator(_operator)
define_operator(ragged_paged_attention.OPERATOR, _ragged)
