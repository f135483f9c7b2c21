"""Attention within images of any size, whose queries and keys are turned by the patches' lines and columns."""

from __future__ import annotations

import torch

import xla_gpu.torch as xg

from .attention import BatchMetadata


def rotary_angles(theta: float, numbers: torch.Tensor, size: int) -> torch.Tensor:
    """float32[n], how far each of the pairs int[n] of ``size`` numbers is turned by one line or column."""
    return 1.0 / (theta ** (numbers.float() / size))


def attended(
    qkv: torch.Tensor, num_heads: int, sequences: BatchMetadata, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """T[num_patches, num_heads * head_size], each patch's attention to all of its sequence.

    Args:
      qkv: T[num_patches, 3 * num_heads * head_size].
      num_heads: of each.
      sequences: which rows are one.
      cos: float32[num_patches, head_size / 2], by which pairs are turned, whose second half is head_size / 2 behind.
      sin: float32[num_patches, head_size / 2].
    """
    query, key, value = (part.contiguous() for part in qkv.reshape(len(qkv), 3, num_heads, -1).unbind(1))
    out = xg.bidirectional_attention(
        _turned(query, cos, sin),
        _turned(key, cos, sin),
        value,
        sequences.query_start_loc,
        sequences.num_seqs,
        scale=query.shape[-1] ** -0.5,
    )
    return out.reshape(len(qkv), -1)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """T[num_patches, num_heads, head_size], each pair of a head turned, in float32."""
    first, second = heads.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)
