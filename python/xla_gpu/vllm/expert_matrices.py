"""The matrices of all experts, plain or quantised as they are stored.

quantized_experts.py and mxfp4_experts.py load them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import xla_gpu.torch as xg

from .._torch import dense_linear
from ..ops import grouped_linear
from ..ops.linear import GROUP
from . import mxfp4


def groups_take(dtype: torch.dtype, num_experts: int, n: int, k: int, multiple: int = 16) -> bool:
    """Whether ``grouped_linear`` takes rows of a dtype and matrices [num_experts, n, k]; multiple: what k is to be."""
    sizes_fit = num_experts <= grouped_linear.MAX_GROUPS and n % 16 == 0 and k % multiple == 0
    return dtype in (torch.float16, torch.bfloat16) and sizes_fit


class Matrices(NamedTuple):
    """One matrix of every expert.

    Attributes:
      weight: [num_experts, n, k], stored as ``linear`` stores it: packed int4 is [num_experts, n, k / 2].
      scale: of a quantised weight, as ``linear`` has it, of every expert; one for each row at least. Of mxfp4, which
        ``linear`` has not, uint8[num_experts, n, k / 32].
      zero_point: of int4, likewise.
      bias: [num_experts, n].
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Numbers along k, and rows where scales are of blocks, that must not be divided."""
        if self.scale is None or self.scale.dim() < 3:
            return 1
        return mxfp4.GROUP if self.scale.dtype is mxfp4.SCALE else GROUP

    def takes_groups(self, dtype: torch.dtype) -> bool:
        """Whether ``grouped_linear`` takes it beside rows of a dtype."""
        num_experts, n, stored = self.weight.shape
        packed = self.weight.dtype is torch.uint8
        k = 2 * stored if packed else stored
        scales = {dtype, mxfp4.SCALE} if packed else {torch.float32}
        fits = self.weight.dtype is dtype if self.scale is None else self.scale.dtype in scales
        return fits and groups_take(dtype, num_experts, n, k, self.group if packed else 16)

    def of_groups(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """T[rows, n] of x: T[rows, k] in the order of experts, which have ``sizes`` of the rows; with the bias."""
        return xg.grouped_linear(
            x,
            self.weight,
            sizes,
            weight_scale=self.scale,
            weight_zero_point=self.zero_point,
            bias=None if self.bias is None else self.bias.to(x.dtype),
        )

    def added(self, products: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
        """Products of each expert's, T[count, rows, n], with its bias; ``of``: int[count], None: all."""
        if self.bias is None:
            return products
        bias = self.bias if of is None else self.bias.index_select(0, of)
        return products + bias[:, None].to(products.dtype)

    def values(self, dtype: torch.dtype, of: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """T[count, n, k], and what scales the rows of the products, float32[count, n], if that is not in it yet.

        Args:
          dtype: T.
          of: int[count], experts; None: all.
        """
        parts = self.weight, self.scale, self.zero_point
        weight, scale, zero_point = (part if of is None or part is None else part.index_select(0, of) for part in parts)
        assert weight is not None
        if scale is None:
            return weight, None
        if scale.dtype is mxfp4.SCALE:
            return mxfp4.dequantized(dtype, weight, scale), None
        count, n = weight.shape[:2]
        zeros = None if zero_point is None else zero_point.flatten(0, 1)
        made, scale = dense_linear.dequantized(dtype, weight.flatten(0, 1), scale.flatten(0, 1), zeros)
        return made.view(count, n, -1), None if scale is None else scale.view(count, n)
