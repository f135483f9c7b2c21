"""Random numbers that depend on nothing but a request's seed, the token's number and the vocabulary entry.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in int32
arithmetic that wraps: the same numbers on every device, whatever else is in the batch.
"""

from __future__ import annotations

import torch

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    # A right shift of a signed integer fills with the sign. Not >>, which torch_xla lowers to a division.
    return (x << bits) | (torch.bitwise_right_shift(x, 32 - bits) & ((1 << bits) - 1))


def threefry_2x32(
    key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 tensors of random bits; key and counter are int32 tensors that broadcast against each other."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x = x + y
            y = _rotate_left(y, bits) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + (group + 1)
    return x, y


def gumbel_noise(
    seed_low: torch.Tensor, seed_high: torch.Tensor, number: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Gumbel noise float32[rows, vocab_size]: argmax(logits + noise) draws from softmax(logits).

    Args:
      seed_low: int32[rows], the lower half of each request's seed.
      seed_high: int32[rows], the upper half.
      number: int32[rows], how many tokens the request has sampled before.
      vocab_size: tokens of the vocabulary.
    """
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=number.device)[None, :]
    bits, _ = threefry_2x32((seed_low[:, None], seed_high[:, None]), (tokens, number[:, None]))
    # 24 random bits, centred in their interval: float32 holds them, and 0 and 1 cannot occur.
    uniform = ((torch.bitwise_right_shift(bits, 8) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))
