"""The operators in PyTorch's own operations, without a kernel."""

from __future__ import annotations

from typing import Any

import torch

from .._core import ragged_reference


def ragged_paged_attention(q: torch.Tensor, kv_pages: torch.Tensor, *operands: torch.Tensor, **options: Any) -> Any:
    """See _core/ragged_reference.py."""
    arrays = ragged_reference.Arrays(
        torch,
        arange=lambda size: torch.arange(size, device=q.device),
        cast=lambda array, dtype: array.to(dtype),
        take=lambda array, indices: array[indices.long()],
    )
    # PyTorch does not index float8.
    return ragged_reference.ragged_paged_attention(arrays, q, kv_pages.float(), *operands, **options)
