"""Repetition, frequency and presence penalties, and the counts of tokens that they need.

The counts stay on the device, int32[max_seqs + 1, vocab_size] by request slot: how often the token was sampled, and in
bit 30 whether the prompt has it. The row of a request is made when it gets its slot and follows each sampled token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

IN_PROMPT = 1 << 30

# Entries that one call of the load program stores.
MAX_ENTRIES = 2048


def history(token_ids: npt.NDArray[np.int32], num_prompt: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The tokens of a request, each once, and the value that its row of counts has for them."""
    sampled, counts = np.unique(token_ids[num_prompt:], return_counts=True)
    prompt = np.unique(token_ids[:num_prompt])
    tokens = np.union1d(prompt, sampled)
    values = np.zeros(len(tokens), np.int32)
    values[np.searchsorted(tokens, sampled)] = counts
    values[np.searchsorted(tokens, prompt)] |= IN_PROMPT
    return tokens.astype(np.int32), values


def load(packed: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """Stores entries of one row of ``counts`` in place; the first call for a row clears it.

    Args:
      packed: int32[2 + 2 * MAX_ENTRIES]: the row, whether to clear it, tokens and values; padding repeats an entry.
      counts: int32[max_seqs + 1, vocab_size].
    """
    row, clear = packed[0:1], packed[1:2]
    tokens, values = packed[2 : 2 + MAX_ENTRIES], packed[2 + MAX_ENTRIES :]
    new = counts.index_select(0, row)[0]
    new = torch.where(clear > 0, torch.zeros_like(new), new)
    new = new.index_put((tokens,), values)
    counts.index_put_((row,), new[None])
    return []


def apply(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """The logits float32[rows, vocab_size] with penalties float32[rows]; counts: int32[rows, vocab_size]."""
    sampled = counts & (IN_PROMPT - 1)
    factor = torch.where(counts > 0, repetition[:, None], torch.ones_like(logits))
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * sampled.float() - presence[:, None] * (sampled > 0).float()


def count(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds one sampled token to each of ``rows``, in place; padding goes to the row that nobody has."""
    counts.index_put_((rows, tokens), torch.ones_like(tokens), accumulate=True)
