"""The rows that encoders make of images, which stay on the device for the model's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
from vllm.config import VllmConfig

from . import images, tensor_parallel
from .images import Image, StepImages
from .requests import Batch, RequestTable
from .step_layout import Int32Array


class ImageRows:
    """The rows of images: computed when vLLM's scheduler says so, and kept until it says that they may go.

    What computes them, ``compile``, ``start`` and ``_encode``, is an encoder's.

    Attributes:
      rows: T[num_rows + 2, images.num_streams * hidden_size], what the programs of steps read. The row behind the
        images' is nobody's, the last one the model's vector behind a line of tiles.
    """

    _PARTS = "tiles"  # what an image consists of

    def __init__(self, config: VllmConfig, newline: torch.Tensor | None, device: torch.device) -> None:
        """newline: T[hidden_size], of a model that has such a vector."""
        model = config.model_config
        num_rows = images.most_rows(config)
        self._model, self._device = model, device
        self._unused_row, self._newline_row = num_rows, num_rows + 1
        width = images.num_streams(model) * model.get_hidden_size()
        last = torch.zeros(width, dtype=model.dtype, device=device) if newline is None else newline
        none = torch.zeros(num_rows + 1, width, dtype=model.dtype, device=device)
        self.rows: Any = torch.cat([none, last[None].to(model.dtype)])
        if (devices := tensor_parallel.active()) is not None:  # whole on each, as the tower is
            devices.mark(self.rows)
            devices.bytes_per_device += self.rows.nbytes
        torch_xla.sync()
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)
        self._num_free = num_rows
        self._rows_of: dict[str, Int32Array] = {}

    def compile(self) -> None:
        """Compiles the encoder's programs."""
        raise NotImplementedError

    def start(self) -> None:
        """Runs each program once: from then on ``rows`` is none that the programs were made with."""
        raise NotImplementedError

    def _encode(self, found: Sequence[Image]) -> None:
        """Launches the encoder for images that have no rows yet."""
        raise NotImplementedError

    def update(self, scheduled: Any, requests: RequestTable) -> None:
        """Follows a SchedulerOutput: lets images go, and launches the encoder for others."""
        for identifier in scheduled.free_encoder_mm_hashes:
            self._let_go(identifier)
        if scheduled.scheduled_encoder_inputs:
            inputs = scheduled.scheduled_encoder_inputs.items()
            of_step = [requests[req_id].images[index] for req_id, indices in inputs for index in indices]
            found = {image.identifier: image for image in of_step}
            for identifier in found:
                self._let_go(identifier)
            self._encode(list(found.values()))

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

    def let_all_go(self) -> None:
        """Frees the rows of all images."""
        for identifier in list(self._rows_of):
            self._let_go(identifier)

    def _let_go(self, identifier: str) -> None:
        rows = self._rows_of.pop(identifier, None)
        if rows is not None:
            own = rows[rows != self._newline_row]
            self._free[self._num_free : self._num_free + len(own)] = own
            self._num_free += len(own)

    def _take(self, image: Image, order: Int32Array, num_parts: int) -> Int32Array:
        """Gives an image rows of its own.

        Args:
          image: one without rows.
          order: int32[n], which row each of the image's rows is, of those that the encoder makes; or images.NEWLINE.
          num_parts: tiles of it, or patches.

        Returns:
          int32[n], of each its row among those of all images.
        """
        if len(order) != len(image.positions):
            raise RuntimeError(
                f"xla_gpu.vllm: an image of {num_parts} {self._PARTS}: expected {len(image.positions)} rows, as its "
                f"prompt has tokens for it, got {len(order)}"
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
        return rows
