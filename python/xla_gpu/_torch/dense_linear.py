"""linear for many rows: PyTorch's own matrix product, on eager, lazy and compiled tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from .._core import packed_int4
from ..ops.linear import GROUP


def linear(operands: Mapping[str, torch.Tensor], activation: str | None) -> torch.Tensor:
    """See ops/linear.py; the operands, by name, have been checked."""
    x, scale, bias = operands["x"], operands.get("weight_scale"), operands.get("bias")
    weight, row_scale = dequantized(x.dtype, operands["weight"], scale, operands.get("weight_zero_point"))
    if row_scale is None:
        out = functional.linear(x, weight, bias)
    else:
        sums = functional.linear(x, weight).float() * row_scale
        out = (sums if bias is None else sums + bias.float()).to(x.dtype)
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        gate = gate.float()  # PyTorch's own functions compute in float32; those of torch_xla do not
        gate = functional.silu(gate) if activation == "silu_and_mul" else functional.gelu(gate, approximate="tanh")
        out = gate.to(x.dtype) * up
    residual = operands.get("residual")
    return out if residual is None else out + residual


def dequantized(
    dtype: torch.dtype, weight: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight in ``dtype``, and what scales its rows, float32[n] or float32[1], if that is not in it yet."""
    if scale is None:
        return weight, None
    if weight.dtype is torch.uint8:
        values = packed_int4.unpack(weight, torch.stack).to(torch.float32).reshape(*scale.shape, GROUP)
        offsets = 8.0 if zero_point is None else _valid(zero_point)[:, :, None]
        return ((values - offsets) * scale.float()[:, :, None]).reshape(weight.shape[0], -1).to(dtype), None
    if scale.dim() == 1:
        if dtype is torch.float16:  # sums of stored values, which are larger by 1 / scale, may be too large for it
            return (weight.float() * scale[:, None]).to(dtype), None
        return weight.to(dtype), scale
    scales = scale.repeat_interleave(GROUP, 0)[: weight.shape[0]].repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return (weight.float() * scales).to(dtype), None


def _valid(zero_point: torch.Tensor) -> torch.Tensor:
    """float32, NaN for what is no zero point, as the kernel has it."""
    return torch.where(zero_point > 127, torch.nan, zero_point.to(torch.float32))
