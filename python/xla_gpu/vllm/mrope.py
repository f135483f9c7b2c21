"""Rotary positions of Qwen-VL's prompts (M-RoPE): of each token one for its time, its line and its column.

Tokens of text have three equal positions. An image's tokens have their place in its grid, and the text behind goes on
after the largest of them, so that from there on a token's position is its number and a fixed difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .images import Image
from .step_layout import Int32Array

# Time, line and column.
AXES = 3


class RotaryPositions:
    """Of all requests, by their slots in RequestTable."""

    def __init__(self, max_seqs: int, per_second: float = 1.0) -> None:
        """per_second: positions of a video's second."""
        self._per_second = per_second
        # Of each token in front of ``ends``, and what is added to the number of those behind.
        self._of_prompt: list[Int32Array] = [np.empty((AXES, 0), np.int32)] * (max_seqs + 1)
        self._ends, self._differences = np.zeros((2, max_seqs + 1), np.int32)

    def admit(self, slot: int, images: Sequence[Image]) -> None:
        """Notes the images of the request that got ``slot``."""
        self._of_prompt[slot], self._differences[slot] = of_prompt(images, self._per_second)
        self._ends[slot] = self._of_prompt[slot].shape[1]

    def of_rows(self, slots: Int32Array, computed: Int32Array, counts: Int32Array) -> Int32Array:
        """int32[AXES, counts.sum()], of the ``counts[i]`` tokens behind the first ``computed[i]`` of each request."""
        ends = np.cumsum(counts, dtype=np.int32)
        shifts = computed + self._differences[slots] - (ends - counts)
        of_text = np.arange(counts.sum(), dtype=np.int32) + np.repeat(shifts, counts)
        found = np.repeat(of_text[None], AXES, 0)
        for index in np.flatnonzero(computed < self._ends[slots]).tolist():
            begin, first = int(computed[index]), int(ends[index] - counts[index])
            own = self._of_prompt[slots[index]][:, begin : begin + int(counts[index])]
            found[:, first : first + own.shape[1]] = own
        return found

    def of_next(self, slots: Int32Array, computed: Int32Array) -> Int32Array:
        """int32[len(slots)], of one token of text of each request."""
        if (computed < self._ends[slots]).any():
            return np.asarray(self.of_rows(slots, computed, np.ones_like(computed))[0])
        return np.add(computed, self._differences[slots])


def of_prompt(images: Sequence[Image], per_second: float = 1.0) -> tuple[Int32Array, int]:
    """Positions int32[AXES, n] of a prompt's tokens up to the end of its last image, and what is added behind."""
    parts: list[Int32Array] = []
    end = following = 0
    for image in images:
        for begin, sizes in _runs(image):
            text = np.arange(following, following + begin - end, dtype=np.int32)
            following += begin - end
            grid = np.indices(sizes, np.int32).reshape(AXES, -1)
            # In float32, as vLLM and transformers: 0.08 seconds 25 times are 2 there, and less in float64.
            grid[0] = grid[0].astype(np.float32) * np.float32(image.seconds) * np.float32(per_second)
            parts += [np.repeat(text[None], AXES, 0), grid + following]
            following += int(grid.max()) + 1
            end = begin + grid.shape[1]
    return (np.concatenate(parts, 1) if parts else np.empty((AXES, 0), np.int32)), following - end


def _runs(image: Image) -> list[tuple[int, tuple[int, int, int]]]:
    """Where tokens of an image begin that stand one behind the other, and their times, lines and columns.

    A video's are together, or have text between any two of its times, which are images then.
    """
    begins = np.flatnonzero(np.diff(image.positions, prepend=-2) != 1)
    sizes = merged_grid(image)
    if len(begins) > 1:
        sizes = (1, *sizes[1:])
    return [(int(begin), sizes) for begin in image.positions[begins]]


def merged_grid(image: Image) -> tuple[int, int, int]:
    """Times, lines and columns of an image's tokens, each of which is merged from as many lines as columns."""
    times, high, wide = image.grid
    side = math.isqrt(times * high * wide // len(image.positions))
    return times, high // side, wide // side


def table_of_step(
    positions: torch.Tensor, table: torch.Tensor, sections: Sequence[int], interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and table of xla_gpu.torch.rotary_and_cache for a step whose rows have three positions each.

    Args:
      positions: int32[AXES, num_tokens].
      table: float32[max_positions, rotary_dim / 2, 2].
      sections: how many of the pairs are turned by each axis.
      interleaved: in turn, as long as an axis has pairs left and then by the first one; else one axis after the other.
    """
    pairs = torch.arange(table.shape[1], dtype=torch.int32, device=positions.device)[None, :, None]
    found, begin = table.index_select(0, positions[0]), sections[0]
    for axis in range(1, AXES):
        size = sections[axis]
        if interleaved:
            own = (pairs % AXES == axis) & (pairs < AXES * size)
        else:
            own = (pairs >= begin) & (pairs < begin + size)
        found, begin = torch.where(own, table.index_select(0, positions[axis]), found), begin + size
    rows = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
    return rows, found
