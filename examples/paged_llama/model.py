"""Llama over a paged KV cache: one forward pass for a ragged batch of prompt chunks and decoding rows.

What belongs together is multiplied together: q, k and v are one matrix, gate and up are another. In nothing else do the
weights differ from Hugging Face's.

Over several devices each holds its heads, its part of the MLP and of the vocabulary. Matrices that are divided along
their outputs have a device's rows together (its q, k and v; its gate and up); those that are divided along their inputs
are [devices, out, in / devices].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xla_gpu.torch

from .batch import StepLayout
from .config import LlamaConfig
from .options import StepOptions, of_step, usable


class PagedLlama(nn.Module):
    """Built without storage (on the "meta" device); weights.py fills it."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        max_tokens: int,
        group: xla_gpu.torch.DeviceGroup | None = None,
        options: StepOptions | None = None,
    ):
        """max_tokens: the longest sequence, in tokens; rotations are tabulated up to there. group: the devices over
        which the model is divided, under torch_xla's SPMD; None: one device. options: with one device; the sum over
        several has its norm, and their most likely token is found in parts."""
        super().__init__()
        self.config = config
        self.group = group
        self.options = options or StepOptions()
        operators = usable(self.options.operators, config)
        if group is not None:
            divided = {"rotary_and_cache", "rotary_and_attention"}  # the first in the place of both
            operators = frozenset({"rotary_and_cache"} if operators & divided else ())
        self.devices = 1 if group is None else group.size
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(Layer(config, dtype, group, operators) for _ in range(config.num_layers))
            self.norm = RMSNorm(config, dtype, operators)
            if group is not None or not config.tie_word_embeddings:
                # As many rows on each device; those behind the vocabulary's end are left out below.
                rows = -(-config.vocab_size // self.devices) * self.devices
                self.head = nn.Linear(config.hidden_size, rows, bias=False, dtype=dtype)
        self.register_buffer("rotations", rotation_table(config, max_tokens), persistent=False)
        self.requires_grad_(False)

    def forward(self, packed: Tensor, previous: Tensor, caches: Sequence[Tensor], layout: StepLayout) -> Any:
        """Stores the K and V of a step's tokens in `caches` and chooses the next tokens.

        packed: int32 [layout.size], see StepLayout; previous: int32 [max_seqs], what the step before returned;
        caches: a layer's T[num_pages, page_size, 2 * num_kv_heads, head_dim] each, K of head h at 2h, V at 2h + 1; or
        those of several layers each, as many but for the last, a layer's pages behind those of the one before.
        Returns int32 [max_seqs], of each sequence the token chosen after its last row; past the live sequences it has
        no meaning; and the updated caches, in the memory of those given. After in-place calls torch.compile and
        torch_xla would each copy every cache's handle back; over several devices a program compiled by torch_xla 2.9
        cannot update a tensor in place at all.
        """
        step = layout.unpack(packed)
        sources = step["sources"]
        tokens = torch.where(sources < 0, step["tokens"], previous[sources.clamp(min=0)])
        total, hidden = self.embed(tokens), None
        caches, together = list(caches), -(-len(self.layers) // len(caches))
        steps = of_layers(step, caches[0], together)
        last = step["last_rows"]  # the only rows whose logits anybody wants
        early = self.group is None and layout.num_tokens > layout.max_seqs
        for i, layer in enumerate(self.layers):
            is_last = i + 1 == len(self.layers)
            after = self.norm if is_last else self.layers[i + 1].attention_norm
            rows = last if is_last and early else None
            cache, own = i // together, steps[i % together]
            hidden, total, caches[cache] = layer(hidden, total, self.rotations, caches[cache], own, after, rows)
        if hidden is None:
            hidden = self.norm(total if early else total[last])[0]
        elif not early:
            hidden = hidden[last]
        if self.group is not None:
            return self._most_likely(self.head(hidden)), caches
        tied = self.config.tie_word_embeddings
        return self._choose(F.linear(hidden, self.embed.weight) if tied else self.head(hidden), step), caches

    def _choose(self, logits: Tensor, step: dict[str, Tensor]) -> Tensor:
        """int32 [max_seqs] from [max_seqs, vocab_size]."""
        if "sample" not in self.options.operators:
            return logits.argmax(-1).to(torch.int32)

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(logits.shape[:1], value, dtype=dtype, device=logits.device)

        token, _ = xla_gpu.torch.sample(
            logits,
            temperature=column(self.options.temperature, torch.float32),
            top_k=column(self.options.top_k, torch.int32),
            top_p=column(self.options.top_p, torch.float32),
            min_p=column(self.options.min_p, torch.float32),
            seed=step["requests"] + self.options.seed,
            step=step["choices"],
        )
        return token

    def _most_likely(self, logits: Tensor) -> Tensor:
        """The index of each row's largest logit, over the devices' parts of the vocabulary."""
        if self.config.vocab_size % self.devices:
            columns = torch.arange(logits.shape[1], device=logits.device)
            logits = torch.where(columns < self.config.vocab_size, logits, -math.inf)
        parts = torch.ops.paged_llama.largest(logits, self.layers[0].group_number)
        every = xla_gpu.torch.all_reduce(parts, group=self.group)
        return every[:, 1].gather(0, every[:, 0].argmax(0)[None])[0].to(torch.int32)


class Layer(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        group: xla_gpu.torch.DeviceGroup | None,
        operators: frozenset[str],
    ):
        super().__init__()
        self.operators = operators
        self.group = group
        if group is not None:
            from . import divided  # here, since it imports torch_xla

            self.group_number = divided.number(group)
        self.devices = 1 if group is None else group.size
        self.heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        self.attention_norm = RMSNorm(config, dtype, operators)
        self.qkv = nn.Linear(hidden, query + 2 * kv, bias=config.attention_bias, dtype=dtype)
        self.out = RowParallel(query, hidden, config.attention_bias, dtype, self.devices)
        self.mlp_norm = RMSNorm(config, dtype, operators)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=config.mlp_bias, dtype=dtype)
        self.down = RowParallel(wide, hidden, config.mlp_bias, dtype, self.devices)

    def forward(
        self,
        hidden: Tensor | None,
        total: Tensor,
        rotations: Tensor,
        cache: Tensor,
        step: dict[str, Tensor],
        after: RMSNorm,
        rows: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """hidden: the norm of total by this layer's first norm, or None, where the layer before has not made it.
        rows: of the last layer those that are sampled after, for which alone it computes what follows its attention."""
        if self.calls("attention_block", total):
            hidden = None
            total, cache = self.attention_block(total, rotations, cache, step)
            total = total if rows is None else total[rows]
        else:
            hidden = self.attention_norm(total)[0] if hidden is None else hidden
            attended, cache = self.attention(hidden, rotations, cache, step)
            if rows is not None:
                attended, total = attended[rows], total[rows]
            hidden, total = self.add_and_norm(self.out(attended), total, self.out.bias, self.mlp_norm)
        if self.calls("gated_mlp", total):
            return None, self.gated_mlp(total), cache
        hidden = self.mlp_norm(total)[0] if hidden is None else hidden
        hidden, total = self.add_and_norm(self.down(self.activated(hidden)), total, self.down.bias, after)
        return hidden, total, cache

    def calls(self, operator: str, x: Tensor) -> bool:
        """Whether these rows are computed by the operator."""
        return operator in of_step(self.operators, x.shape[0])

    def activated(self, hidden: Tensor) -> Tensor:
        """What the MLP's second product takes."""
        gate_up = self.gate_up(hidden)
        if "silu_and_mul" in self.operators:
            return xla_gpu.torch.silu_and_mul(gate_up)
        gate, up = gate_up.view(hidden.shape[0], self.devices, 2, -1).unbind(2)
        return (F.silu(gate) * up).reshape(hidden.shape[0], -1)

    def attention_block(
        self, total: Tensor, rotations: Tensor, cache: Tensor, step: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The residual stream behind the layer's attention, and the updated cache."""
        donate(cache)
        return xla_gpu.torch.attention_block(
            total,
            positions=step["positions"],
            table=rotations,
            kv_cache=cache,
            slot_mapping=step["slots"],
            **{name: step[name] for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")},
            scale=self.scale,
            norm_weight=self.attention_norm.weight,
            residual=total,
            eps=self.attention_norm.eps,
            **projection("qkv", self.qkv),
            **projection("out", self.out),
        )

    def gated_mlp(self, total: Tensor) -> Tensor:
        """The residual stream behind the layer's MLP."""
        return xla_gpu.torch.gated_mlp(
            total,
            norm_weight=self.mlp_norm.weight,
            residual=total,
            eps=self.mlp_norm.eps,
            **projection("gate_up", self.gate_up),
            **projection("down", self.down),
        )

    def add_and_norm(self, x: Tensor, total: Tensor, bias: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Adds x, summed over the devices, to the residual stream: the input of what follows, and the stream."""
        if self.group is None:
            return norm(x if bias is None else x + bias, total)
        if bias is not None:
            total = total + bias
        return xla_gpu.torch.all_reduce_add_rms_norm(x, total, norm.weight, eps=norm.eps, group=self.group)

    def attention(self, x: Tensor, rotations: Tensor, cache: Tensor, step: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = self.heads
        rows = x.shape[0]
        qkv = self.qkv(x)
        donate(cache)
        metadata = {name: step[name] for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")}
        if self.calls("rotary_and_attention", x):
            return xla_gpu.torch.attention_block(
                qkv, None, None, step["positions"], rotations, cache, step["slots"], **metadata, scale=self.scale
            )
        if "rotary_and_cache" in self.operators and self.group is not None:
            query, cache = torch.ops.paged_llama.rotary_and_cache(
                qkv, step["positions"], rotations, cache, step["slots"], self.group_number
            )
        elif "rotary_and_cache" in self.operators:
            query, cache = xla_gpu.torch.rotary_and_cache(qkv, step["positions"], rotations, cache, step["slots"])
        else:
            own, own_kv = num_heads // self.devices, num_kv_heads // self.devices
            heads = qkv.view(rows, self.devices, own + 2 * own_kv, head_dim)
            query, key, value = (t.reshape(rows, -1, head_dim) for t in heads.split([own, own_kv, own_kv], 2))
            cos, sin = rotations[step["positions"]].unsqueeze(1).unbind(-1)  # [num_tokens, 1, head_dim / 2] each
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            cache = xla_gpu.torch.reshape_and_cache(key, value, cache, step["slots"])
        attended = xla_gpu.torch.paged_attention(query, cache, **metadata, scale=self.scale)
        return attended.reshape(rows, num_heads * head_dim), cache


def of_layers(step: dict[str, Tensor], cache: Tensor, together: int) -> list[dict[str, Tensor]]:
    """What so many layers, whose pages lie one behind the other in one cache, are given of a step."""
    if together == 1:
        return [step]
    first = torch.arange(together, dtype=torch.int32, device=cache.device) * (cache.shape[0] // together)
    # All at once, so that XLA makes one kernel of them.
    tables = step["block_tables"] + first[:, None, None]
    slots = torch.where(step["slots"] < 0, -1, step["slots"] + (first * cache.shape[1])[:, None])
    return [{**step, "block_tables": tables[i], "slots": slots[i]} for i in range(together)]


def donate(cache: Tensor) -> None:
    """Lets a compiled program write its result into the tensor's memory."""
    if cache.device.type == "xla":
        torch.ops.xla.dynamo_set_buffer_donor_(cache, True)


def projection(name: str, linear: nn.Module) -> dict[str, Tensor | None]:
    """The operands of a linear layer, plain or quantised, by the names of attention_block and gated_mlp."""
    parts = {"weight": "weight", "weight_scale": "scale", "weight_zero_point": "zero_point", "bias": "bias"}
    return {f"{name}_{part}": getattr(linear, attribute, None) for attribute, part in parts.items()}


class RowParallel(nn.Module):
    """A linear layer that is divided along its inputs: over several devices the parts of a sum, [devices, rows, out].
    The bias is for the caller to add, once."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, devices: int):
        super().__init__()
        self.devices = devices
        shape = (outputs, inputs) if devices == 1 else (devices, outputs, inputs // devices)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.devices == 1:
            return F.linear(x, self.weight)
        parts = x.view(x.shape[0], self.devices, -1).transpose(0, 1)
        return torch.bmm(parts, self.weight.transpose(1, 2))


class RMSNorm(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype, operators: frozenset[str]):
        super().__init__()
        self.operators = operators
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))

    def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm of x, or of total + x, and what it is the norm of."""
        if "rms_norm" in of_step(self.operators, x.shape[0]):
            if total is None:
                return xla_gpu.torch.rms_norm(x, self.weight, eps=self.eps), x
            return xla_gpu.torch.rms_norm(x, self.weight, eps=self.eps, residual=total)
        total = x if total is None else total + x
        wide = total.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype), total


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
