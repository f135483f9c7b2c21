"""Decoder layers, or their halves, as one call each in steps of few rows.

In ``attention_block_`` and ``gated_mlp`` kernels start while the ones before them end, which XLA's do not across calls.
A layer that is a norm, attention, a norm and an MLP is these two calls alone; of others the halves are, without norms.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

import xla_gpu.torch as xg

from .quantization import CheckpointLinearMethod

# Rows of linear's own kernels; of more the front ends would call the operators one by one.
MAX_ROWS = 64

# Of plain weights; XLA multiplies float32 faster.
PLAIN_DTYPES = (torch.float16, torch.bfloat16)

# vLLM's MLPs that are two products with an activation between, and layers that are a norm, attention, a norm and an
# MLP, whose halves are added to the residual stream. vLLM's Mistral and Phi 3 are Llamas.
_MLP = frozenset(f"{name}MLP" for name in ("Llama", "Qwen2"))
_LAYERS = frozenset(f"{name}DecoderLayer" for name in ("Llama", "Qwen2", "Qwen3"))

# linear takes multiples of it.
_SIZES = 16


def is_known(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether it is one of vLLM's own with such a name: a model from elsewhere may call another thing so.

    vLLM's EAGLE heads have layers of these names whose rows are others.
    """
    kind = type(module)
    own = kind.__module__.startswith("vllm.model_executor.models.") and "eagle" not in kind.__module__
    return kind.__name__ in names and own


def take(model: nn.Module, attentions: set[nn.Module]) -> None:
    """Has the model's MLPs and layers be such calls. ``attentions``: those that are already."""
    for module in model.modules():
        if is_known(module, _MLP) and type(getattr(module, "act_fn", None)) is SiluAndMul:
            module.forward = functools.partial(_gated_mlp, module, module.forward)
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and all(_can_be_taken(layer, attentions) for layer in layers):
            for layer in layers:
                layer.forward = functools.partial(_layer, layer, layer.forward, layer is layers[-1])


def norms(model: nn.Module) -> list[nn.Module]:
    """The norms whose weights the calls read themselves."""
    found = []
    for layer in model.modules():
        if getattr(layer.forward, "func", None) is _layer:
            pair = [layer.input_layernorm, layer.post_attention_layernorm]
            found += pair if all(_can_multiply(product, pair[0].weight.dtype) for product in _products(layer)) else []
    return found


def _products(layer: Any) -> tuple[Any, Any, Any, Any]:
    return layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj


def _can_be_taken(layer: Any, attentions: set[nn.Module]) -> bool:
    if not is_known(layer, _LAYERS) or layer.self_attn not in attentions or not is_known(layer.mlp, _MLP):
        return False
    of_layer = [layer.input_layernorm, layer.post_attention_layernorm]
    plain = all(type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None for norm in of_layer)
    # One call has one epsilon.
    of_heads = [norm for name in ("q_norm", "k_norm") if (norm := getattr(layer.self_attn, name, None)) is not None]
    return plain and len({norm.variance_epsilon for norm in (of_layer[0], *of_heads)}) == 1


def _layer(
    layer: Any,
    alone: Any,
    is_last: bool,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward method of a layer: the residual stream, whose norm the next layer makes itself."""
    qkv, out, gate_up, down = _products(layer)
    before_attention, before_mlp = layer.input_layernorm, layer.post_attention_layernorm
    if (
        get_forward_context().attn_metadata is None
        or any(norm.weight.dtype != hidden_states.dtype for norm in (before_attention, before_mlp))
        or operands(hidden_states, qkv=qkv, out=out) is None
        or (products := operands(hidden_states, gate_up=gate_up, down=down)) is None
    ):
        result: tuple[torch.Tensor, torch.Tensor | None] = alone(positions, hidden_states, residual, **others)
        return result
    total = hidden_states if residual is None else hidden_states + residual
    total = layer.self_attn.forward(positions, total, norm=_norm(before_attention), residual=total)
    after: dict[str, Any] = {**products, **_norm(before_mlp)}
    if is_last:  # the model's own norm adds both
        return xg.gated_mlp(total, **after), total
    return xg.gated_mlp(total, **after, residual=total), None


def _norm(norm: Any) -> dict[str, Any]:
    return {"norm_weight": norm.weight.data, "eps": norm.variance_epsilon}


def _gated_mlp(module: Any, alone: Any, x: torch.Tensor) -> torch.Tensor:
    weights = operands(x, gate_up=module.gate_up_proj, down=module.down_proj)
    if weights is None:
        result: torch.Tensor = alone(x)
        return result
    return xg.gated_mlp(x, **weights)


def operands(x: torch.Tensor, **layers: Any) -> dict[str, torch.Tensor] | None:
    """The weights of layers as operands of a block, by the names' prefixes; None where they are computed one by one.

    That is with more rows, with weights that XLA's products are faster with or ``linear`` does not take, with layers
    that something is added to (adapters), and with those that other rows are chosen before (the last one's).
    """
    if x.dim() != 2 or x.shape[0] > MAX_ROWS or not all(_can_multiply(layer, x.dtype) for layer in layers.values()):
        return None
    found: dict[str, torch.Tensor] = {}
    for prefix, layer in layers.items():
        named = {
            "weight": layer.weight,
            "scale": getattr(layer, "weight_scale", None),
            "zero_point": getattr(layer, "weight_zero_point", None),
            "bias": layer.bias,
        }
        found |= {f"{prefix}_{name}": tensor.data for name, tensor in named.items() if tensor is not None}
    return found


def _can_multiply(layer: Any, dtype: torch.dtype) -> bool:
    """Whether a block computes this product, of rows of ``dtype``."""
    if layer._forward_pre_hooks or (layer.bias is not None and layer.skip_bias_add):
        return False
    if isinstance(layer.quant_method, CheckpointLinearMethod):
        return True
    plain = type(layer.quant_method) is UnquantizedLinearMethod and layer.weight.dtype == dtype in PLAIN_DTYPES
    return plain and not any(size % _SIZES for size in layer.weight.shape)
