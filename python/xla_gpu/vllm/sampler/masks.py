"""Sets of allowed tokens, one bit each: structured output's bitmask and allowed_token_ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Bitmask = npt.NDArray[np.int32]


def words(vocab_size: int) -> int:
    """How many int32 words a row has."""
    return -(-vocab_size // 32)


def all_allowed(rows: int, vocab_size: int) -> Bitmask:
    """A bitmask that allows every token."""
    return np.full((rows, words(vocab_size)), -1, np.int32)


def only(token_ids: Sequence[int], vocab_size: int) -> Bitmask:
    """One row that allows those of ``token_ids`` that the vocabulary has."""
    bits = np.zeros(words(vocab_size) * 32, np.uint8)
    tokens = np.asarray(token_ids)
    bits[tokens[(tokens >= 0) & (tokens < vocab_size)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def apply(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """The logits T[rows, vocab_size] with -inf where the bit of int32[rows, words] is 0."""
    rows, vocab_size = logits.shape
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    # Not >>, which torch_xla lowers to a division, wrong for negative words.
    bits = torch.bitwise_right_shift(bitmask[:, :, None], shifts) & 1
    allowed = bits.reshape(rows, -1)[:, :vocab_size] > 0
    return torch.where(allowed, logits, torch.full_like(logits, float("-inf")))
