"""The encoder of Qwen 2 VL, 2.5 VL and 3 VL: vLLM's layers, on one row for each patch of several images.

Attention is this library's, of sequences that are whole images or windows of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from .attention import BatchMetadata
from .patch_attention import attended, rotary_angles
from .patches import PatchForm

# Of the angles by which queries and keys are turned.
_THETA = 10000.0

# vLLM's distance from the largest float16, beyond which the last layer's result would be infinite.
_FLOAT16_ROOM = 1000.0


class QwenTower:
    """Its layers."""

    def __init__(self, hf_config: Any, tower: Any, form: PatchForm) -> None:
        """tower: vLLM's model without its language model, on the device."""
        vision = hf_config.vision_config
        self._layers, self._form = tower.visual, form
        # Of models with windows the layers that have none.
        self._whole = set(vision.fullatt_block_indexes) if form.window else set(range(len(tower.visual.blocks)))
        for block in tower.visual.blocks:
            block.attn.forward = functools.partial(_attend, block.attn, vision.num_heads)
        # Those whose results go to layers of the model.
        self._noted = list(getattr(vision, "deepstack_visual_indexes", ()))
        self._head_size = _head_size(vision)

    def features(self, pixels: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """T[num_tokens, images.num_streams * hidden_size] of T[num_patches, values]; parts: of the layout."""
        layers, dtype = self._layers, pixels.dtype
        projection = layers.patch_embed.proj
        # Whose kernel is as large as a patch. vLLM's own takes Tensor.unfold, which torch_xla would run on the host.
        hidden = F.linear(pixels, projection.weight.flatten(1), projection.bias)
        if self._form.side:
            hidden = hidden + self._learned_positions(parts)
        whole = BatchMetadata(parts["image_starts"], parts["num_images"])
        windows = BatchMetadata(parts["window_starts"], parts["num_windows"]) if self._form.window else whole
        half = self._head_size // 2
        frequencies = rotary_angles(_THETA, torch.arange(0, half, 2, device=pixels.device), half)
        angles = torch.cat([parts[axis].float()[:, None] * frequencies for axis in ("lines", "columns")], 1)
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
        return torch.cat([layers.merger(hidden), *streams], 1)

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
    out: torch.Tensor = attention.proj(attended(qkv, num_heads, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin))[0]
    return out
