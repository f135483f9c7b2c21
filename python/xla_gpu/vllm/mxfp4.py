"""Numbers in mxfp4, as gpt-oss has its experts: floats of 4 bits, each 32 with one power of two as their scale."""

from __future__ import annotations

import torch

# Numbers with a scale of their own.
GROUP = 32

# Holds every power of two that a checkpoint's byte does but the least, 2^-127, which is 0 here.
SCALE = torch.bfloat16


def dequantized(dtype: torch.dtype, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """T[..., k] of uint8[..., k / 2], the number of even index in the lower half, and SCALE[..., k / 32]."""
    half = (scale.float() * 0.5)[..., None]
    grouped = packed.reshape(*scale.shape, GROUP // 2)
    pairs = [(_twice(codes) * half).to(dtype) for codes in (grouped & 15, grouped >> 4)]
    return torch.stack(pairs, -1).reshape(*packed.shape[:-1], -1)


def _twice(codes: torch.Tensor) -> torch.Tensor:
    """float32, twice the numbers: 0, 1, 2, 3, 4, 6, 8, 12, and their negatives."""
    codes = codes.to(torch.int32)
    size = codes & 7
    values = torch.where(size < 4, size, torch.where(size < 6, 2 * size - 4, 4 * size - 16))
    return torch.where(codes > 7, -values, values).to(torch.float32)


def scales(stored: torch.Tensor) -> torch.Tensor:
    """SCALE of a checkpoint's bytes, exponents of 2 with 127 added."""
    return (stored.to(torch.int16) << 7).view(SCALE)
