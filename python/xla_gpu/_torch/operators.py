"""The definitions of the operators in torch.ops.xla_gpu, and what PyTorch needs beyond their declarations."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._core.operator import OpCall, Operator
from .._torch_xla import device_group
from ..ops import (
    OPERATORS,
    all_reduce,
    attention_block,
    experts_mlp,
    gated_mlp,
    linear,
    ragged_paged_attention,
)
from . import by_parts, dense_linear, gradients, reference
from . import experts_mlp as experts
from .dispatch import Results, bind, define, define_operator, fake_results, run, unpacked
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


# ---- linear: a kernel for few rows, PyTorch's matrix product for many ------------------------------------------------


def _linear(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    if linear.uses_kernel(call):
        return run(call, tensors)
    check_operands(call.name, call.operand_names, tensors)
    return (dense_linear.linear(dict(zip(call.operand_names, tensors, strict=True)), arguments.get("activation")),)


_RUN = {
    linear.OPERATOR: _linear,
    gated_mlp.OPERATOR: by_parts.gated_mlp,
    attention_block.OPERATOR: by_parts.attention_block,
}
for _operator in OPERATORS:
    _differentiate = functools.partial(gradients.call, _operator) if _operator.differentiable else None
    define_operator(_operator, _RUN.get(_operator), _differentiate)
define_operator(ragged_paged_attention.OPERATOR, _ragged)
define_operator(experts_mlp.OPERATOR, experts.run)

# ---- all_reduce over a group of torch_xla's SPMD mesh: the parts of all ranks, one on each device --------------------


def _define_of_parts(operator: Operator) -> None:
    """torch.ops.xla_gpu._<operator>_of_parts, whose group is the index of a _torch_xla.device_group.DeviceGroup."""

    def kernel(x: torch.Tensor, *rest: torch.Tensor, group: int, **options: Any) -> Any:
        return unpacked(device_group.run_on_parts(operator, x, rest, group, options))

    def fake(x: torch.Tensor, *rest: torch.Tensor, group: int, **options: Any) -> Any:
        return unpacked(fake_results(*bind(operator, (x, *rest), options)))

    schema = operator.schema.replace("int group=0", "int group")
    define(f"_{operator.name}_of_parts", schema, kernel, fake, backends=("XLA",))


for _operator in (all_reduce.OPERATOR, all_reduce.OPERATOR_ADD_RMS_NORM):
    _define_of_parts(_operator)
