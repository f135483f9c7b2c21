"""bidirectional_attention: attention over whole sequences without a cache, each query to all keys of its sequence."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, IntOperand, Operator, Signature
from .._core.partitioning import Partitioning
from .paged_attention import MAX_HEAD_DIM, check_soft_cap

_DOCSTRING = """
Each query sees all keys of its sequence, those behind it too, as in an encoder (BERT and its kin, embedding models).
Sequences of any length share one call. Query head h uses KV head ``h // (num_heads // num_kv_heads)``. Scores, softmax
and sums are computed in float32, and the result rounds to T once. It is one kernel, which reads queries, keys and
values where they lie and takes no scratch memory. The bits of a sequence's rows do not depend on the other sequences.

Args:
  query: T[num_tokens, num_heads, head_dim], the tokens of all sequences, one sequence after the other. T is float32,
    float16 or bfloat16; num_heads is a multiple of num_kv_heads; head_dim is a multiple of 8, at most 256.
  key: T[num_tokens, num_kv_heads, head_dim], of the same tokens.
  value: of the shape and dtype of key.
  query_start_loc: ``int32[max_seqs + 1]``. Sequence s has the rows ``query_start_loc[s]:query_start_loc[s + 1]``.
  num_seqs: int32[1] or int32[], how many of the max_seqs sequences are in use; or a Python int. Inside
    jax.jit and torch.compile an int is part of the compiled program: pass an array where it changes between steps.
  scale: a Python number that multiplies ``q . k``; usually ``head_dim ** -0.5``.
  sliding_window: a Python int of at least 1. Query i sees key j where ``abs(i - j) < sliding_window``: on either side
    as many keys as in paged_attention. vLLM's encoders count alike; FlashAttention's ``window_size=(w, w)`` is w + 1
    here, and ModernBERT's ``local_attention=n`` is ``n // 2 + 1``. None: all keys.
  soft_cap: as in paged_attention. For float16 and bfloat16 on CUDA tanh is the GPU's instruction, as there.

Returns:
  T[num_tokens, num_heads, head_dim]. Padding rows, those before ``query_start_loc[0]`` and from
  ``query_start_loc[num_seqs]`` on, are 0.

Raises:
  TypeError: an argument is no array or number of the kind expected, or has another dtype.
  ValueError: an argument has another shape, or a number is out of range.

Note: Values that are never read
  Entries of query_start_loc past num_seqs, and padding rows of query, key and value, may hold anything, NaN included.

Note: Wrong values in query_start_loc or num_seqs
  They never cause an access out of bounds. On a CPU the call fails with an error that names the sequence. On CUDA all
  rows are NaN; with ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the handler waits for the
  device, checks the values and returns the error.
"""

_check = Checks("bidirectional_attention")


def _signature(
    query: ArraySpec,
    key: ArraySpec,
    value: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    check_inputs: bool = False,
) -> Signature:
    axes = "num_tokens, num_kv_heads, head_dim"
    _check.dtype("query", query, FLOATS)
    num_tokens, num_heads, head_dim = _check.rank("query", query, "num_tokens, num_heads, head_dim")
    if head_dim % 8 != 0 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise _check.value_error("query", f"head_dim a multiple of 8 from 8 to {MAX_HEAD_DIM}", query)
    _check.dtype("key", key, (query.dtype,), " (as query)")
    _, num_kv_heads, _ = _check.rank("key", key, axes)
    _check.shape("key", key, (num_tokens, num_kv_heads, head_dim), axes)
    _check.dtype("value", value, (query.dtype,), " (as query)")
    _check.shape("value", value, key.shape, axes)
    if num_kv_heads < 1:
        raise _check.value_error("key", "num_kv_heads >= 1", key)
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise _check.value_error("query", f"num_heads a multiple of num_kv_heads = {num_kv_heads}", query)
    _check.dtype("query_start_loc", query_start_loc, ("int32",))
    (starts,) = _check.rank("query_start_loc", query_start_loc, "max_seqs + 1")
    if starts < 1:
        raise _check.value_error("query_start_loc", "shape [max_seqs + 1]", query_start_loc)
    _check.dtype("num_seqs", num_seqs, ("int32",))
    _check.shape("num_seqs", num_seqs, (1,), "1")
    attributes = {
        "scale": _check.float32("scale", scale),
        "sliding_window": np.int64(
            0 if sliding_window is None else _check.integer("sliding_window", sliding_window, 1)
        ),
        "soft_cap": np.float32(0) if soft_cap is None else check_soft_cap(_check, soft_cap),
        "check_inputs": np.bool_(check_inputs),
    }
    heads = (None, "kv_heads", None)
    partitioning = Partitioning(dict.fromkeys(("query", "key", "value"), heads), (heads,), {"kv_heads": num_kv_heads})
    return Signature((query,), attributes, partitioning=partitioning)


OPERATOR = Operator(
    "bidirectional_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor num_seqs, *, float scale, "
    "int? sliding_window=None, float? soft_cap=None) -> Tensor",
    _signature,
    _DOCSTRING,
    int_operands=(IntOperand("num_seqs", bounded_by="query_start_loc", others=1),),
)
