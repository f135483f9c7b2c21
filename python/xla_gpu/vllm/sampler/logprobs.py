"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

import torch

import xla_gpu.torch as xg

from .. import tensor_parallel


def gather(scores: torch.Tensor, tokens: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of the chosen token and of the ``num_top`` highest, and the chosen one's rank.

    Args:
      scores: float32[rows, vocab_size]: log-probabilities, or logits where vLLM's logprobs_mode says so.
      tokens: int32[rows], the chosen ones.
      num_top: how many of the highest.

    Returns:
      (token ids int32[rows, num_top + 1], scores float32[rows, num_top + 1], rank int32[rows], from 1): the chosen
      token first, then the highest in order.
    """
    vocabulary = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    chosen = torch.where(vocabulary == tokens[:, None], scores, torch.full_like(scores, float("-inf"))).amax(
        -1, keepdim=True
    )
    rank = (scores >= chosen).to(torch.int32).sum(-1, dtype=torch.int32)
    if num_top == 0:
        return tokens[:, None], chosen, rank
    top, ids = torch.topk(scores if tensor_parallel.active() is None else _row_major(scores), num_top, dim=-1)
    return torch.cat([tokens[:, None], ids.to(torch.int32)], 1), torch.cat([chosen, top], 1), rank


def _row_major(scores: torch.Tensor) -> torch.Tensor:
    """The same, row-major in memory.

    XLA makes ``topk`` a call of its own kernel, which reads rows, and does not say so to its assignment of layouts
    (jaxlib 0.11.2's CUDA plug-in, ``__gpu$TopK``). What is gathered from several devices along a row has the other
    order, so that other tokens and scores were found. Operands and results of this library's calls are row-major.
    """
    half = scores * 0.5
    return xg.simple_add(half, half)
