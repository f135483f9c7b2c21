"""What vLLM's encoders compute otherwise than their definition, made as that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def take(model: nn.Module, dtype: torch.dtype) -> None:
    """Changes layers of ``model``, before its weights are on the device; dtype: the model's."""
    for module in model.modules():
        if type(module).__name__ == "ModernBertAttention" and type(module).__module__.startswith("vllm."):
            _take_modernbert(module, dtype)


def _take_modernbert(module: Any, dtype: torch.dtype) -> None:
    """Windows of transformers' width, angles in the model's dtype.

    ``local_attention`` counts the keys of both sides, so that a query sees half of them on each, and its own. vLLM
    leaves the last one of each side out, and rounds the table of cosines and sines to float16 (0.12.0 to 0.16.0).
    """
    if module.attn.impl.sliding_window is not None:
        module.attn.impl.sliding_window = module.config.local_attention // 2 + 1
    rotary = module.rotary_emb
    if rotary.cos_sin_cache.dtype != dtype:
        rotary.register_buffer("cos_sin_cache", rotary._compute_cos_sin_cache().to(dtype), persistent=False)
