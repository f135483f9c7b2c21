"""The logits that min-p, top-k and top-p keep, for requests that ask for scores after them: without a sort.

Tokens are drawn by this library's ``sample``, which keeps the same.

Each keeps the tokens whose weight is at least some threshold. A threshold is found by its bits: float32 numbers from 0
to 1 are ordered as their bits are as integers. Four bits a pass, 15 candidates, make 8 passes over the weights; each is
a sum over the vocabulary, out of the cache for the most part. A large vocabulary is never sorted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _from_bits(bits: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """The float32 numbers with these bits, int32 below 2**30; subnormal ones are 0.

    torch_xla has no reinterpreting view. ``powers``: float32[128], 2 to the power of index - 127.
    """
    exponent = torch.bitwise_right_shift(bits, 23).clamp(max=127)
    power = powers.index_select(0, exponent.reshape(-1)).reshape(bits.shape)
    value = (1.0 + (bits & 0x7FFFFF).float() * 2.0**-23) * power
    return torch.where(exponent > 0, value, torch.zeros_like(value))


def _largest_threshold(weights: torch.Tensor, enough: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """For each row the largest threshold t with ``enough(weights >= t)``, float32[rows, 1]; 0 where there is none.

    Args:
      weights: float32[rows, vocab_size] from 0 to 1.
      enough: bool[rows, candidates] from the masks of kept tokens, bool[rows, candidates, vocab_size]; where it is true
        of a threshold, so it is of every lower one.
    """
    device = weights.device
    powers = (2.0 ** torch.arange(-127, 1, dtype=torch.float64)).float().to(device)
    threshold = torch.zeros(weights.shape[0], 1, dtype=torch.int32, device=device)
    for shift in range(28, -1, -4):
        # The numbers have 30 bits, so that the first pass has two.
        digits = torch.arange(1, 4 if shift == 28 else 16, dtype=torch.int32, device=device)
        candidates = _from_bits(threshold | (digits << shift), powers)
        reached = enough(weights[:, None, :] >= candidates[:, :, None]).to(torch.int32)
        threshold = threshold | (reached.sum(-1, keepdim=True, dtype=torch.int32) << shift)
    return _from_bits(threshold, powers)


def truncate(logits: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits with -inf where min-p, then top-k, then top-p rule a token out. The most likely token always stays.

    Tokens as likely as the last one kept are kept too.

    Args:
      logits: float32[rows, vocab_size], divided by the temperature.
      min_p: float32[rows], relative to the most likely token; 0: off.
      top_k: int32[rows], the vocabulary's size: off.
      top_p: float32[rows], 1: off.
    """
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    weights = torch.where(weights >= min_p[:, None], weights, torch.zeros_like(weights))
    wanted = top_k[:, None]
    kth = _largest_threshold(weights, lambda kept: kept.to(torch.int32).sum(-1, dtype=torch.int32) >= wanted)
    weights = torch.where(weights >= kth, weights, torch.zeros_like(weights))
    mass, kept_weights = top_p[:, None] * weights.sum(-1, keepdim=True), weights[:, None, :]
    last = _largest_threshold(
        weights, lambda kept: torch.where(kept, kept_weights, torch.zeros_like(kept_weights)).sum(-1) >= mass
    )
    # The sum of all weights, in another order, may fall short of the sum that mass was made of.
    last = torch.where(top_p[:, None] >= 1.0, torch.zeros_like(last), last)
    weights = torch.where(weights >= last, weights, torch.zeros_like(weights))
    return torch.where(weights > 0, logits, torch.full_like(logits, float("-inf")))
