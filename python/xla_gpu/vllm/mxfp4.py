"""Numbers in mxfp4, as gpt-oss has its experts: floats of 4 bits, each 32 with one power of two as their scale."""

from __future__ import annotations

import torch

# Numbers with a scale of their own.
GROUP = 32

# Exponents of 2 with 127 added, as in checkpoints.
SCALE = torch.uint8


def dequantized(dtype: torch.dtype, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """T[..., k] of uint8[..., k / 2], the number of even index in the lower half, and SCALE[..., k / 32]."""
    half = (powers(scale) * 0.5)[..., None]
    grouped = packed.reshape(*scale.shape, GROUP // 2)
    pairs = [(_twice(codes) * half).to(dtype) for codes in (grouped & 15, grouped >> 4)]
    return torch.stack(pairs, -1).reshape(*packed.shape[:-1], -1)


def _twice(codes: torch.Tensor) -> torch.Tensor:
    """float32, twice the numbers: 0, 1, 2, 3, 4, 6, 8, 12, and their negatives."""
    codes = codes.to(torch.int32)
    size = codes & 7
    values = torch.where(size < 4, size, torch.where(size < 6, 2 * size - 4, 4 * size - 16))
    return torch.where(codes > 7, -values, values).to(torch.float32)


def powers(scale: torch.Tensor) -> torch.Tensor:
    """float32 of SCALE, exactly; of the least byte, 2^-127, it may be 0."""
    exponent = scale.to(torch.int32) - 127
    magnitude, is_large, one = exponent.abs(), exponent > 0, torch.ones_like(exponent, dtype=torch.float32)
    power = one
    for bit in range(7):  # neither exp2 nor pow is exact on every device
        has_bit = (magnitude >> bit & 1) == 1
        factor = torch.where(is_large, one * 2.0 ** (1 << bit), one * 0.5 ** (1 << bit))
        power = power * torch.where(has_bit, factor, one)
    return power
