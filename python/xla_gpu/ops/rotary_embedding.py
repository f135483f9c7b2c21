"""rotary_embedding: query and key heads turned; rotary_and_cache: with norms, bias and the cache update around it."""

from __future__ import annotations

import functools

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning
from ._cache import CacheShape, check_cache, check_scales
from .rms_norm import norm_attributes

_MAX_HEAD_DIM = 512  # of rotary_and_cache; attention takes up to 256

_DOCSTRING = """
Element i of a head turns with element i + rotary_dim / 2 by the i-th angle of the token's position (Su et al., 2021,
RoFormer; in the order of Hugging Face's models): ``out[i] = x[i] * cos - x[i + rotary_dim / 2] * sin`` and ``out[i +
rotary_dim / 2] = x[i + rotary_dim / 2] * cos + x[i] * sin``, computed in float32 and rounded once. Elements from
rotary_dim on pass.

Args:
  query: T[num_tokens, num_heads, head_dim]. T is float32, float16 or bfloat16.
  key: T[num_tokens, num_kv_heads, head_dim].
  positions: int32[num_tokens], rows of table.
  table: float32[max_positions, rotary_dim / 2, 2], the cosine and the sine of each position's angles. rotary_dim is at
    most head_dim.
  interleaved: True: element 2i turns with 2i + 1 instead (GPT-J, GLM).

Returns:
  ``(query, key)``, turned, of the shapes and dtypes of the operands.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape.

Note: Positions past the table
  On a CPU the call fails, with an error that names the token. On CUDA the token's heads are NaN; with
  ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the call fails as on a CPU.
"""

_DOCSTRING_AND_CACHE = """
One kernel does what stands between a layer's projection and its attention: it adds the bias, applies the RMS norm of
each query and key head (Qwen 3, Gemma 3), turns query and key heads as rotary_embedding does, and stores keys and
values in the cache's slots as reshape_and_cache does. Each of these results is rounded to T, as by these operators one
after the other.

Args:
  qkv: T[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the heads of query, key and value side by side. T is
    float32, float16 or bfloat16; num_kv_heads and head_dim are the cache's.
  positions: int32[num_tokens], rows of table; of padding rows too.
  table: float32[max_positions, rotary_dim / 2, 2], as of rotary_embedding.
  kv_cache: the cache, in either layout and any dtype that paged_attention takes; head_dim up to 512.
  slot_mapping: int32[num_slots] or int64[num_slots], as of reshape_and_cache. Tokens without a slot get their query.
  k_scale: as of reshape_and_cache, with a float8 cache.
  v_scale: as k_scale.
  q_norm_weight: T[head_dim], or None for no norm of query heads.
  k_norm_weight: T[head_dim], or None for no norm of key heads.
  bias: T[(num_heads + 2 * num_kv_heads) * head_dim], or None.
  interleaved: as of rotary_embedding.
  norm_eps: a Python number >= 0, the norms' epsilon.
  weight_offset: as of rms_norm, for the norms.
  round_once: as of rms_norm, for the norms.

Returns:
  ``(query, kv_cache)``: T[num_tokens, num_heads, head_dim], and the cache with the new tokens. All other slots keep
  their bits. The form that updates in place returns the query alone.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape, or a number is out of its range.

Note: Positions past the table and slots past the cache
  On a CPU the call fails, with an error that names the token, and nothing is written. On CUDA the query and the key of
  such a position are NaN, and such a slot is skipped; with ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call
  is traced, the call fails as on a CPU.
"""

_check = Checks("rotary_embedding")


def _check_rotation(check: Checks, positions: ArraySpec, table: ArraySpec, num_tokens: int, head_dim: int) -> None:
    check.dtype("positions", positions, ("int32",))
    check.shape("positions", positions, (num_tokens,), "num_tokens")
    check.dtype("table", table, ("float32",))
    _, half, two = check.rank("table", table, "max_positions, rotary_dim / 2, 2")
    if two != 2 or 2 * half > head_dim:
        raise check.value_error(
            "table", f"[max_positions, rotary_dim / 2, 2] with rotary_dim <= head_dim = {head_dim}", table
        )


def _signature(
    query: ArraySpec,
    key: ArraySpec,
    positions: ArraySpec,
    table: ArraySpec,
    *,
    interleaved: bool = False,
    check_inputs: bool = False,
) -> Signature:
    axes = "num_tokens, num_heads, head_dim"
    _check.dtype("query", query, FLOATS)
    num_tokens, num_heads, head_dim = _check.rank("query", query, axes)
    _check.dtype("key", key, (query.dtype,), " (as query)")
    if _check.rank("key", key, axes)[::2] != (num_tokens, head_dim):
        raise _check.value_error("key", f"[num_tokens = {num_tokens}, num_kv_heads, head_dim = {head_dim}]", key)
    _check_rotation(_check, positions, table, num_tokens, head_dim)
    attributes = {
        "interleaved": np.bool_(_check.boolean("interleaved", interleaved)),
        "check_inputs": np.bool_(check_inputs),
    }
    num_kv_heads = key.shape[1]
    by_heads = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    heads = ("num_tokens", "kv_heads" if by_heads else None, None)
    partitioning = Partitioning(
        operands={"query": heads, "key": heads, "positions": ("num_tokens",)},
        results=(heads, heads),
        sizes={"num_tokens": num_tokens, "kv_heads": num_kv_heads},
    )
    return Signature((query, key), attributes, partitioning=partitioning)


def _num_query_heads(check: Checks, qkv: ArraySpec, cache: CacheShape) -> int:
    """Heads of qkv that are not the cache's."""
    num_heads = qkv.shape[1] // cache.head_dim - 2 * cache.num_kv_heads
    if qkv.shape[1] % cache.head_dim != 0 or num_heads < 1:
        raise check.value_error(
            "qkv",
            f"[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] with num_kv_heads {cache.num_kv_heads} and "
            f"head_dim {cache.head_dim} (as kv_cache)",
            qkv,
        )
    return num_heads


def signature_and_cache(
    check: Checks,
    qkv: ArraySpec,
    positions: ArraySpec,
    table: ArraySpec,
    kv_cache: ArraySpec,
    slot_mapping: ArraySpec,
    *,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    q_norm_weight: ArraySpec | None = None,
    k_norm_weight: ArraySpec | None = None,
    bias: ArraySpec | None = None,
    interleaved: bool = False,
    norm_eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
    check_inputs: bool = False,
) -> Signature:
    """The signature of any operator that stores keys and values so; ``check`` names the operator and its arguments."""
    check.dtype("qkv", qkv, FLOATS)
    num_tokens, width = check.rank("qkv", qkv, "num_tokens, (num_heads + 2 * num_kv_heads) * head_dim")
    cache = check_cache(check, kv_cache, qkv.dtype, "qkv")
    head_dim = cache.head_dim
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        raise check.value_error("kv_cache", f"a head_dim from 1 to {_MAX_HEAD_DIM}", kv_cache)
    num_heads = _num_query_heads(check, qkv, cache)
    _check_rotation(check, positions, table, num_tokens, head_dim)
    check.dtype("slot_mapping", slot_mapping, ("int32", "int64"))
    (num_slots,) = check.rank("slot_mapping", slot_mapping, "num_slots")
    if num_slots > num_tokens:
        raise check.value_error("slot_mapping", f"at most num_tokens = {num_tokens} slots", slot_mapping)
    kv_scales = check_scales(check, kv_cache, cache.num_kv_heads, k_scale, v_scale)
    for name, vector, size, axis in (
        ("q_norm_weight", q_norm_weight, head_dim, "head_dim"),
        ("k_norm_weight", k_norm_weight, head_dim, "head_dim"),
        ("bias", bias, width, "(num_heads + 2 * num_kv_heads) * head_dim"),
    ):
        if vector is not None:
            check.dtype(name, vector, (qkv.dtype,), " (as qkv)")
            check.shape(name, vector, (size,), axis)
    attributes = {
        "check_inputs": np.bool_(check_inputs),
        "kv_scales": np.bool_(kv_scales),
        "has_q_norm": np.bool_(q_norm_weight is not None),
        "has_k_norm": np.bool_(k_norm_weight is not None),
        "has_bias": np.bool_(bias is not None),
        "interleaved": np.bool_(check.boolean("interleaved", interleaved)),
        **norm_attributes(check, "norm_eps", norm_eps, weight_offset, round_once),
    }
    query = ArraySpec((num_tokens, num_heads, head_dim), qkv.dtype)
    # Query, key and value stand side by side: shards of their axis are no heads. Inside shard_map a device has its own.
    partitioning = Partitioning(
        operands={}, results=((None,) * 3, (None,) * len(kv_cache.shape)), never_gathered=("kv_cache",)
    )
    return Signature((query, kv_cache), attributes, partitioning=partitioning)


OPERATOR = Operator(
    "rotary_embedding",
    "(Tensor query, Tensor key, Tensor positions, Tensor table, *, bool interleaved=False) -> (Tensor, Tensor)",
    _signature,
    _DOCSTRING,
    differentiable=("query", "key", "table"),
)
OPERATOR_AND_CACHE = Operator(
    "rotary_and_cache",
    "(Tensor qkv, Tensor positions, Tensor table, Tensor kv_cache, Tensor slot_mapping, *, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, Tensor? bias=None, "
    "bool interleaved=False, float norm_eps=1e-06, float weight_offset=0.0, bool round_once=False) "
    "-> (Tensor, Tensor)",
    functools.partial(signature_and_cache, Checks("rotary_and_cache")),
    _DOCSTRING_AND_CACHE,
    in_place="kv_cache",
)
