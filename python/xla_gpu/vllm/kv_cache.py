"""The KV caches: what each layer needs, and their memory on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, SlidingWindowSpec

from . import supported, tensor_parallel
from .attention import CACHE_DTYPES, BatchMetadata, StepMetadata, XlaGpuAttention, XlaGpuAttentionBackend
from .latent_attention import XlaGpuLatentBackend


def layer_specs(config: VllmConfig) -> dict[str, Any]:
    """VLLM's cache specification of each layer that has a cache of its own.

    Raises:
      ValueError: a layer is neither full, sliding-window nor latent attention; one that attends in both directions
        would be given a part of a prompt; one looks back alone, although the model's configuration says otherwise.
    """
    specs, model = {}, config.model_config
    in_both_directions = supported.pools(model) and model.attn_type == "encoder_only"
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if is_bidirectional(layer):
            if config.scheduler_config.enable_chunked_prefill or config.cache_config.enable_prefix_caching:
                raise ValueError(
                    f"xla_gpu.vllm: layer {name} attends in both directions: expected --no-enable-chunked-prefill and "
                    "--no-enable-prefix-caching"
                )
            continue
        if in_both_directions:
            raise ValueError(
                f"xla_gpu.vllm: layer {name}: expected attention in both directions (is_causal: false), which vLLM's "
                f"{model.architecture} does not have"
            )
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        spec = layer.get_kv_cache_spec(config)
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
            raise ValueError(
                f"xla_gpu.vllm: layer {name}: expected full, sliding-window or latent attention, got "
                f"{type(spec).__name__}: this model is not supported"
            )
        specs[name] = spec
    return specs


def is_bidirectional(layer: Any) -> bool:
    """Whether an attention layer of vLLM's attends in both directions, and keeps nothing."""
    implementation = getattr(layer, "impl", None)
    return isinstance(implementation, XlaGpuAttention) and implementation.is_bidirectional


class KVCaches:
    """The caches' tensors, and which layers use which.

    A launch costs the host time for each tensor that it takes and returns. So caches of one shape and dtype lie one
    behind the other in one tensor, of up to 1 GiB; what the layers of a cache are given are page numbers and slots of
    that tensor. Larger caches are tensors of their own: with tensors of 13 GiB that filled an H200 XLA found no memory
    to time kernels in, and the start failed.

    Attributes:
      tensors: T[caches * num_blocks, block_size, 2 * num_kv_heads, head_size] each, of latents T[caches * num_blocks,
        block_size, head_size]. Programs take them over and return new ones.
      block_sizes: of each KV-cache group.
    """

    MAX_BYTES = 1 << 30

    def __init__(self, config: VllmConfig, cache_config: KVCacheConfig, device: torch.device) -> None:
        self._layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        self._without_cache = [name for name, layer in self._layers.items() if is_bidirectional(layer)]
        specs: dict[str, Any] = {}
        self._group_of_layer: dict[str, int] = {}
        self.block_sizes = []
        for index, group in enumerate(cache_config.kv_cache_groups):
            self.block_sizes.append(group.kv_cache_spec.block_size)
            for name in group.layer_names:
                # Layers of one kind but different sizes have a specification each.
                specs[name] = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                self._group_of_layer[name] = index
        forms: list[tuple[tuple[int, ...], torch.dtype]] = []
        cache_of_layer: dict[str, int] = {}
        dtype_name = config.cache_config.cache_dtype
        for tensor in cache_config.kv_cache_tensors:
            shapes = set()
            for name in tensor.shared_by:
                spec = specs[name]
                num_blocks = tensor.size // spec.page_size_bytes
                backend = XlaGpuLatentBackend if isinstance(spec, MLAAttentionSpec) else XlaGpuAttentionBackend
                shapes.add(backend.get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size))
                cache_of_layer[name] = len(forms)
            if len(shapes) != 1:
                raise ValueError(
                    f"xla_gpu.vllm: layers {', '.join(tensor.shared_by)} share a cache but not its shape "
                    f"({sorted(shapes)}); start with --disable-hybrid-kv-cache-manager"
                )
            forms.append((shapes.pop(), CACHE_DTYPES.get(dtype_name, spec.dtype)))
        for name, layer in self._layers.items():
            if (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None:
                cache_of_layer[name] = cache_of_layer[target]
                self._group_of_layer[name] = self._group_of_layer[target]
        self.tensors, self._place_of_layer = self._allocate(forms, cache_of_layer, device)
        # Pages of a tensor before those of each cache in it.
        pages = sorted({first for _, first in self._place_of_layer.values()})
        self._first_pages = torch.tensor(pages, dtype=torch.int32).to(device)
        self._index_of_first_page = {first: index for index, first in enumerate(pages)}
        torch_xla.sync()

    def _allocate(
        self, forms: list[tuple[tuple[int, ...], torch.dtype]], cache_of_layer: dict[str, int], device: torch.device
    ) -> tuple[list[torch.Tensor], dict[str, tuple[int, int]]]:
        """The tensors, and of each layer its tensor and the first page in it."""
        together: list[tuple[tuple[tuple[int, ...], torch.dtype], int]] = []  # a form, and how many caches have it
        places = []
        for form in forms:
            shape, dtype = form
            most = max(1, self.MAX_BYTES // (math.prod(shape) * dtype.itemsize))
            if together and together[-1][0] == form and together[-1][1] < most:
                together[-1] = (form, together[-1][1] + 1)
            else:
                together.append((form, 1))
            places.append((len(together) - 1, (together[-1][1] - 1) * shape[0]))
        tensors = [_zeros((count * shape[0], *shape[1:]), dtype, device) for (shape, dtype), count in together]
        return tensors, {name: places[index] for name, index in cache_of_layer.items()}

    def metadata(self, groups: Sequence[StepMetadata], batch: BatchMetadata | None = None) -> dict[str, BatchMetadata]:
        """What each layer is given of a step, from what its KV-cache group has, where pages begin at 0.

        batch: what layers without a cache are given, if there are such.
        """
        found: dict[tuple[int, int], StepMetadata] = {}
        first_pages = self._first_pages
        for group, (step, block_size) in enumerate(zip(groups, self.block_sizes, strict=True)):
            # All at once, so that XLA makes one kernel of them.
            tables = step.block_tables + first_pages[:, None, None]
            slots = torch.where(step.slot_mapping < 0, -1, step.slot_mapping + first_pages[:, None] * block_size)
            for first, index in self._index_of_first_page.items():
                moved = {"block_tables": tables[index], "slot_mapping": slots[index]} if first else {}
                found[group, first] = dataclasses.replace(step, **moved)
        of_layers: dict[str, BatchMetadata] = {} if batch is None else dict.fromkeys(self._without_cache, batch)
        for name, group in self._group_of_layer.items():
            of_layers[name] = found[group, self._place_of_layer[name][1]]
        return of_layers

    def groups_of(self, layers: Sequence[str]) -> list[int]:
        """The KV-cache groups of layers."""
        return sorted({self._group_of_layer[name] for name in layers})

    def indices_of(self, layers: Sequence[str]) -> list[int]:
        """Which of the tensors layers use."""
        return sorted({self._place_of_layer[name][0] for name in layers})

    def replace(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Puts what a program returned into the place of what it took over."""
        for index, tensor in zip(indices, tensors, strict=True):
            self.tensors[index] = tensor

    def bind(self) -> None:
        """Gives the layers today's tensors. Needed where the model is traced; programs get them as arguments."""
        for name, (tensor, _) in self._place_of_layer.items():
            self._layers[name].kv_cache = [self.tensors[tensor]]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty cache; over several devices each has its kv heads' part, of latents all."""
    cache = torch.zeros(shape, dtype=dtype, device=device)
    devices = tensor_parallel.active()
    return cache if devices is None else devices.mark_cache(cache)
