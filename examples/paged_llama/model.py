"""Llama over a paged KV cache: one forward pass for a ragged batch of prompt chunks and decoding rows.

What belongs together is multiplied together: q, k and v are one matrix, gate and up are another. In nothing else do the
weights differ from Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xla_gpu.torch

from .batch import StepLayout
from .config import LlamaConfig


class PagedLlama(nn.Module):
    """Built without storage (on the "meta" device); weights.py fills it."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, max_tokens: int):
        """max_tokens: the longest sequence, in tokens; rotations are tabulated up to there."""
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(Layer(config, dtype) for _ in range(config.num_layers))
            self.norm = RMSNorm(config, dtype)
            if not config.tie_word_embeddings:
                self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.register_buffer("rotations", rotation_table(config, max_tokens), persistent=False)
        self.requires_grad_(False)

    def forward(self, packed: Tensor, previous: Tensor, caches: Sequence[Tensor], layout: StepLayout) -> Tensor:
        """Stores the K and V of a step's tokens in `caches`, in place, and chooses the next tokens.

        packed: int32 [layout.size], see StepLayout; previous: int32 [max_seqs], what the step before returned;
        caches: a layer's T[num_pages, page_size, 2 * num_kv_heads, head_dim] each, K of head h at 2h, V at 2h + 1.
        Returns int32 [max_seqs], of each sequence the most likely token after its last row; past the live sequences
        it has no meaning.
        """
        step = layout.unpack(packed)
        sources = step["sources"]
        tokens = torch.where(sources < 0, step["tokens"], previous[sources.clamp(min=0)])
        hidden = self.embed(tokens)
        cos, sin = self.rotations[step["positions"]].unsqueeze(1).unbind(-1)  # [num_tokens, 1, head_dim / 2] each
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, cos, sin, cache, step)
        hidden = self.norm(hidden[step["last_rows"]])  # the only rows whose logits anybody wants
        head = self.embed.weight if self.config.tie_word_embeddings else self.head.weight
        return F.linear(hidden, head).argmax(-1).to(torch.int32)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype):
        super().__init__()
        self.heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        self.attention_norm = RMSNorm(config, dtype)
        self.qkv = nn.Linear(hidden, query + 2 * kv, bias=config.attention_bias, dtype=dtype)
        self.out = nn.Linear(query, hidden, bias=config.attention_bias, dtype=dtype)
        self.mlp_norm = RMSNorm(config, dtype)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=config.mlp_bias, dtype=dtype)
        self.down = nn.Linear(wide, hidden, bias=config.mlp_bias, dtype=dtype)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, step: dict[str, Tensor]) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, cache, step)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, step: dict[str, Tensor]) -> Tensor:
        num_heads, num_kv_heads, head_dim = self.heads
        heads = self.qkv(x).view(x.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        xla_gpu.torch.reshape_and_cache_(key, value, cache, step["slots"])
        attended = xla_gpu.torch.paged_attention(
            query,
            cache,
            step["context_lens"],
            step["block_tables"],
            step["query_start_loc"],
            step["num_seqs"],
            scale=self.scale,
        )
        return self.out(attended.reshape(x.shape[0], num_heads * head_dim))


class RMSNorm(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [num_tokens, heads, head_dim]: element i turns with element i + head_dim / 2."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotation_table(config: LlamaConfig, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim / 2, 2]: cosine and sine of each position's angles.

    Made on the host: one ulp in a frequency is a visible angle after a few thousand positions, and the host's library
    is the one that transformers rounds with.
    """
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        factor = scaling["factor"]
        if scaling["rope_type"] == "linear":
            frequencies = frequencies / factor
        else:
            # Llama 3: wavelengths beyond the original context are stretched, short ones kept, the ones between mixed.
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            wavelengths = 2 * math.pi / frequencies
            kept = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
            kept = kept.clamp(0, 1)
            frequencies = (1 - kept) * frequencies / factor + kept * frequencies
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1)
