"""The KV caches: what each layer needs, and their memory on the device."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from . import tensor_parallel
from .attention import CACHE_DTYPES, XlaGpuAttentionBackend


def layer_specs(config: VllmConfig) -> dict[str, Any]:
    """VLLM's cache specification of each layer that has a cache of its own.

    Raises:
      ValueError: a layer is neither full nor sliding-window attention.
    """
    specs = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        spec = layer.get_kv_cache_spec(config)
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise ValueError(
                f"xla_gpu.vllm: layer {name}: expected full or sliding-window attention, got {type(spec).__name__}: "
                "this model is not supported"
            )
        specs[name] = spec
    return specs


class KVCaches:
    """The caches' tensors, and which layers use which.

    Attributes:
      tensors: T[num_blocks, block_size, 2 * num_kv_heads, head_size] each. Programs take them over and return new ones.
      block_sizes: of each KV-cache group.
      group_of_layer: index of the group whose block tables a layer uses.
    """

    def __init__(self, config: VllmConfig, cache_config: KVCacheConfig, device: torch.device) -> None:
        self._layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs: dict[str, Any] = {}
        self.group_of_layer: dict[str, int] = {}
        self.block_sizes = []
        for index, group in enumerate(cache_config.kv_cache_groups):
            self.block_sizes.append(group.kv_cache_spec.block_size)
            for name in group.layer_names:
                # Layers of one kind but different sizes have a specification each.
                specs[name] = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                self.group_of_layer[name] = index
        self.tensors: list[torch.Tensor] = []
        self._index_of_layer: dict[str, int] = {}
        dtype_name = config.cache_config.cache_dtype
        for tensor in cache_config.kv_cache_tensors:
            shapes = set()
            for name in tensor.shared_by:
                spec = specs[name]
                num_blocks = tensor.size // spec.page_size_bytes
                shapes.add(
                    XlaGpuAttentionBackend.get_kv_cache_shape(
                        num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
                    )
                )
                self._index_of_layer[name] = len(self.tensors)
            if len(shapes) != 1:
                raise ValueError(
                    f"xla_gpu.vllm: layers {', '.join(tensor.shared_by)} share a cache but not its shape "
                    f"({sorted(shapes)}); start with --disable-hybrid-kv-cache-manager"
                )
            dtype = CACHE_DTYPES.get(dtype_name, spec.dtype)
            self.tensors.append(_zeros(shapes.pop(), dtype, device))
        for name, layer in self._layers.items():
            if (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None:
                self._index_of_layer[name] = self._index_of_layer[target]
                self.group_of_layer[name] = self.group_of_layer[target]
        torch_xla.sync()

    def bind(self) -> None:
        """Gives the layers today's tensors. Needed where the model is traced; programs get them as arguments."""
        for name, index in self._index_of_layer.items():
            self._layers[name].kv_cache = [self.tensors[index]]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty cache; over several devices each has its kv heads' part."""
    cache = torch.zeros(shape, dtype=dtype, device=device)
    devices = tensor_parallel.active()
    return cache if devices is None else devices.mark_cache(cache)
