"""Bits of floats in the lazy graph: torch_xla computes ``view`` as another dtype on the host, and would wait for it."""

from __future__ import annotations

import functools
from typing import Any

import torch


def with_bits(x: torch.Tensor, mask: int) -> torch.Tensor:
    """float32 numbers with the bits of their representation that an int32 ``mask`` keeps."""
    out: torch.Tensor = _masked()(x, mask=mask)
    return out


@functools.cache
def _masked() -> Any:
    from torch_xla.core import xla_builder, xla_op_registry

    def masked(x: Any, mask: int) -> Any:
        bits = x.bitcast(xla_builder.Type.S32)
        return (bits & bits.scalar_like(mask)).bitcast(xla_builder.Type.F32)

    return xla_op_registry.register("xla_gpu_with_bits", masked)
