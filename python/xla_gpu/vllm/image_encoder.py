"""The encoder of images: programs for a fixed number of tiles, whose rows stay on the device for the model's steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.core.encoder_cache_manager import compute_encoder_budget

from . import images, tensor_parallel
from .images import Image, StepImages
from .program import Program
from .requests import Batch, RequestTable
from .step_layout import Int32Array

# Its features are those in front of the tower's last norm, as transformers has it; vLLM takes those behind.
_WITHOUT_LAST_NORM = "AyaVisionForConditionalGeneration"

# vLLM's attention of encoders: until 0.12, and from 0.13 on.
_ATTENTION = ("MultiHeadAttention", "MMEncoderAttention")


class ImageEncoder:
    """The rows of images: computed when vLLM's scheduler says so, and kept until it says that they may go.

    Attributes:
      rows: T[num_rows + 2, hidden_size], what the programs of steps read. The row behind the images' is nobody's, the
        last one the model's vector behind a line of tiles.
    """

    def __init__(self, config: VllmConfig, tower: Any, device: torch.device) -> None:
        """tower: vLLM's model without its language model, on the device."""
        model = config.model_config
        # What the scheduler lets images have at once, in tokens of prompts: no image has more rows than tokens.
        _, num_rows = compute_encoder_budget(model, config.scheduler_config, MULTIMODAL_REGISTRY)
        self._model, self._tower = model, tower
        for module in tower.modules():
            if getattr(module, "enable_linear", False):
                module.forward = functools.partial(_of_patches, module)
            elif type(module).__name__ in _ATTENTION:
                module.forward = functools.partial(_attend_in_parts, module.forward)
        if model.architecture == _WITHOUT_LAST_NORM:
            tower.vision_tower.vision_model.post_layernorm = None
        self._device = device
        self._form = images.tile_form(model)
        self._batches = images.batches(model.hf_config.vision_config)
        self._unused_row, self._newline_row = num_rows, num_rows + 1
        newline = getattr(tower, "image_newline", None)
        last = torch.zeros(model.get_hidden_size(), dtype=model.dtype, device=device) if newline is None else newline
        none = torch.zeros(num_rows + 1, model.get_hidden_size(), dtype=model.dtype, device=device)
        self.rows: Any = torch.cat([none, last[None].to(model.dtype)])
        if (devices := tensor_parallel.active()) is not None:  # whole on each, as the tower is
            devices.mark(self.rows)
            devices.bytes_per_device += self.rows.nbytes
        torch_xla.sync()
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)
        self._num_free = num_rows
        self._rows_of: dict[str, Int32Array] = {}
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

    def update(self, scheduled: Any, requests: RequestTable) -> None:
        """Follows a SchedulerOutput: lets images go, and launches the encoder for others."""
        for identifier in scheduled.free_encoder_mm_hashes:
            self._let_go(identifier)
        if not scheduled.scheduled_encoder_inputs:
            return
        pixels, places = [], []
        for req_id, indices in scheduled.scheduled_encoder_inputs.items():
            for index in indices:
                image = requests[req_id].images[index]
                self._let_go(image.identifier)
                found = images.tiles(image.data, self._form)
                own = self._take(image, len(found))
                pixels.append(found[: len(own) // self._rows_per_tile])
                places.append(own)
        self._encode(np.concatenate(pixels), np.concatenate(places))

    def of_step(self, batch: Batch, counts: Int32Array, requests: RequestTable) -> StepImages | None:
        """Which rows of a step are images', counts[i] of the i-th request; None: none is."""
        computed = requests.num_computed[batch.slots]
        if not (computed < requests.image_ends[batch.slots]).any():
            return None
        rows, runs = np.full((2, int(counts.sum())), -1, np.int32)
        first = num_runs = 0
        for request, begin, count in zip(batch.requests, computed.tolist(), counts.tolist(), strict=True):
            for image in request.images:
                at = np.searchsorted(image.positions, (begin, begin + count))
                if at[0] < at[1]:
                    in_step = slice(at[0], at[1])
                    positions = image.positions[in_step]
                    here = positions - begin + first
                    rows[here] = self._known(image)[in_step]
                    runs[here] = num_runs + np.cumsum(np.diff(positions, prepend=positions[0] - 1) != 1)
                    num_runs = int(runs[here[-1]]) + 1
            first += count
        return StepImages(rows, runs) if num_runs else None

    def _known(self, image: Image) -> Int32Array:
        if image.identifier not in self._rows_of:
            raise RuntimeError(f"xla_gpu.vllm: the image {image.identifier} was read before it was encoded")
        return self._rows_of[image.identifier]

    def _let_go(self, identifier: str) -> None:
        rows = self._rows_of.pop(identifier, None)
        if rows is not None:
            own = rows[rows != self._newline_row]
            self._free[self._num_free : self._num_free + len(own)] = own
            self._num_free += len(own)

    def _take(self, image: Image, num_tiles: int) -> Int32Array:
        """Gives an image rows; int32[n * rows_per_tile]: where those of its n tiles go that it has a use for."""
        order = images.row_order(self._model, image.data, self._rows_per_tile, num_tiles)
        if len(order) != len(image.positions):
            raise RuntimeError(
                f"xla_gpu.vllm: an image of {num_tiles} tiles: expected {len(image.positions)} rows, as its prompt has "
                f"tokens for it, got {len(order)}"
            )
        own = order != images.NEWLINE
        count = int(own.sum())
        if count > self._num_free:
            raise RuntimeError(
                f"xla_gpu.vllm: an image of {count} rows: expected at most {self._num_free}, which are free"
            )
        self._num_free -= count
        rows = np.full(len(order), self._newline_row, np.int32)
        rows[own] = self._free[self._num_free : self._num_free + count]
        self._rows_of[image.identifier] = rows
        needed = int(order.max()) // self._rows_per_tile + 1
        places = np.full(needed * self._rows_per_tile, self._unused_row, np.int32)
        places[order[own]] = rows[own]
        return places

    def _encode(self, pixels: np.ndarray[Any, Any], places: Int32Array) -> None:
        at = 0
        for size in self._batches:
            while len(pixels) - at >= size:
                own = places[at * self._rows_per_tile : (at + size) * self._rows_per_tile]
                self._launch(pixels[at : at + size], own)
                at += size

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
