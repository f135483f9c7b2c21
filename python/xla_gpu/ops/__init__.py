"""The operators: one module each, with its checks, its custom call and its torch.library schema. No framework here."""

from .._signature import Operator
from . import merge_attention_states, paged_attention, ragged_paged_attention, reshape_and_cache, simple_add

OPERATORS: tuple[Operator, ...] = (
    simple_add.OPERATOR,
    paged_attention.OPERATOR,
    paged_attention.OPERATOR_WITH_LSE,
    reshape_and_cache.OPERATOR,
    merge_attention_states.OPERATOR,
    ragged_paged_attention.OPERATOR,
)
