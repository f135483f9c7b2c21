"""The operators: one module each, with its checks, its custom call and its torch.library schema. No framework here."""

from .._core.operator import Operator
from . import (
    all_reduce,
    attention_block,
    bidirectional_attention,
    concat_and_cache_mla,
    experts_mlp,
    gated_mlp,
    grouped_linear,
    linear,
    merge_attention_states,
    mla_attention,
    paged_attention,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    sample,
    silu_and_mul,
    simple_add,
)

# Those with handlers of their own. ragged_paged_attention is another face of paged_attention's.
OPERATORS: tuple[Operator, ...] = (
    simple_add.OPERATOR,
    paged_attention.OPERATOR,
    paged_attention.OPERATOR_WITH_LSE,
    reshape_and_cache.OPERATOR,
    merge_attention_states.OPERATOR,
    all_reduce.OPERATOR,
    all_reduce.OPERATOR_ADD_RMS_NORM,
    linear.OPERATOR,
    grouped_linear.OPERATOR,
    gated_mlp.OPERATOR,
    attention_block.OPERATOR,
    bidirectional_attention.OPERATOR,
    mla_attention.OPERATOR,
    mla_attention.OPERATOR_WITH_LSE,
    concat_and_cache_mla.OPERATOR,
    rms_norm.OPERATOR,
    silu_and_mul.OPERATOR,
    silu_and_mul.OPERATOR_GELU,
    sample.OPERATOR,
    rotary_embedding.OPERATOR,
    rotary_embedding.OPERATOR_AND_CACHE,
)

# Made of others and the framework's operations, without a handler of their own.
COMPOSITES: tuple[Operator, ...] = (experts_mlp.OPERATOR,)
