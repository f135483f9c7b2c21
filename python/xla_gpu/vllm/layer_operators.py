"""This library's operators in the layers of vLLM's models, where they take less time than what XLA makes of them.

Between a layer's projection and its attention: ``rotary_and_cache``, in all steps. Norms with a residual and the
product with SiLU: from ``MIN_ROWS`` rows on, below which XLA's kernels take as long. Layers over several devices keep
vLLM's own operations, which XLA divides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

import xla_gpu.torch as xg

from . import layer_blocks, mrope
from .attention import XlaGpuAttention

MIN_ROWS = 512

# Attention of vLLM's models that consists of a projection, norms of query and key heads perhaps, rotary embedding,
# attention and a projection. vLLM's Mistral and Phi 3 are Llamas.
_ATTENTION = frozenset(
    f"{name}Attention" for name in ("Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Mixtral", "Qwen3Moe")
)
_TABLE = "xla_gpu_table"


def take(model: nn.Module, max_model_len: int) -> None:
    """Has the layers of ``model`` use the operators. It adds a buffer: called before those go to the device."""
    for module in model.modules():
        if type(module) is RMSNorm and module.has_weight and module.variance_size_override is None:
            _take_norm(module, {})
        elif type(module) is GemmaRMSNorm:
            _take_norm(module, {"weight_offset": 1.0, "round_once": True})
        elif type(module) is SiluAndMul:
            _take_silu(module)
        elif is_known_attention(type(module)) and _can_be_taken(module, max_model_len):
            _take_attention(module, max_model_len)
    layer_blocks.take(model, _taken(model))


def own_norms(model: nn.Module) -> list[nn.Module]:
    """The norms whose weights this library's operators read in steps of any number of rows."""
    pairs = [(module, name) for module in _taken(model) for name in ("q_norm", "k_norm")]
    of_heads = [norm for module, name in pairs if (norm := getattr(module, name, None)) is not None]
    return of_heads + layer_blocks.norms(model)


def _taken(model: nn.Module) -> set[nn.Module]:
    """Attention that goes through this library's operators as a whole."""
    return {module for module in model.modules() if getattr(module.forward, "func", None) is _attend}


def _take_norm(norm: Any, options: dict[str, Any]) -> None:
    alone = norm._forward_method

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None or x.dim() != 2 or x.shape[0] < MIN_ROWS:
            return alone(x, residual)
        # The operator takes one dtype. Some models keep the residual, or the norms' weights, in float32.
        if not norm.weight.dtype == residual.dtype == x.dtype:
            return alone(x, residual)
        return xg.rms_norm(x, norm.weight.data, eps=norm.variance_epsilon, residual=residual, **options)

    norm._forward_method = forward


def _take_silu(silu: Any) -> None:
    alone = silu._forward_method

    def forward(x: torch.Tensor) -> torch.Tensor:
        return alone(x) if x.dim() != 2 or x.shape[0] < MIN_ROWS else xg.silu_and_mul(x)

    silu._forward_method = forward


def is_known_attention(kind: type[nn.Module]) -> bool:
    """Whether it is one of vLLM's own: a model from elsewhere may call another thing so."""
    return kind.__name__ in _ATTENTION and kind.__module__.startswith("vllm.model_executor.models.")


def _can_be_taken(module: Any, max_model_len: int) -> bool:
    rotary, attention = module.rotary_emb, module.attn
    return (
        _is_known_rotary(rotary)
        and rotary.cos_sin_cache.shape[0] >= max_model_len
        and rotary.cos_sin_cache.shape[1] <= module.head_dim == attention.head_size
        and isinstance(attention.impl, XlaGpuAttention)
        and attention.impl.stores_keys
        and not getattr(module, "do_llama_4_scaling", False)
        and all(_is_head_norm(getattr(module, name, None), rotary.cos_sin_cache.dtype) for name in ("q_norm", "k_norm"))
    )


def _is_known_rotary(rotary: Any) -> bool:
    """Whether its angles are those of its table: others compute a step's elsewhere."""
    if type(rotary) is MRotaryEmbedding:
        return bool(rotary.mrope_section)
    return (
        isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward_native is RotaryEmbedding.forward_native
        and type(rotary).forward is RotaryEmbedding.forward
    )


def _is_head_norm(norm: Any, dtype: torch.dtype) -> bool:
    if type(norm) is RMSNorm:
        return bool(norm.has_weight and norm.variance_size_override is None and norm.weight.dtype == dtype)
    return norm is None or (type(norm) is GemmaRMSNorm and norm.weight.dtype == dtype)


def _take_attention(module: Any, max_model_len: int) -> None:
    rotary = module.rotary_emb
    # Layers share it, and so do models: vLLM keeps rotary embeddings for the process.
    if not hasattr(rotary, _TABLE) or getattr(rotary, _TABLE).shape[0] < max_model_len:
        # Rounded to the model's dtype, as vLLM and transformers do.
        cos, sin = rotary.cos_sin_cache[:max_model_len].chunk(2, dim=-1)
        rotary.register_buffer(_TABLE, torch.stack([cos, sin], -1).float(), persistent=False)
    module.forward = functools.partial(_attend, module)


def _attend(
    module: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    norm: dict[str, Any] | None = None,
    residual: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The forward method of a layer's attention.

    ``norm``: what ``attention_block_`` takes of the norm before it, where that is a part of it; ``residual``: what it
    adds then.
    """
    attention, rotary, context = module.attn, module.rotary_emb, get_forward_context()
    if context.attn_metadata is None:  # no result is needed
        qkv, _bias = module.qkv_proj(hidden_states)
        output, _bias = module.o_proj(qkv[:, : attention.num_heads * attention.head_size])
        return output
    rotation: dict[str, Any] = {"interleaved": not rotary.is_neox_style}
    for name in ("q_norm", "k_norm"):
        if (of_heads := getattr(module, name, None)) is not None:
            gemma = isinstance(of_heads, GemmaRMSNorm)
            rotation |= {f"{name}_weight": of_heads.weight.data, "norm_eps": of_heads.variance_epsilon}
            rotation |= {"weight_offset": float(gemma), "round_once": gemma}
    cache = attention.kv_cache[context.virtual_engine]
    step = context.attn_metadata[attention.layer_name]
    table = getattr(rotary, _TABLE)
    if positions.dim() > 1:
        sections = rotary.mrope_section, rotary.mrope_interleaved
        positions, table = mrope.table_of_step(positions, table, *sections)
    where = positions, table, cache, step
    weights = None
    if step.blocks is None:
        weights = layer_blocks.operands(hidden_states, qkv=module.qkv_proj, out=module.o_proj)
    if weights is not None:
        if norm is not None:
            weights |= {"norm_weight": norm["norm_weight"], "residual": residual}
            rotation["norm_eps"] = norm["eps"]
        result: torch.Tensor = attention.impl.forward_block(attention, hidden_states, weights, *where, **rotation)
        return result
    qkv, _bias = module.qkv_proj(hidden_states)
    output, _bias = module.o_proj(attention.impl.forward_projected(attention, qkv, *where, **rotation))
    return output
