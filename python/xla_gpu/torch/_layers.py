"""The other operators of a decoder layer, and sampling."""

# `function` gives these declarations their bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import overload

import torch

from .._torch.functions import function
from ..ops import attention_block as _attention_block
from ..ops import experts_mlp as _experts_mlp
from ..ops import gated_mlp as _gated_mlp
from ..ops import grouped_linear as _grouped_linear
from ..ops import linear as _linear
from ..ops import rms_norm as _rms_norm
from ..ops import rotary_embedding as _rotary_embedding
from ..ops import sample as _sample
from ..ops import silu_and_mul as _silu_and_mul
from ..ops import simple_add as _simple_add


@function(_simple_add.OPERATOR)
def simple_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the element-wise sum a + b."""


@function(_linear.OPERATOR)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    weight_zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Computes the product of rows with a weight matrix, plain or quantised, with bias, activation and residual."""


@function(_grouped_linear.OPERATOR)
def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    weight_zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes products of groups of rows, each with a weight matrix of its own, plain or quantised."""


@function(_experts_mlp.OPERATOR)
def experts_mlp(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    gate_up_scale: torch.Tensor | None = None,
    gate_up_zero_point: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    down_zero_point: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu_and_mul",
) -> torch.Tensor:
    """Computes the experts of a layer: each row through those that were chosen for it, and their weighted sum."""


@function(_gated_mlp.OPERATOR)
def gated_mlp(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    gate_up_zero_point: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    down_zero_point: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu_and_mul",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """Computes the gated MLP of a decoder layer: norm, gate and up, activation, down, residual."""


@function(_attention_block.OPERATOR)
def attention_block(
    x: torch.Tensor,
    qkv_weight: torch.Tensor | None,
    out_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    qkv_scale: torch.Tensor | None = None,
    qkv_zero_point: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_zero_point: torch.Tensor | None = None,
    out_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the attention of a decoder layer, from the norm before its projection to the residual behind it."""


@function(_attention_block.OPERATOR, in_place=True)
def attention_block_(
    x: torch.Tensor,
    qkv_weight: torch.Tensor | None,
    out_weight: torch.Tensor | None,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    qkv_scale: torch.Tensor | None = None,
    qkv_zero_point: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_zero_point: torch.Tensor | None = None,
    out_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """attention_block that stores keys and values in kv_cache, in place."""


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@function(_rms_norm.OPERATOR)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the RMS norm of rows, after adding a residual if one is given."""


@function(_silu_and_mul.OPERATOR)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu of the first half of each row, times the second half."""


@function(_silu_and_mul.OPERATOR_GELU)
def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes gelu of the first half of each row, times the second half."""


@function(_rotary_embedding.OPERATOR)
def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns query and key heads by their positions, with cosines and sines from a table."""


@function(_rotary_embedding.OPERATOR_AND_CACHE)
def rotary_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    norm_eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the query of attention of a projection, and stores keys and values in a cache that it returns.

    ``rotary_and_cache_`` updates the cache in place.
    """


@function(_rotary_embedding.OPERATOR_AND_CACHE, in_place=True)
def rotary_and_cache_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    norm_eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """Makes the query of attention of a projection, and stores keys and values in a cache in place.

    What reshape_and_cache_ says of its cache holds here too.
    """


@function(_sample.OPERATOR)
def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    step: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token from each row of logits, by temperature, min-p, top-k and top-p."""
