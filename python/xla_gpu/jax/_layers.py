"""The other operators of a decoder layer, and sampling."""

# `function` gives these declarations their bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import overload

import jax
import jax.typing

from .._jax import by_parts
from .._jax import experts_mlp as experts
from .._jax.call import function
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
def simple_add(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
    """Returns the element-wise sum a + b."""


@function(_linear.OPERATOR, by_parts.product)
def linear(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    *,
    weight_scale: jax.typing.ArrayLike | None = None,
    weight_zero_point: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    residual: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
) -> jax.Array:
    """Computes the product of rows with a weight matrix, plain or quantised, with bias, activation and residual."""


@function(_grouped_linear.OPERATOR)
def grouped_linear(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    group_sizes: jax.typing.ArrayLike,
    *,
    weight_scale: jax.typing.ArrayLike | None = None,
    weight_zero_point: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """Computes products of groups of rows, each with a weight matrix of its own, plain or quantised."""


@function(_experts_mlp.OPERATOR, experts.run)
def experts_mlp(
    x: jax.typing.ArrayLike,
    gate_up_weight: jax.typing.ArrayLike,
    down_weight: jax.typing.ArrayLike,
    topk_weights: jax.typing.ArrayLike,
    topk_ids: jax.typing.ArrayLike,
    *,
    gate_up_scale: jax.typing.ArrayLike | None = None,
    gate_up_zero_point: jax.typing.ArrayLike | None = None,
    gate_up_bias: jax.typing.ArrayLike | None = None,
    down_scale: jax.typing.ArrayLike | None = None,
    down_zero_point: jax.typing.ArrayLike | None = None,
    down_bias: jax.typing.ArrayLike | None = None,
    activation: str = "silu_and_mul",
) -> jax.Array:
    """Computes the experts of a layer: each row through those that were chosen for it, and their weighted sum."""


@function(_gated_mlp.OPERATOR, by_parts.gated_mlp)
def gated_mlp(
    x: jax.typing.ArrayLike,
    gate_up_weight: jax.typing.ArrayLike,
    down_weight: jax.typing.ArrayLike,
    *,
    norm_weight: jax.typing.ArrayLike | None = None,
    residual: jax.typing.ArrayLike | None = None,
    gate_up_scale: jax.typing.ArrayLike | None = None,
    gate_up_zero_point: jax.typing.ArrayLike | None = None,
    gate_up_bias: jax.typing.ArrayLike | None = None,
    down_scale: jax.typing.ArrayLike | None = None,
    down_zero_point: jax.typing.ArrayLike | None = None,
    down_bias: jax.typing.ArrayLike | None = None,
    activation: str = "silu_and_mul",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> jax.Array:
    """Computes the gated MLP of a decoder layer: norm, gate and up, activation, down, residual."""


@function(_attention_block.OPERATOR, by_parts.attention_block)
def attention_block(
    x: jax.typing.ArrayLike,
    qkv_weight: jax.typing.ArrayLike | None,
    out_weight: jax.typing.ArrayLike | None,
    positions: jax.typing.ArrayLike,
    table: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    slot_mapping: jax.typing.ArrayLike,
    context_lens: jax.typing.ArrayLike,
    block_tables: jax.typing.ArrayLike,
    query_start_loc: jax.typing.ArrayLike,
    num_seqs: jax.typing.ArrayLike,
    *,
    scale: float,
    norm_weight: jax.typing.ArrayLike | None = None,
    residual: jax.typing.ArrayLike | None = None,
    qkv_scale: jax.typing.ArrayLike | None = None,
    qkv_zero_point: jax.typing.ArrayLike | None = None,
    qkv_bias: jax.typing.ArrayLike | None = None,
    q_norm_weight: jax.typing.ArrayLike | None = None,
    k_norm_weight: jax.typing.ArrayLike | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    out_scale: jax.typing.ArrayLike | None = None,
    out_zero_point: jax.typing.ArrayLike | None = None,
    out_bias: jax.typing.ArrayLike | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the attention of a decoder layer, from the norm before its projection to the residual behind it.

    The cache is updated in place, without a copy, where XLA may reuse its buffer, as by reshape_and_cache.
    """


@overload
def rms_norm(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    *,
    eps: float,
    residual: None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> jax.Array: ...
@overload
def rms_norm(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    *,
    eps: float,
    residual: jax.typing.ArrayLike,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[jax.Array, jax.Array]: ...
@function(_rms_norm.OPERATOR)
def rms_norm(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    *,
    eps: float,
    residual: jax.typing.ArrayLike | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the RMS norm of rows, after adding a residual if one is given."""


@function(_silu_and_mul.OPERATOR)
def silu_and_mul(x: jax.typing.ArrayLike) -> jax.Array:
    """Computes silu of the first half of each row, times the second half."""


@function(_silu_and_mul.OPERATOR_GELU)
def gelu_and_mul(x: jax.typing.ArrayLike) -> jax.Array:
    """Computes gelu of the first half of each row, times the second half."""


@function(_rotary_embedding.OPERATOR)
def rotary_embedding(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    positions: jax.typing.ArrayLike,
    table: jax.typing.ArrayLike,
    *,
    interleaved: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Turns query and key heads by their positions, with cosines and sines from a table."""


@function(_rotary_embedding.OPERATOR_AND_CACHE)
def rotary_and_cache(
    qkv: jax.typing.ArrayLike,
    positions: jax.typing.ArrayLike,
    table: jax.typing.ArrayLike,
    kv_cache: jax.typing.ArrayLike,
    slot_mapping: jax.typing.ArrayLike,
    *,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    q_norm_weight: jax.typing.ArrayLike | None = None,
    k_norm_weight: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    interleaved: bool = False,
    norm_eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Makes the query of attention of a projection, and stores keys and values in a cache that it returns.

    The cache is updated in place, without a copy, where XLA may reuse its buffer, as by reshape_and_cache.
    """


@function(_sample.OPERATOR)
def sample(
    logits: jax.typing.ArrayLike,
    *,
    temperature: jax.typing.ArrayLike,
    top_k: jax.typing.ArrayLike,
    top_p: jax.typing.ArrayLike,
    min_p: jax.typing.ArrayLike,
    seed: jax.typing.ArrayLike,
    step: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Chooses a token from each row of logits, by temperature, min-p, top-k and top-p."""
