"""vLLM's attention layers on this library's two operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import xla_gpu.torch as xg

from .image_attention import ImageBlocks

try:
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
except ImportError:  # before vLLM 0.14
    from vllm.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionType

# vLLM's names of the caches' dtypes, as far as they are taken.
CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
MAX_HEAD_SIZE = 256

# Of more, one call of both operators is no faster than two.
MAX_BLOCK_ROWS = 32


@dataclasses.dataclass
class BatchMetadata:
    """What attention layers without a cache need of a step; see xla_gpu.torch.bidirectional_attention."""

    query_start_loc: torch.Tensor
    num_seqs: torch.Tensor


@dataclasses.dataclass
class StepMetadata(BatchMetadata):
    """What the attention layers of one KV-cache group need of a step; see xla_gpu.torch.paged_attention.

    blocks: rows that attend to each other, whichever comes first; None: there are none.
    """

    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    blocks: ImageBlocks | None = None


class XlaGpuAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks about the backend."""

    accept_output_buffer = False
    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM's registry: that of back ends from elsewhere."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[XlaGpuAttention]:
        """The layers' implementation."""
        return XlaGpuAttention

    @staticmethod
    def get_builder_cls() -> Any:
        """What vLLM derives the builder of an encoder's layers from; its own runners alone make one."""
        try:
            from vllm.v1.attention.backend import AttentionMetadataBuilder
        except ImportError:  # of earlier versions
            from vllm.v1.attention.backends.utils import AttentionMetadataBuilder
        return AttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The layout of a layer's cache: K of head h at 2h, V at 2h + 1."""
        return (num_blocks, block_size, 2 * num_kv_heads, head_size)


class XlaGpuAttention(AttentionImpl):  # type: ignore[misc]
    """One attention layer: stores the new keys and values in its cache, and attends to it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        self.is_bidirectional = attn_type == AttentionType.ENCODER_ONLY
        refused = {
            "alibi_slopes": alibi_slopes,
            "attn_type": attn_type if attn_type != AttentionType.DECODER and not self.is_bidirectional else None,
            "sinks in both directions": sinks if self.is_bidirectional else None,
            **others,
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"xla_gpu.vllm: this model's attention needs {name} = {value!r}, which is not supported"
                )
        if head_size % 8 or head_size > MAX_HEAD_SIZE:
            raise ValueError(
                f"xla_gpu.vllm: head size: expected a multiple of 8 up to {MAX_HEAD_SIZE}, got {head_size}"
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.soft_cap = logits_soft_cap or None
        self.sinks = sinks
        self.stores_keys = kv_sharing_target_layer_name is None and not self.is_bidirectional
        self.float8_cache = kv_cache_dtype in CACHE_DTYPES

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """T[num_tokens, num_heads * head_size] from query, key and value of the same form.

        Without metadata, where no result is needed, query.
        """
        num_tokens = query.shape[0]
        if attn_metadata is None:
            return query.reshape(num_tokens, self.num_heads * self.head_size)
        if self.is_bidirectional:
            return self._attend_to_all(query, key, value, attn_metadata)
        scales = self._scales(layer, query.device)
        if self.stores_keys:
            shape = (num_tokens, self.num_kv_heads, self.head_size)
            xg.reshape_and_cache_(key.view(shape), value.view(shape), kv_cache, attn_metadata.slot_mapping, **scales)
        return self._attend(query.view(num_tokens, self.num_heads, self.head_size), kv_cache, attn_metadata, scales)

    def forward_projected(
        self,
        layer: Any,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata,
        **rotation: Any,
    ) -> torch.Tensor:
        """T[num_tokens, num_heads * head_size] from the projection itself, T[num_tokens, heads of all three].

        ``rotation``: options of xla_gpu.torch.rotary_and_cache_, as ``table`` is its.
        """
        if qkv.shape[0] <= MAX_BLOCK_ROWS and attn_metadata.blocks is None:
            return self.forward_block(layer, qkv, {}, positions, table, kv_cache, attn_metadata, **rotation)
        scales = self._scales(layer, qkv.device)
        slots = attn_metadata.slot_mapping
        query = xg.rotary_and_cache_(qkv, positions, table, kv_cache, slots, **scales, **rotation)
        return self._attend(query, kv_cache, attn_metadata, scales)

    def forward_block(
        self,
        layer: Any,
        x: torch.Tensor,
        weights: dict[str, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata,
        norm_eps: float = 0.0,
        **rotation: Any,
    ) -> torch.Tensor:
        """The same as one call, with the products before and behind where their weights are given.

        Args:
          layer: vLLM's.
          x: the projection, or with weights what it is computed from.
          weights: operands of xla_gpu.torch.attention_block_ that belong to its products.
          positions: int32[num_tokens].
          table: of rotary_and_cache_.
          kv_cache: of the layer.
          attn_metadata: of the step.
          norm_eps: of rotary_and_cache_.
          rotation: its other options.

        Returns:
          T[num_tokens, num_heads * head_size], or the second product.
        """
        step, others = attn_metadata, dict(weights)
        return xg.attention_block_(
            x,
            others.pop("qkv_weight", None),
            others.pop("out_weight", None),
            positions,
            table,
            kv_cache,
            step.slot_mapping,
            step.context_lens,
            step.block_tables,
            step.query_start_loc,
            step.num_seqs,
            **self._scores(),
            eps=norm_eps,
            **self._scales(layer, x.device),
            **rotation,
            **others,
        )

    def _attend_to_all(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: BatchMetadata
    ) -> torch.Tensor:
        num_tokens = query.shape[0]
        attended = xg.bidirectional_attention(
            query.reshape(num_tokens, self.num_heads, self.head_size),
            key.reshape(num_tokens, self.num_kv_heads, self.head_size),
            value.reshape(num_tokens, self.num_kv_heads, self.head_size),
            step.query_start_loc,
            step.num_seqs,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        return attended.reshape(num_tokens, self.num_heads * self.head_size)

    def _scores(self) -> dict[str, Any]:
        """What is done to scores, of both of attention's operators."""
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "sinks": None if self.sinks is None else self.sinks.float(),
        }

    def _scales(self, layer: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """Of a float8 cache."""
        if not self.float8_cache:
            return {}
        return {
            "k_scale": torch.full((1,), layer._k_scale_float, dtype=torch.float32, device=device),
            "v_scale": torch.full((1,), layer._v_scale_float, dtype=torch.float32, device=device),
        }

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, step: StepMetadata, scales: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        where = {
            "context_lens": step.context_lens,
            "block_tables": step.block_tables,
            "query_start_loc": step.query_start_loc,
            "num_seqs": step.num_seqs,
            **self._scores(),
            **scales,
        }
        if step.blocks is None:
            attended = xg.paged_attention(query, kv_cache, **where)
        else:
            before, lse = xg.paged_attention_with_lse(query, kv_cache, **where)
            behind, their_lse = step.blocks.attend_behind(
                query, kv_cache, step.slot_mapping, scale=self.scale, soft_cap=self.soft_cap, **scales
            )
            attended, _ = xg.merge_attention_states(before, lse, behind, their_lse)
        return attended.reshape(query.shape[0], self.num_heads * self.head_size)
