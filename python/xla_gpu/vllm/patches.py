"""Images of any size as patches (Qwen-VL, Pixtral): how many a program of the encoder takes, and in which order.

An image is a grid of patches, of which a square makes one token. Layers with windows attend within squares of tokens,
so that the patches of each stand one behind the other; the others attend to all of the image.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import buckets, images
from .images import Image
from .options import Options
from .step_layout import Int32Array, unpack

# Frames, at most, that a launch of the encoder takes.
MOST_FRAMES = 8

# Processors of videos, for which a number of pixels is that of all frames.
_OF_ALL_FRAMES = ("Qwen3VLVideoProcessor",)

# Tokens of the smallest program: an image of 448 x 448 pixels. Larger ones have twice as many each.
_LEAST_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class PatchForm:
    """What the encoder's configuration says of images.

    Attributes:
      merged: patches of a token.
      values: numbers of a patch.
      pixels: of an image, which have a token.
      window: tokens on each side of a window; 0: layers have none.
      side: of the square of learned positions, which an image's are interpolated between; 0: there are none.
      cut: pixels on each side of a patch, where the processor leaves images whole; 0: it cuts them.
    """

    merged: int
    values: int
    pixels: int
    window: int
    side: int = 0
    cut: int = 0

    @classmethod
    def of(cls, model: Any) -> PatchForm:
        """model: vLLM's ModelConfig."""
        vision = model.hf_config.vision_config
        size = int(vision.patch_size)
        if images.has_lines(model):
            side = int(getattr(model.hf_config, "spatial_merge_size", 1))
            return cls(side * side, int(vision.num_channels) * size * size, (side * size) ** 2, window=0, cut=size)
        side = int(vision.spatial_merge_size)
        values = int(vision.in_channels) * int(vision.temporal_patch_size) * size * size
        window = int(getattr(vision, "window_size", 0)) // (side * size)
        learned = math.isqrt(int(getattr(vision, "num_position_embeddings", 0)))
        return cls(side * side, values, (side * size) ** 2, window, learned)


@dataclasses.dataclass(frozen=True)
class Frame:
    """An image, or two frames of a video, which make patches together: what patches attend to.

    Attributes:
      pixels: float32[lines * columns, values], patches: those of a token together, and tokens by lines.
      lines: of patches.
      columns: of patches.
      rows: int32[tokens], where the row of each goes.
    """

    pixels: Any
    lines: int
    columns: int
    rows: Int32Array


@dataclasses.dataclass(frozen=True)
class PatchLayout:
    """The static shape of a launch: one array of integers beside the patches.

    Attributes:
      num_tokens: of all of its images.
      form: of patches.
    """

    num_tokens: int
    form: PatchForm

    @property
    def num_patches(self) -> int:
        """Of all of its images."""
        return self.num_tokens * self.form.merged

    @property
    def max_windows(self) -> int:
        """No images have more: one of h by w tokens has up to (h + s - 1) * (w + s - 1) / s**2, and h + w <= hw + 1."""
        if not (side := self.form.window):
            return MOST_FRAMES
        return (self.num_tokens + MOST_FRAMES * (side - 1)) // side

    @functools.cached_property
    def fields(self) -> dict[str, int]:
        """Lengths of the parts, in the order in which they stand in the array."""
        return {
            # Of each patch:
            "lines": self.num_patches,
            "columns": self.num_patches,
            # And the last line and column of its image:
            **({"last_lines": self.num_patches, "last_columns": self.num_patches} if self.form.side else {}),
            # Of each token, the row of all images' that it goes to:
            "places": self.num_tokens,
            "image_starts": MOST_FRAMES + 1,
            "num_images": 1,
            **({"window_starts": self.max_windows + 1, "num_windows": 1} if self.form.window else {}),
        }

    def pack(self, found: Sequence[Frame], unused_row: int) -> tuple[Any, Int32Array]:
        """Patches float32[num_patches, values] and the array of some frames.

        Args:
          found: of num_tokens tokens at most.
          unused_row: where the rows of padding go.
        """
        side = math.isqrt(self.form.merged)
        pixels = np.zeros((self.num_patches, self.form.values), np.float32)
        packed = np.zeros(sum(self.fields.values()), np.int32)
        parts = unpack(packed, self.fields)
        parts["places"][:] = unused_row
        at, windows = 0, [np.zeros(1, np.int32)]
        for index, frame in enumerate(found):
            lines, columns = frame.lines // side, frame.columns // side  # of tokens
            order, ends = window_order((1, lines, columns), self.form.window)
            patches = (order[:, None] * self.form.merged + np.arange(self.form.merged)).reshape(-1)
            here = slice(at, at + len(patches))
            pixels[here] = frame.pixels[patches] if self.form.window else frame.pixels
            parts["lines"][here], parts["columns"][here] = _places_of_patches(lines, columns, side)[:, patches]
            if self.form.side:
                parts["last_lines"][here], parts["last_columns"][here] = frame.lines - 1, frame.columns - 1
            parts["places"][at // self.form.merged :][: len(order)] = frame.rows[order]
            windows.append(ends * self.form.merged + at)
            at += len(patches)
            parts["image_starts"][index + 1 :] = at
        parts["num_images"][0] = len(found)
        if self.form.window:
            starts = np.concatenate(windows)
            parts["window_starts"][:] = at
            parts["window_starts"][: len(starts)] = starts
            parts["num_windows"][0] = len(starts) - 1
        return pixels, packed


def frames_of(image: Image, rows: Int32Array, form: PatchForm) -> list[Frame]:
    """One of an image, one for each time of a video; rows: where those of its tokens go."""
    name = next(name for name in ("pixel_values", "pixel_values_videos") if name in image.data)
    pixels = image.data[name].data.float().numpy()
    if form.cut:
        _, height, width = pixels.shape
        return [Frame(_cut(pixels, form), height // form.cut, width // form.cut, rows)]
    times, lines, columns = image.grid
    each = zip(np.split(pixels, times), np.split(rows, times), strict=True)
    return [Frame(own, lines, columns, own_rows) for own, own_rows in each]


def window_order(grid: tuple[int, int, int], side: int) -> tuple[Int32Array, Int32Array]:
    """The tokens of a grid in the order of windows, and where each window ends in it.

    Args:
      grid: times, lines and columns of tokens.
      side: tokens on each side of a window; 0: there is one.
    """
    times, lines, columns = np.indices(grid, np.int32).reshape(3, -1)
    if not side:
        return np.arange(len(times), dtype=np.int32), np.full(1, len(times), np.int32)
    high, wide = (-(-size // side) for size in grid[1:])
    windows = (times * high + lines // side) * wide + columns // side
    order = np.argsort(windows, kind="stable").astype(np.int32)
    return order, np.cumsum(np.bincount(windows), dtype=np.int32)


def _places_of_patches(lines: int, columns: int, side: int) -> Int32Array:
    """int32[2, n], line and column of each patch, of tokens of ``side`` by ``side``, by the tokens' lines."""
    of_tokens = np.indices((lines, columns), np.int32).reshape(2, -1, 1) * side
    within = np.indices((side, side), np.int32).reshape(2, 1, -1)
    return (of_tokens + within).reshape(2, -1)


def _cut(pixels: Any, form: PatchForm) -> Any:
    """float32[n, values], the patches of float32[channels, height, width] in the order of Frame."""
    side = math.isqrt(form.merged)
    lines, columns = (size // (side * form.cut) for size in pixels.shape[1:])
    cut = pixels.reshape(-1, lines, side, form.cut, columns, side, form.cut)
    return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(lines * columns * form.merged, form.values)


def most_tokens(config: Any, num_rows: int) -> int:
    """Tokens of the largest image, or time of a video, that requests of a VllmConfig may have.

    That is what the processors make them of, unless ``--max-model-len`` or ``num_rows``, the rows that the scheduler
    has for images, are less.
    """
    from vllm.transformers_utils.processor import (
        cached_image_processor_from_config,
        cached_video_processor_from_config,
    )

    model = config.model_config
    form = PatchForm.of(model)
    if form.cut:
        largest = (-(-int(model.hf_config.vision_config.image_size) // math.isqrt(form.pixels))) ** 2
    else:
        processor = cached_image_processor_from_config(model)
        pixels = int(processor.max_pixels or processor.size["longest_edge"])
        if images.takes_videos(model):
            # Qwen 3 VL's is for all frames together, of which there are two or more.
            frames = 2 if type(processor := cached_video_processor_from_config(model)).__name__ in _OF_ALL_FRAMES else 1
            pixels = max(pixels, int(processor.size["longest_edge"]) // frames)
        largest = max(pixels // form.pixels, 1)
    return min(largest, int(model.max_model_len), num_rows)


def token_buckets(config: Any, num_rows: int) -> list[int]:
    """Numbers of tokens that the encoder's programs are compiled for; the arguments are those of ``most_tokens``."""
    most = most_tokens(config, num_rows)
    chosen = Options.of(config).encoder_buckets
    sizes = [size for size in buckets.powers_of_two(most) if size >= _LEAST_TOKENS] if chosen is None else chosen
    return sorted({size for size in sizes if size < most} | {most})


def launches(found: Sequence[Frame], most: int) -> list[list[Frame]]:
    """Frames that go through the encoder together, of up to ``most`` tokens, in their order.

    Raises:
      RuntimeError: one has more.
    """
    together: list[list[Frame]] = []
    room = 0
    for frame in found:
        count = len(frame.rows)
        if count > most:
            raise RuntimeError(f"xla_gpu.vllm: an image of {count} tokens: expected at most {most}")
        if count > room or len(together[-1]) == MOST_FRAMES:
            together.append([])
            room = most
        together[-1].append(frame)
        room -= count
    return together
