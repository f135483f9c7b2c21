"""The encoder of images of any size: programs for some numbers of patches.

The layers are vLLM's, see qwen_tower.py and pixtral_tower.py; what goes through them is one row for each patch of
several images, and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from . import buckets, images, patches
from .image_rows import ImageRows
from .images import Image
from .patches import Frame, PatchForm, PatchLayout, frames_of
from .pixtral_tower import PixtralTower
from .program import Program
from .qwen_tower import QwenTower
from .step_layout import unpack


class PatchEncoder(ImageRows):
    """Of images that are grids of patches, and of videos, each of whose times is as an image."""

    _PARTS = "patches"

    def __init__(self, config: VllmConfig, tower: Any, device: torch.device) -> None:
        """tower: vLLM's model without its language model, on the device."""
        super().__init__(config, None, device)
        self._form = PatchForm.of(self._model)
        layers = PixtralTower if images.has_lines(self._model) else QwenTower
        self._tower: PixtralTower | QwenTower = layers(self._model.hf_config, tower, self._form)
        sizes = patches.token_buckets(config, images.most_rows(config))
        self._layouts = {size: PatchLayout(size, self._form) for size in sizes}
        self._programs: dict[int, Program] = {}

    def compile(self) -> None:
        """Compiles the programs."""
        for size, layout in self._layouts.items():

            def encode(
                pixels: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor, layout: PatchLayout = layout
            ) -> list[torch.Tensor]:
                parts = unpack(packed, layout.fields)
                features = self._tower.features(pixels.to(rows.dtype), parts)
                rows.index_put_((parts["places"],), features.to(rows.dtype))
                return []

            inputs = [torch.from_numpy(array).to(self._device) for array in layout.pack([], self._unused_row)]
            self._programs[size] = Program(f"images, {size} tokens", encode, inputs, [self.rows])

    def start(self) -> None:
        """Runs each program once: from then on ``rows`` is none that the programs were made with."""
        for size in self._layouts:
            self._launch(size, [])

    def _encode(self, found: Sequence[Image]) -> None:
        frames = []
        for image in found:
            count = len(image.positions)
            rows = self._take(image, np.arange(count, dtype=np.int32), count * self._form.merged)
            frames += frames_of(image, rows, self._form)
        sizes = list(self._layouts)
        for together in patches.launches(frames, sizes[-1]):
            self._launch(buckets.next_bucket(sizes, sum(len(frame.rows) for frame in together)), together)

    def _launch(self, size: int, frames: Sequence[Frame]) -> None:
        inputs = self._layouts[size].pack(frames, self._unused_row)
        _, (self.rows,) = self._programs[size](list(inputs), [self.rows])
