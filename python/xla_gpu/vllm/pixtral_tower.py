"""Pixtral's encoder, as Mistral 3 and LLaVA have it: vLLM's layers, on one row for each patch of several images."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from .attention import BatchMetadata
from .patch_attention import attended, rotary_angles
from .patches import PatchForm


class PixtralTower:
    """Its layers, and what brings their rows to the model's width."""

    def __init__(self, hf_config: Any, tower: Any, form: PatchForm) -> None:
        """tower: vLLM's model without its language model, on the device."""
        vision = hf_config.vision_config
        self._layers, self._projector, self._form = tower.vision_tower, tower.multi_modal_projector, form
        for layer in self._layers.transformer.layers:
            layer.attention.forward = functools.partial(_attend, layer.attention, vision.num_attention_heads)
        self._merges = hasattr(self._projector, "patch_merger")
        if self._merges:
            # As transformers has it. vLLM's is a constant, which that of the checkpoints equals.
            self._projector.norm.variance_epsilon = hf_config.text_config.rms_norm_eps
        self._head_size = int(vision.hidden_size) // int(vision.num_attention_heads)
        self._theta = float(vision.rope_theta)

    def features(self, pixels: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """T[num_tokens, hidden_size] of T[num_patches, values]; parts: of the layout."""
        layers = self._layers
        # A convolution whose kernel is as large as a patch.
        hidden = layers.ln_pre(F.linear(pixels, layers.patch_conv.weight.flatten(1)))
        sequences = BatchMetadata(parts["image_starts"], parts["num_images"])
        turns = self._angles(parts)
        for layer in layers.transformer.layers:
            hidden = layer(hidden, attention_mask=sequences, position_embeddings=(turns.cos(), turns.sin()))
        if not self._merges:
            merged: torch.Tensor = self._projector(hidden)
            return merged
        return self._merged(self._projector.norm(hidden))

    def _angles(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32[num_patches, head_size / 2]: half of the pairs by the line, half by the column, each other one's."""
        found = []
        for first, axis in ((0, "lines"), (2, "columns")):
            numbers = torch.arange(first, self._head_size, 4, device=parts[axis].device)
            found.append(parts[axis].float()[:, None] * rotary_angles(self._theta, numbers, self._head_size))
        return torch.cat(found, 1)

    def _merged(self, hidden: torch.Tensor) -> torch.Tensor:
        """T[num_tokens, hidden_size] of T[num_patches, width]: those of a token stand one behind the other.

        The checkpoint's matrix has the patches of each number of theirs together.
        """
        projector, width = self._projector, hidden.shape[1]
        of_tokens = hidden.reshape(-1, self._form.merged, width).transpose(1, 2).reshape(-1, self._form.merged * width)
        merged = projector.patch_merger.merging_layer(of_tokens)
        out: torch.Tensor = projector.linear_2(projector.act(projector.linear_1(merged)[0]))[0]
        return out


def _attend(
    attention: Any,
    num_heads: int,
    hidden_states: torch.Tensor,
    attention_mask: BatchMetadata,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, None]:
    """The forward method of a layer's attention, with vLLM's names; attention_mask: which rows are a sequence."""
    qkv, _ = attention.qkv_proj(hidden_states)
    return attention.o_proj(attended(qkv, num_heads, attention_mask, *position_embeddings))[0], None
