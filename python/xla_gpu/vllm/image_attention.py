"""Attention of the tokens of an image to each other, whichever comes first (Gemma 3).

Attention to what is before a token is xla_gpu.torch.paged_attention's. What is added to it here is that to the tokens
behind it in its own image. An image is read whole, so that all of these stand in the step, in rows close by.
"""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class ImageBlocks:
    """Which rows of a step attend to each other.

    Attributes:
      runs: int32[num_tokens], equal for rows that do, which stand one behind the other; -1: none.
      most: rows of a run, at most.
    """

    runs: torch.Tensor
    most: int

    def attend_behind(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each row to those of its run that are behind it.

        Rows are cut into pieces as long as the longest run. What is behind a row of one stands in it or in the next.

        Args:
          query: T[num_tokens, num_heads, head_size].
          kv_cache: of the layer, in which the step's keys and values are stored.
          slot_mapping: int32[num_tokens], where; -1: padding.
          scale: of xla_gpu.torch.paged_attention, as the following.
          soft_cap: None: off.
          k_scale: float32[1], of a float8 cache.
          v_scale: float32[1], of a float8 cache.

        Returns:
          T[num_tokens, num_heads, head_size] and float32[num_tokens, num_heads], as paged_attention_with_lse does.
        """
        num_tokens, num_heads, head_size = query.shape
        size = min(self.most, num_tokens)
        pieces = -(-num_tokens // size)
        padding = pieces * size - num_tokens
        stored = kv_cache.flatten(0, 1).index_select(0, slot_mapping.clamp(min=0)).float()
        num_kv_heads = stored.shape[1] // 2
        stored = stored.reshape(num_tokens, num_kv_heads, 2, head_size)
        key, value = stored[:, :, 0], stored[:, :, 1]
        if k_scale is not None and v_scale is not None:
            key, value = key * k_scale, value * v_scale

        pairs = functools.partial(_pairs, size=size, pieces=pieces)
        runs = pairs(self.runs, -1)
        numbers = torch.arange(2 * size, dtype=torch.int32, device=query.device)
        seen = (runs[:, :size, None] == runs[:, None]) & (runs[:, None] >= 0) & (numbers[:size, None] < numbers)
        group = num_heads // num_kv_heads
        ends = query.new_zeros(padding, num_heads, head_size)
        cut = torch.cat([query, ends]).float().reshape(pieces, size, num_kv_heads, group, head_size)
        scores = cut.permute(0, 2, 3, 1, 4).flatten(2, 3) @ pairs(key, 0.0).permute(0, 2, 3, 1) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        # [pieces, num_kv_heads, group, size, 2 * size]
        scores = scores.reshape(pieces, num_kv_heads, group, size, 2 * size)
        weights, total, largest = _softmax(torch.where(seen[:, None, None], scores, float("-inf")))
        out = weights.flatten(2, 3) @ pairs(value, 0.0).permute(0, 2, 1, 3)
        out = out.reshape(pieces, num_kv_heads, group, size, head_size) / torch.where(total == 0.0, 1.0, total)
        lse = (total.log() + largest)[..., 0]
        out = out.permute(0, 3, 1, 2, 4).reshape(pieces * size, num_heads, head_size)[:num_tokens]
        lse = lse.permute(0, 3, 1, 2).reshape(pieces * size, num_heads)[:num_tokens]
        return out.to(query.dtype), lse


def _pairs(rows: torch.Tensor, unused: float, *, size: int, pieces: int) -> torch.Tensor:
    """[pieces, 2 * size, ...] of rows [num_tokens, ...]: each piece of ``size`` rows, and the one behind it."""
    end = rows.new_full(((pieces + 1) * size - len(rows), *rows.shape[1:]), unused)
    cut = torch.cat([rows, end]).reshape(pieces + 1, size, *rows.shape[1:])
    return torch.cat([cut[:-1], cut[1:]], 1)


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, their sum, and the score whose weight is 1, along the last axis; of -inf alone: zeros."""
    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    weights = (scores - largest).exp()
    return weights, weights.sum(-1, keepdim=True), largest
