"""mla_attention: multi-head latent attention of the new tokens of a ragged batch over a paged cache of latents."""

from __future__ import annotations

import functools

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, IntOperand, Operator, Signature
from .._core.partitioning import Partitioning
from .paged_attention import check_metadata

_DOCSTRING = """
Attention of DeepSeek V2, V3 and R1 and of Kimi K2 in its absorbed form (DeepSeek-AI, 2024, "DeepSeek-V2: A Strong,
Economical, and Efficient Mixture-of-Experts Language Model", arXiv:2405.04434, section 2.1). All heads share one key
for each token, the latent and behind it the rotary key; the key's first value_dim elements are its value. The matrix
``kv_b_proj``, which makes each head's keys and values of latents, is absorbed into the query and the output: multiply
each head's ``q_nope`` by the head's part of kv_b_proj for keys, put ``q_pe`` behind it, and multiply the result by the
head's part for values.

Sequences of any length share one call: prefill, chunked prefill and decode rows may be mixed. Attention is causal, and
aligned to the end of the context: row i of a sequence with q_len new tokens has position ``context_len - q_len + i``
and sees the keys up to that position. Scores, softmax and sums are computed in float32.

Args:
  query: T[num_tokens, num_heads, head_dim], the new tokens of all sequences, one sequence after the other. T is
    float32, float16 or bfloat16; head_dim is a multiple of 8, at most 576.
  kv_cache: T[num_pages, page_size, head_dim], vLLM's cache of latents: kv_lora_rank elements of the latent, then the
    rotary key. The new tokens are stored already: see concat_and_cache_mla.
  context_lens: int32[max_seqs], the number of tokens of each sequence, new ones included.
  block_tables: ``int32[max_seqs, pages_per_seq]``. Tokens ``i * page_size`` to ``(i + 1) * page_size - 1`` of
    sequence s are in page ``block_tables[s, i]``.
  query_start_loc: ``int32[max_seqs + 1]``. Sequence s has the rows ``query_start_loc[s]:query_start_loc[s + 1]`` of
    query.
  num_seqs: int32[1] or int32[], how many of the max_seqs sequences are in use; or a Python int. Inside
    jax.jit and torch.compile an int is part of the compiled program: pass an array where it changes between steps.
  scale: a Python number that multiplies ``q . k``. Of the model's head, not of the latent: in DeepSeek V3
    ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, times YaRN's factor.
  value_dim: a Python int, a multiple of 8 from 8 to head_dim, at most 512: the latent's elements (kv_lora_rank).

Returns:
  T[num_tokens, num_heads, value_dim]. Rows that see no key are 0, and so are padding rows, those from
  ``query_start_loc[num_seqs]`` on.

Raises:
  TypeError: an argument is no array or number of the kind expected, or has another dtype.
  ValueError: an argument has another shape, or a number is out of range.

Note: Values that are never read
  Entries of the metadata from num_seqs on, entries of block_tables past a sequence's context, and cache slots past it
  may hold anything, NaN included.

Note: Wrong values in context_lens, block_tables, query_start_loc or num_seqs
  They never cause an access out of bounds, and never change another sequence's result. On a CPU the call fails with
  an error that names the sequence. On CUDA the rows of that sequence are NaN; with ``XLA_GPU_CHECK_INPUTS=1`` in the
  environment when the call is traced, the handler waits for the device, checks the values and returns the error.
"""

_DOCSTRING_WITH_LSE = """
It takes the arguments of mla_attention. With the log-sum-exp, merge_attention_states combines results over disjoint
sets of keys, such as prefixes that sequences share.

Returns:
  ``(out, lse)``: out as of mla_attention; lse float32[num_tokens, num_heads], the natural logarithm of the sum of
    ``exp(score)`` over the keys that the row sees; -inf for rows that see no key.
"""

MAX_HEAD_DIM = 576
MAX_VALUE_DIM = 512

_ARGUMENTS = (
    "(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, Tensor query_start_loc, "
    "Tensor num_seqs, *, float scale, int value_dim)"
)


def _signature(
    check: Checks,
    with_lse: bool,
    query: ArraySpec,
    kv_cache: ArraySpec,
    context_lens: ArraySpec,
    block_tables: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
    *,
    scale: float,
    value_dim: int,
    check_inputs: bool = False,
) -> Signature:
    check.dtype("query", query, FLOATS)
    num_tokens, num_heads, head_dim = check.rank("query", query, "num_tokens, num_heads, head_dim")
    if head_dim % 8 != 0 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise check.value_error("query", f"head_dim a multiple of 8 from 8 to {MAX_HEAD_DIM}", query)
    if num_heads < 1:
        raise check.value_error("query", "num_heads >= 1", query)
    check.dtype("kv_cache", kv_cache, (query.dtype,), " (as query)")
    _, page_size, width = check.rank("kv_cache", kv_cache, "num_pages, page_size, head_dim")
    if width != head_dim:
        raise check.value_error("kv_cache", f"head_dim {head_dim} (as query)", kv_cache)
    if page_size < 1:
        raise check.value_error("kv_cache", "page_size >= 1", kv_cache)
    check_metadata(check, context_lens, block_tables, query_start_loc, num_seqs)
    largest = min(head_dim, MAX_VALUE_DIM)
    value_dim = check.integer("value_dim", value_dim, 0)
    if value_dim % 8 != 0 or not 8 <= value_dim <= largest:
        raise check.value_error("value_dim", f"a multiple of 8 from 8 to {largest}", value_dim)
    attributes = {
        "scale": check.float32("scale", scale),
        "value_dim": np.int64(value_dim),
        "check_inputs": np.bool_(check_inputs),
    }
    out = ArraySpec((num_tokens, num_heads, value_dim), query.dtype)
    lse = (ArraySpec((num_tokens, num_heads), "float32"),) if with_lse else ()
    heads = (None, "heads", None)
    partitioning = Partitioning(  # over heads: each device has the whole cache
        operands={"query": heads},
        results=(heads, (None, "heads"))[: 2 if with_lse else 1],
        sizes={"heads": num_heads},
        never_gathered=("kv_cache",),
    )
    return Signature((out, *lse), attributes, partitioning=partitioning)


def _operator(name: str, returns: str, docstring: str, *, with_lse: bool) -> Operator:
    return Operator(
        name,
        f"{_ARGUMENTS} -> {returns}",
        functools.partial(_signature, Checks(name), with_lse),
        docstring,
        has_scratch=True,
        int_operands=(IntOperand("num_seqs", bounded_by="context_lens"),),
    )


OPERATOR = _operator("mla_attention", "Tensor", _DOCSTRING, with_lse=False)
OPERATOR_WITH_LSE = _operator("mla_attention_with_lse", "(Tensor, Tensor)", _DOCSTRING_WITH_LSE, with_lse=True)
