"""The encoder of images that are tiles: programs for a fixed number of these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.config import VllmConfig

from . import images
from .image_rows import ImageRows
from .images import Image
from .program import Program
from .step_layout import Int32Array

# Its features are those in front of the tower's last norm, as transformers has it; vLLM takes those behind.
_WITHOUT_LAST_NORM = "AyaVisionForConditionalGeneration"

# vLLM's attention of encoders: until 0.12, and from 0.13 on.
_ATTENTION = ("MultiHeadAttention", "MMEncoderAttention")


class TileEncoder(ImageRows):
    """Of images that are tiles of one size."""

    def __init__(self, config: VllmConfig, tower: Any, device: torch.device) -> None:
        """tower: vLLM's model without its language model, on the device."""
        super().__init__(config, getattr(tower, "image_newline", None), device)
        self._tower = tower
        for module in tower.modules():
            if getattr(module, "enable_linear", False):
                module.forward = functools.partial(_of_patches, module)
            elif type(module).__name__ in _ATTENTION:
                module.forward = functools.partial(_attend_in_parts, module.forward)
        if self._model.architecture == _WITHOUT_LAST_NORM:
            tower.vision_tower.vision_model.post_layernorm = None
        self._form = images.tile_form(self._model)
        self._batches = images.batches(self._model.hf_config.vision_config)
        self._rows_per_tile = 0
        self._programs: dict[int, Program] = {}

    # ---- Start -------------------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Compiles the programs.

        Raises:
          ValueError: the encoder's rows are others than the model's code is for.
        """
        # Never computed.
        self._rows_per_tile = int(self._features(torch.zeros(1, *self._form, device=self._device)).shape[1])
        images.check_rows(self._model, self._rows_per_tile)

        def encode(pixels: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
            rows.index_put_((places,), self._features(pixels).flatten(0, 1))
            return []

        for size in self._batches:
            pixels = torch.zeros(size, *self._form, dtype=torch.float32).to(self._device)
            places = torch.full((size * self._rows_per_tile,), self._unused_row, dtype=torch.int32).to(self._device)
            self._programs[size] = Program(f"images, {size} tiles", encode, [pixels, places], [self.rows])

    def start(self) -> None:
        """Runs each program once: from then on ``rows`` is none that the programs were made with."""
        for size in self._batches:
            places = np.full(size * self._rows_per_tile, self._unused_row, np.int32)
            self._launch(np.zeros((size, *self._form), np.float32), places)

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        """T[n, rows, hidden_size] of n tiles."""
        tower = self._tower
        dtype = self.rows.dtype
        features = tower.multi_modal_projector(tower._image_pixels_to_features(tower.vision_tower, pixels.to(dtype)))
        return features.reshape(pixels.shape[0], -1, features.shape[-1]).to(dtype)

    # ---- Steps -------------------------------------------------------------------------------------------------------

    def _encode(self, found: Sequence[Image]) -> None:
        """Tiles of all images one behind the other, as many at a time as a program takes."""
        of_images, places_of_images = [], []
        for image in found:
            tiles = images.tiles(image.data, self._form)
            own = self._places(image, len(tiles))
            of_images.append(tiles[: len(own) // self._rows_per_tile])
            places_of_images.append(own)
        pixels, places, at = np.concatenate(of_images), np.concatenate(places_of_images), 0
        for size in self._batches:
            while len(pixels) - at >= size:
                own = places[at * self._rows_per_tile : (at + size) * self._rows_per_tile]
                self._launch(pixels[at : at + size], own)
                at += size

    def _places(self, image: Image, num_tiles: int) -> Int32Array:
        """int32[n * rows_per_tile]: where the rows of an image's n tiles go that it has a use for."""
        order = images.row_order(self._model, image.data, self._rows_per_tile, num_tiles)
        rows, own = self._take(image, order, num_tiles), order != images.NEWLINE
        needed = int(order.max()) // self._rows_per_tile + 1
        places = np.full(needed * self._rows_per_tile, self._unused_row, np.int32)
        places[order[own]] = rows[own]
        return places

    def _launch(self, pixels: np.ndarray[Any, Any], places: Int32Array) -> None:
        _, (self.rows,) = self._programs[len(pixels)]([pixels, places], [self.rows])


def _attend_in_parts(
    alone: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """T[n, rows, hidden_size], vLLM's attention of an encoder, for some queries at a time: XLA keeps all scores."""
    most, rows = images.MOST_QUERIES, query.shape[1]
    return torch.cat([alone(query[:, at : at + most], key, value) for at in range(0, rows, most)], 1)


def _of_patches(layer: Any, pixels: torch.Tensor) -> torch.Tensor:
    """T[n, channels, rows, columns], vLLM's convolution whose kernel is as large as its stride.

    vLLM's own takes Tensor.unfold, which torch_xla would run on the host.
    """
    (n, channels, *sizes), (high, wide) = pixels.shape, layer.kernel_size
    rows, columns = sizes[0] // high, sizes[1] // wide
    cut = pixels[:, :, : rows * high, : columns * wide].reshape(n, channels, rows, high, columns, wide)
    flat = cut.permute(0, 2, 4, 1, 3, 5).reshape(n * rows * columns, -1)
    out = F.linear(flat, layer.weight.reshape(layer.out_channels, -1), layer.bias)
    return out.reshape(n, rows, columns, -1).permute(0, 3, 1, 2)
