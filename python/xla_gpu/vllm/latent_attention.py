"""vLLM's layers of multi-head latent attention (MLA: DeepSeek V2 and V3, Kimi K2) on this library's two operators.

A cache keeps a latent and a rotary key for each token, from which the checkpoint's kv_b_proj would make each head's
keys and values. Here a query is multiplied by the part of kv_b_proj that makes keys instead, and what it attended to by
the part that makes values: all heads read the latents themselves, in steps of any kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

import xla_gpu.torch as xg

from .. import quantization
from ..ops.mla_attention import MAX_HEAD_DIM, MAX_VALUE_DIM
from . import tensor_parallel
from .attention import StepMetadata, XlaGpuAttentionBackend
from .quantization import CheckpointLinearMethod

try:
    from vllm.v1.attention.backend import AttentionImpl
except ImportError:  # before vLLM 0.14
    from vllm.attention.backends.abstract import AttentionImpl
try:
    from vllm.model_executor.layers.attention import MLAAttention
except ImportError:  # before vLLM 0.16
    from vllm.attention.layer import MLAAttention


class XlaGpuLatentBackend(XlaGpuAttentionBackend):
    """What vLLM asks about the backend of these layers."""

    @staticmethod
    def get_impl_cls() -> type[XlaGpuLatentAttention]:
        """The layers' implementation."""
        return XlaGpuLatentAttention

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The layout of a layer's cache: of each token the latent, and behind it the rotary key."""
        return (num_blocks, block_size, head_size)


class XlaGpuLatentAttention(AttentionImpl):  # type: ignore[misc]
    """One layer: stores the new latents and rotary keys in its cache, and attends to it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        indexer: Any = None,
        **_: Any,
    ) -> None:
        if indexer is not None:
            raise ValueError("xla_gpu.vllm: sparse attention (an indexer, DeepSeek V3.2): not supported")
        rope = head_size - kv_lora_rank
        are_multiples = all(width > 0 and width % 8 == 0 for width in (kv_lora_rank, rope))
        if not are_multiples or kv_lora_rank > MAX_VALUE_DIM or head_size > MAX_HEAD_DIM:
            raise ValueError(
                "xla_gpu.vllm: kv_lora_rank and qk_rope_head_dim: expected positive multiples of 8, up to "
                f"{MAX_VALUE_DIM} and together up to {MAX_HEAD_DIM}, got {kv_lora_rank} and {rope}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.rank, self.nope, self.value = kv_lora_rank, qk_nope_head_dim, v_head_dim

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """T[num_tokens, num_heads * v_head_dim]; without metadata, where no result is needed, zeros.

        Args:
          layer: vLLM's, with what ``take`` left on it.
          query: T[num_tokens, num_heads, nope + rope], its last part rotated.
          kv_c: T[num_tokens, kv_lora_rank], normed latents.
          k_pe: T[num_tokens, 1, rope], rotated.
          kv_cache: of the layer.
          attn_metadata: of the step.
          output: none, like the scales: see ``accept_output_buffer``.
          output_scale: none.
          output_block_scale: none.
        """
        num_tokens = query.shape[0]
        if attn_metadata is None:
            return query.new_zeros(num_tokens, self.num_heads * self.value)
        k_pe, devices = k_pe.reshape(num_tokens, -1), tensor_parallel.active()
        if devices is not None:
            kv_c, k_pe = devices.mark(kv_c.clone()), devices.mark(k_pe.clone())
        xg.concat_and_cache_mla_(kv_c, k_pe, kv_cache, attn_metadata.slot_mapping)
        of_keys, rotated = query.split([self.nope, self.head_size - self.rank], -1)
        latent = torch.cat([by_heads(of_keys, layer.key_weight), rotated], -1)
        attended = self._attend(latent, kv_cache, attn_metadata)
        values = by_heads(attended, layer.value_weight.transpose(1, 2))
        return values.reshape(num_tokens, self.num_heads * self.value)

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """T[num_tokens, num_heads, kv_lora_rank]; over several devices each has its heads, and the whole cache."""
        attend = functools.partial(xg.mla_attention, scale=self.scale, value_dim=self.rank)
        operands = query, kv_cache, step.context_lens, step.block_tables, step.query_start_loc, step.num_seqs
        if (devices := tensor_parallel.active()) is None:
            return attend(*operands)
        return devices.on_each(attend, [(tensor, 1 if tensor is query else None) for tensor in operands], 1)


def by_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """T[num_tokens, heads, n]: of x T[num_tokens, heads, k] each head's part times its matrix of T[heads, k, n]."""
    if x.dtype is torch.float32:  # torch_xla's einsum does not pass on that products are to be in float32, not TF32
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    return torch.einsum("thk,hkn->thn", x, weight)


def take(model: nn.Module, dtype: torch.dtype, random: bool = False) -> None:
    """Splits kv_b_proj of each layer of a model on the host into what queries and results are multiplied by.

    ``key_weight`` T[heads, nope, rank] and ``value_weight`` T[heads, value, rank] are the layer's then; kv_b_proj goes.

    Args:
      model: with its weights in the form that they have on the device.
      dtype: the model's.
      random: the numbers are to be drawn, and do not matter here.
    """
    taken = set()
    for module in model.modules():
        if isinstance(module, MultiHeadLatentAttentionWrapper):
            projection: Any = module.kv_b_proj
            _split(module.mla_attn, projection, dtype, random)
            taken.add(projection)
            module.forward = functools.partial(_forward, module)
    for module in list(model.modules()) if taken else []:
        for name, child in module._modules.items():
            if child in taken:
                module._modules[name] = None


def _split(layer: Any, projection: Any, dtype: torch.dtype, random: bool) -> None:
    impl = layer.impl
    sizes = [impl.nope, impl.value]
    if random:
        made = [torch.empty(impl.num_heads, size, impl.rank, dtype=dtype) for size in sizes]
    else:
        weight = _plain(projection, dtype).view(impl.num_heads, sum(sizes), impl.rank)
        made = [part.contiguous() for part in weight.split(sizes, 1)]
    for name, tensor in zip(("key_weight", "value_weight"), made, strict=True):
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _plain(projection: Any, dtype: torch.dtype) -> torch.Tensor:
    """The matrix T[n, k] of a linear layer; that of a quantised one is rounded to ``dtype``."""
    if not isinstance(projection.quant_method, CheckpointLinearMethod):
        weight: torch.Tensor = projection.weight.data
        return weight.to(dtype)
    names = "weight", "weight_scale", "weight_zero_point"
    stored = [None if (tensor := getattr(projection, name)) is None else tensor.data for name in names]
    return quantization.dequantize(quantization.LinearWeight(*stored)).to(dtype)


def _forward(
    module: Any, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
) -> torch.Tensor:
    """The forward method of vLLM's wrapper, without its update of a part of the query in place."""
    if module.q_lora_rank is None:
        kv, _bias = module.kv_a_proj_with_mqa(hidden_states)
        query, _bias = module.q_proj(hidden_states)
    else:
        joined, _bias = module.fused_qkv_a_proj(hidden_states)
        of_query, kv = joined.split([module.q_lora_rank, module.kv_lora_rank + module.qk_rope_head_dim], -1)
        query, _bias = module.q_b_proj(module.q_a_layernorm(of_query))
    kv_c, k_pe = kv.split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    query, k_pe = query.view(-1, module.num_heads, module.qk_head_dim), k_pe.unsqueeze(1)
    if module.rotary_emb is not None:
        of_keys, of_positions = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        of_positions, k_pe = module.rotary_emb(positions, of_positions, k_pe)
        query = torch.cat([of_keys, of_positions], -1)
    if llama_4_scaling is not None:
        query = (query * llama_4_scaling).to(query.dtype)  # factors are float32 in models of any dtype
    attended = module.mla_attn(query, module.kv_a_layernorm(kv_c), k_pe)
    output, _bias = module.o_proj(attended)
    return output


def _attend(
    layer: Any,
    query: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    output_shape: torch.Size | None = None,
) -> torch.Tensor:
    """MLAAttention.forward: since vLLM 0.16 that stores latents itself, and divides a step by its requests."""
    context = get_forward_context()
    metadata, kv_cache = context.attn_metadata, layer.kv_cache[context.virtual_engine]
    if isinstance(metadata, dict):
        metadata = metadata[layer.layer_name]
    attended: torch.Tensor = layer.impl.forward(layer, query, kv_c, k_pe, kv_cache, metadata)
    return attended


def _leave_projection(layer: Any, act_dtype: torch.dtype) -> None:
    """MLAAttention.process_weights_after_loading: since vLLM 0.16 that splits kv_b_proj, as ``take`` does."""


MLAAttention.forward = _attend
MLAAttention.process_weights_after_loading = _leave_projection
