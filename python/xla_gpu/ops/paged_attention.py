"""paged_attention: attention of the new tokens of a ragged batch over a paged KV cache."""

from __future__ import annotations

import functools

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, IntOperand, Operator, Signature
from .._core.partitioning import Partitioning
from ._cache import cache_axes, check_cache, check_scales

_DOCSTRING = """
Sequences of any length share one call: prefill, chunked prefill, speculative and decode rows may be mixed. Attention
is causal unless there is a tree_mask, and aligned to the end of the context: row i of a sequence with q_len new tokens
has position ``context_len - q_len + i`` and sees the keys up to that position. Query head h uses KV head
``h // (num_heads // num_kv_heads)`` (grouped-query attention). Scores, softmax and sums are computed in float32.

Keys and values live in pages of a cache that all sequences share, as in PagedAttention (Kwon et al., 2023, "Efficient
Memory Management for Large Language Model Serving with PagedAttention"). The argument names are vLLM's.

Args:
  query: T[num_tokens, num_heads, head_dim], the new tokens of all sequences, one sequence after the other. T is
    float32, float16 or bfloat16; num_heads is a multiple of num_kv_heads; head_dim is a multiple of 8, at most 256.
  kv_cache: ``T[num_pages, page_size, 2 * num_kv_heads, head_dim]`` with K of head h at index 2h and V at 2h + 1
    (torch_xla's layout), or ``T[2, num_pages, page_size, num_kv_heads, head_dim]`` with K at index 0 and V at 1
    (vLLM's). Of query's dtype, or float8_e4m3fn or float8_e5m2. K and V of the new tokens are stored already: see
    reshape_and_cache.
  context_lens: int32[max_seqs], the number of tokens of each sequence, new ones included.
  block_tables: ``int32[max_seqs, pages_per_seq]``. Tokens ``i * page_size`` to ``(i + 1) * page_size - 1`` of
    sequence s are in page ``block_tables[s, i]``.
  query_start_loc: ``int32[max_seqs + 1]``. Sequence s has the rows ``query_start_loc[s]:query_start_loc[s + 1]`` of
    query.
  num_seqs: int32[1] or int32[], how many of the max_seqs sequences are in use; or a Python int. Inside
    jax.jit and torch.compile an int is part of the compiled program: pass an array where it changes between steps.
  scale: a Python number that multiplies ``q . k``; usually ``head_dim ** -0.5``.
  sliding_window: a Python int of at least 1. A query sees the last ``sliding_window`` keys up to its own position,
    itself included. None: all of them.
  soft_cap: a Python number from 2**-100 to 2**13. Scores become ``soft_cap * tanh(score / soft_cap)``, after scale and
    before the mask (Gemma 2). For float16 and bfloat16 queries on CUDA tanh is the GPU's instruction, whose relative
    error is at most 2**-11; elsewhere float32's. None: off.
  k_scale: float32[1] or float32[num_kv_heads], required with a float8 cache and refused with others. The kernels use
    ``K * k_scale``.
  v_scale: as k_scale, for V.
  sinks: float32[num_heads]. Each head's logit takes part in the softmax's denominator and has no value (attention
    sinks, gpt-oss). Natural-logarithm units, not scaled. None: off.
  tree_mask: ``uint32[num_tokens, words]`` of one or two words, for tree-structured speculative decoding (Miao et al.,
    2023, "SpecInfer"). Row i of a sequence sees new token j of the same sequence where bit ``j % 32`` of word
    ``j // 32`` of its row is set, instead of where ``j <= i``; its own bit is among them. The context before the new
    tokens it sees always. A sequence has at most ``32 * words`` new tokens. sliding_window counts from row i's place
    in the cache, ``context_len - q_len + i``, and hides earlier keys, new ones included. None: causal.

Returns:
  T[num_tokens, num_heads, head_dim]. Rows that see no key are 0, and so are padding rows, those from
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
It takes the arguments of paged_attention. With the log-sum-exp, merge_attention_states combines results over disjoint
sets of keys.

Returns:
  ``(out, lse)``: out as of paged_attention; lse float32[num_tokens, num_heads], the natural logarithm of the sum of
    ``exp(score)`` over the keys that the row sees, sinks included; -inf for rows that see no key.
"""

MAX_HEAD_DIM = 256

_ARGUMENTS = (
    "(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, Tensor query_start_loc, "
    "Tensor num_seqs, *, float scale, int? sliding_window=None, float? soft_cap=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? sinks=None, Tensor? tree_mask=None)"
)


def signature(
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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    sinks: ArraySpec | None = None,
    tree_mask: ArraySpec | None = None,
    check_inputs: bool = False,
) -> Signature:
    """The signature of any operator that is paged attention; ``check`` names the operator and its arguments."""
    check.dtype("query", query, FLOATS)
    num_tokens, num_heads, head_dim = check.rank("query", query, "num_tokens, num_heads, head_dim")
    if head_dim % 8 != 0 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise check.value_error("query", f"head_dim a multiple of 8 from 8 to {MAX_HEAD_DIM}", query)

    cache = check_cache(check, kv_cache, query.dtype, "query")
    if cache.head_dim != head_dim:
        raise check.value_error("kv_cache", f"head_dim {head_dim} (as query)", kv_cache)
    if num_heads < 1 or num_heads % cache.num_kv_heads != 0:
        raise check.value_error("query", f"num_heads a multiple of num_kv_heads = {cache.num_kv_heads}", query)

    check_metadata(check, context_lens, block_tables, query_start_loc, num_seqs)
    kv_scales = check_scales(check, kv_cache, cache.num_kv_heads, k_scale, v_scale)
    if sinks is not None:
        check.dtype("sinks", sinks, ("float32",))
        check.shape("sinks", sinks, (num_heads,), "num_heads")
    if tree_mask is not None:
        _check_tree_mask(check, tree_mask, num_tokens)

    attributes = {
        "scale": check.float32("scale", scale),
        "sliding_window": np.int64(0 if sliding_window is None else check.integer("sliding_window", sliding_window, 1)),
        "soft_cap": np.float32(0) if soft_cap is None else check_soft_cap(check, soft_cap),
        "check_inputs": np.bool_(check_inputs),
        "kv_scales": np.bool_(kv_scales),
        "has_sinks": np.bool_(sinks is not None),
    }
    lse = (ArraySpec((num_tokens, num_heads), "float32"),) if with_lse else ()
    partitioning = _partitioning(check, with_lse, kv_cache, cache.num_kv_heads, k_scale)
    return Signature(results=(query, *lse), attributes=attributes, partitioning=partitioning)


def _partitioning(
    check: Checks, with_lse: bool, kv_cache: ArraySpec, num_kv_heads: int, k_scale: ArraySpec | None
) -> Partitioning:
    """Over kv heads."""
    scale_axes = ("kv_heads" if k_scale is not None and k_scale.shape[0] == num_kv_heads else None,)
    axes = {
        "query": (None, "kv_heads", None),
        "kv_cache": cache_axes(kv_cache),
        "k_scale": scale_axes,
        "v_scale": scale_axes,
        "sinks": ("kv_heads",),
        "tree_mask": (None, None),
    }
    return Partitioning(
        operands={check.argument(name): dims for name, dims in axes.items()},
        results=(axes["query"], (None, "kv_heads"))[: 2 if with_lse else 1],
        sizes={"kv_heads": num_kv_heads},
        never_gathered=(check.argument("kv_cache"),),
    )


def check_metadata(
    check: Checks,
    context_lens: ArraySpec,
    block_tables: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
) -> None:
    """Checks the sequences' metadata, as every attention over a paged cache takes it."""
    for argument, spec in (
        ("context_lens", context_lens),
        ("block_tables", block_tables),
        ("query_start_loc", query_start_loc),
        ("num_seqs", num_seqs),
    ):
        check.dtype(argument, spec, ("int32",))
    (max_seqs,) = check.rank("context_lens", context_lens, "max_seqs")
    _, pages_per_seq = check.rank("block_tables", block_tables, "max_seqs, pages_per_seq")
    check.shape("block_tables", block_tables, (max_seqs, pages_per_seq), "max_seqs, pages_per_seq")
    check.shape("query_start_loc", query_start_loc, (max_seqs + 1,), "max_seqs + 1")
    check.shape("num_seqs", num_seqs, (1,), "1")


def _check_tree_mask(check: Checks, tree_mask: ArraySpec, num_tokens: int) -> None:
    check.dtype("tree_mask", tree_mask, ("uint32",))
    _, words = check.rank("tree_mask", tree_mask, "num_tokens, words")
    if tree_mask.shape[0] != num_tokens or words not in (1, 2):
        expected = f"shape [{num_tokens}, 1] or [{num_tokens}, 2] ([num_tokens, words])"
        raise check.value_error("tree_mask", expected, tree_mask)


def check_soft_cap(check: Checks, soft_cap: float) -> np.float32:
    """A soft cap as handlers take it."""
    expected = "a number from 2**-100 to 2**13, or None for no soft cap"
    return check.float32("soft_cap", soft_cap, 2.0**-100, 2.0**13, expected)


def _operator(name: str, returns: str, docstring: str, *, with_lse: bool, target: str = "") -> Operator:
    return Operator(
        name,
        f"{_ARGUMENTS} -> {returns}",
        functools.partial(signature, Checks(name), with_lse),
        docstring,
        has_scratch=True,
        int_operands=(IntOperand("num_seqs", bounded_by="context_lens"),),
        target=target,
    )


OPERATOR = _operator("paged_attention", "Tensor", _DOCSTRING, with_lse=False)
OPERATOR_WITH_LSE = _operator("paged_attention_with_lse", "(Tensor, Tensor)", _DOCSTRING_WITH_LSE, with_lse=True)
# The same, as part of another function, which errors name.
OPERATOR_OF_CONTEXT_PARALLEL = _operator(
    "context_parallel_paged_attention", "(Tensor, Tensor)", "", with_lse=True, target=OPERATOR_WITH_LSE.target
)
