"""The encoder of images of any size (Qwen 2 VL, 2.5 VL, 3 VL): programs for some numbers of patches.

The layers are vLLM's; what goes through them is one row for each patch of several images, and padding. Attention is
this library's, of sequences that are whole images or windows of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.config import VllmConfig

import xla_gpu.torch as xg

from . import buckets, patches
from .attention import BatchMetadata
from .image_rows import ImageRows, most_rows
from .images import Image
from .patches import PatchForm, PatchLayout
from .program import Program
from .step_layout import Int32Array, unpack

# Of the angles by which queries and keys are turned.
_THETA = 10000.0

# vLLM's distance from the largest float16, beyond which the last layer's result would be infinite.
_FLOAT16_ROOM = 1000.0


class PatchEncoder(ImageRows):
    """Of images that are grids of patches."""

    _PARTS = "patches"

    def __init__(self, config: VllmConfig, tower: Any, device: torch.device) -> None:
        """tower: vLLM's model without its language model, on the device."""
        super().__init__(config, None, device)
        vision = self._model.hf_config.vision_config
        self._layers = tower.visual
        self._form = PatchForm.of(vision)
        # Of models with windows the layers that have none.
        self._whole = set(vision.fullatt_block_indexes) if self._form.window else set(range(len(tower.visual.blocks)))
        for block in tower.visual.blocks:
            block.attn.forward = functools.partial(_attend, block.attn, vision.num_heads)
        # Those whose results go to layers of the model.
        self._noted = list(getattr(vision, "deepstack_visual_indexes", ()))
        self._head_size = _head_size(vision)
        sizes = patches.token_buckets(config, most_rows(config))
        self._layouts = {size: PatchLayout(size, self._form) for size in sizes}
        self._programs: dict[int, Program] = {}

    def compile(self) -> None:
        """Compiles the programs."""
        for size, layout in self._layouts.items():

            def encode(
                pixels: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor, layout: PatchLayout = layout
            ) -> list[torch.Tensor]:
                parts = unpack(packed, layout.fields)
                rows.index_put_((parts["places"],), self._features(pixels, parts))
                return []

            inputs = [torch.from_numpy(array).to(self._device) for array in layout.pack([], [], self._unused_row)]
            self._programs[size] = Program(f"images, {size} tokens", encode, inputs, [self.rows])

    def start(self) -> None:
        """Runs each program once: from then on ``rows`` is none that the programs were made with."""
        for size in self._layouts:
            self._launch(size, [], [])

    def _encode(self, found: Sequence[Image]) -> None:
        sizes = list(self._layouts)
        for together in patches.launches(found, sizes[-1]):
            counts = [len(image.positions) for image in together]
            rows = [
                self._take(image, np.arange(count, dtype=np.int32), count * self._form.merged)
                for image, count in zip(together, counts, strict=True)
            ]
            self._launch(buckets.next_bucket(sizes, sum(counts)), together, rows)

    def _launch(self, size: int, found: Sequence[Image], rows: Sequence[Int32Array]) -> None:
        inputs = self._layouts[size].pack(found, rows, self._unused_row)
        _, (self.rows,) = self._programs[size](list(inputs), [self.rows])

    def _features(self, pixels: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """T[num_tokens, images.num_streams * hidden_size] of float32[num_patches, values]; parts: of the layout."""
        layers, dtype = self._layers, self.rows.dtype
        projection = layers.patch_embed.proj
        # Whose kernel is as large as a patch. vLLM's own takes Tensor.unfold, which torch_xla would run on the host.
        hidden = F.linear(pixels.to(dtype), projection.weight.flatten(1), projection.bias)
        if self._form.side:
            hidden = hidden + self._learned_positions(parts)
        whole = BatchMetadata(parts["image_starts"], parts["num_images"])
        windows = BatchMetadata(parts["window_starts"], parts["num_windows"]) if self._form.window else whole
        angles = _angles(parts["lines"], parts["columns"], self._head_size)
        turns = {"rotary_pos_emb_cos": angles.cos(), "rotary_pos_emb_sin": angles.sin()}
        streams = []
        for index, block in enumerate(layers.blocks):
            sequences = whole if index in self._whole else windows
            hidden = block(hidden, cu_seqlens=sequences, max_seqlen=None, **turns)
            if index in self._noted:
                streams.append(layers.deepstack_merger_list[self._noted.index(index)](hidden))
        if dtype == torch.float16:
            largest = torch.finfo(dtype).max - _FLOAT16_ROOM
            hidden = hidden.clamp(-largest, largest)
        return torch.cat([layers.merger(hidden), *streams], 1).to(dtype)

    def _learned_positions(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """T[num_patches, width], between the four learned positions around each patch's place in a square."""
        side, table = self._form.side, self._layers.pos_embed.weight
        ends = []
        for axis in ("lines", "columns"):
            at = parts[axis].float() * ((side - 1) / parts[f"last_{axis}"].clamp(min=1).float())
            first = at.to(torch.int32).clamp(max=side - 1)
            second = (first + 1).clamp(max=side - 1)
            ends.append(((first, 1 - (at - first)), (second, at - first)))
        corners = [
            table.index_select(0, line * side + column).float() * (of_line * of_column)[:, None]
            for line, of_line in ends[0]
            for column, of_column in ends[1]
        ]
        return torch.stack(corners).sum(0).to(table.dtype)


def _head_size(vision: Any) -> int:
    """Qwen 2 VL's configuration calls the encoder's width otherwise."""
    return int(getattr(vision, "embed_dim", None) or vision.hidden_size) // int(vision.num_heads)


def _angles(lines: torch.Tensor, columns: torch.Tensor, head_size: int) -> torch.Tensor:
    """float32[num_patches, head_size / 2]: of each pair of a head, half of them by the line, half by the column."""
    exponents = torch.arange(0, head_size // 2, 2, dtype=torch.float32, device=lines.device) / (head_size // 2)
    frequencies = 1.0 / (_THETA**exponents)
    return torch.cat([at.float()[:, None] * frequencies for at in (lines, columns)], 1)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """T[num_patches, num_heads, head_size], each pair of a head turned, in float32."""
    first, second = heads.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)


def _attend(
    attention: Any,
    num_heads: int,
    x: torch.Tensor,
    cu_seqlens: BatchMetadata,
    rotary_pos_emb_cos: torch.Tensor,
    rotary_pos_emb_sin: torch.Tensor,
    max_seqlen: None,
) -> torch.Tensor:
    """The forward method of a layer's attention, with vLLM's names; cu_seqlens: which rows are a sequence."""
    qkv, _ = attention.qkv(x)
    query, key, value = (part.contiguous() for part in qkv.reshape(len(x), 3, num_heads, -1).unbind(1))
    attended = xg.bidirectional_attention(
        _turned(query, rotary_pos_emb_cos, rotary_pos_emb_sin),
        _turned(key, rotary_pos_emb_cos, rotary_pos_emb_sin),
        value,
        cu_seqlens.query_start_loc,
        cu_seqlens.num_seqs,
        scale=query.shape[-1] ** -0.5,
    )
    out: torch.Tensor = attention.proj(attended.reshape(len(x), -1))[0]
    return out
