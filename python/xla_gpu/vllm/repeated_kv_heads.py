"""Fewer kv heads than devices: each device has a copy of the one that its query heads read.

As in vLLM on CUDA, where the number of devices is a multiple of that of kv heads. The model becomes one with as many kv
heads as devices, of which neighbours are equal: query heads find their keys and values by the same rule as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear


def repeat(size: int, name: str, module: nn.Module, random: bool) -> None:
    """Gives an attention module of a model on the host ``size`` kv heads, where it has fewer.

    Args:
      size: the number of devices.
      name: of the module, for error texts.
      module: any of a model; only one that holds vLLM's attention layer is changed.
      random: the numbers of weights are to be drawn, and do not matter here.

    Raises:
      ValueError: ``size`` is no multiple of its kv heads, or how it computes keys is not known.
    """
    children = list(module.children())
    attention: Any = next((child for child in children if isinstance(child, AttentionLayerBase)), None)
    kv_heads = getattr(attention, "num_kv_heads", size)
    # Latents have no heads; since vLLM 0.16 their layers say that they have one.
    if kv_heads % size == 0 or hasattr(attention, "kv_lora_rank"):
        return
    projection: Any = next((child for child in children if isinstance(child, QKVParallelLinear)), None)
    norms = [child for child in children if not isinstance(child, (AttentionLayerBase, LinearBase))]
    weights = [weight for norm in norms if (weight := getattr(norm, "weight", None)) is not None]
    known = projection is not None and hasattr(module, "num_kv_heads") and hasattr(module, "kv_size")
    # A norm of all heads together, or with weights for each, would have to be another one.
    if size % kv_heads or not known or any(weight.numel() > attention.head_size for weight in weights):
        raise ValueError(
            f"xla_gpu.vllm: --tensor-parallel-size: expected a number that divides {name}'s {kv_heads} kv heads,"
            f"{' of which this model can have no copies,' if size % kv_heads == 0 else ''} got {size}"
        )
    copies = size // kv_heads
    _repeat_outputs(name, projection, kv_heads, attention.head_size, copies, random)
    for owner in (module, projection, attention, attention.impl):
        owner.num_kv_heads = size
    module.kv_size *= copies


def _repeat_outputs(name: str, layer: Any, kv_heads: int, head_size: int, copies: int, random: bool) -> None:
    sizes = [int(size) for size in layer.output_sizes]
    for parameter, rows in by_outputs(layer, sum(sizes)):
        if head_size % rows:
            raise ValueError(
                f"xla_gpu.vllm: --tensor-parallel-size: expected a number that divides {name}'s {kv_heads} kv heads, "
                f"of which there are no copies where a scale is for {rows} rows and a head has {head_size}, got "
                f"{kv_heads * copies}"
            )
        if random and parameter.is_floating_point() and parameter.element_size() > 1:
            shape = (parameter.shape[0] + (copies - 1) * sum(sizes[1:]) // rows, *parameter.shape[1:])
            parameter.data = torch.empty(shape, dtype=parameter.dtype)
        else:
            parameter.data = _repeated(parameter.data, [size // rows for size in sizes], kv_heads, copies, 0)
    layer.kv_heads_of_checkpoint, layer.output_sizes_of_checkpoint = kv_heads, sizes
    layer.output_sizes = [sizes[0], *(copies * size for size in sizes[1:])]
    layer.output_size = sum(layer.output_sizes)


def by_outputs(layer: Any, outputs: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Of a layer on the host the parameters that are divided as its outputs are, and how many outputs a row is for."""
    for name in ("weight", "weight_scale", "weight_zero_point", "bias"):
        parameter = getattr(layer, name, None)
        if parameter is not None and parameter.shape[0] != 1:  # else one scale for all
            yield parameter, outputs // parameter.shape[0]  # more than one where a scale is of blocks


def output_sizes(layer: Any) -> list[int]:
    """The outputs of a linear layer as the checkpoint has them: of each of those that vLLM joined in it."""
    sizes = getattr(layer, "output_sizes_of_checkpoint", None) or getattr(layer, "output_sizes", None)
    return [int(size) for size in sizes or [layer.output_size]]


def of_outputs(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has along its last dimension the outputs of a layer's checkpoint, as the layer has them."""
    sizes = getattr(layer, "output_sizes_of_checkpoint", None)
    if sizes is None:
        return tensor
    kv_heads = layer.kv_heads_of_checkpoint
    return _repeated(tensor, sizes, kv_heads, layer.output_sizes[1] // sizes[1], tensor.dim() - 1)


def _repeated(tensor: torch.Tensor, sizes: list[int], kv_heads: int, copies: int, dim: int) -> torch.Tensor:
    """Queries, keys and values along ``dim``, keys and values with ``copies`` of each head one after the other."""
    whole = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # float8 cannot be joined
    query, *others = whole.split(sizes, dim)
    heads = [part.unflatten(dim, (kv_heads, -1)).repeat_interleave(copies, dim) for part in others]
    return torch.cat([query, *(part.flatten(dim, dim + 1) for part in heads)], dim).view(tensor.dtype)
