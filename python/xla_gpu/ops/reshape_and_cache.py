"""reshape_and_cache: stores new keys and values into slots of a paged KV cache."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from ._cache import check_cache, check_scales

_DOCSTRING = """
Args:
  key: T[num_tokens, num_kv_heads, head_dim]; T is float32, float16 or bfloat16.
  value: as key.
  kv_cache: either layout and any dtype that paged_attention takes.
  slot_mapping: int32 or int64 [num_slots], num_slots <= num_tokens: token i goes to slot ``slot_mapping[i]``, which is
    page * page_size + offset. A negative slot is skipped, so that batches can be padded. Of duplicate slots one wins.
  k_scale: float32[1] or float32[num_kv_heads], given with a float8 cache and with no other: key / k_scale is stored,
    saturated to the range of the dtype.
  v_scale: as k_scale, for value.

Returns:
  The cache with the new tokens. Every element that no slot names keeps its bits.

Raises:
  TypeError: an argument has another dtype or type.
  ValueError: an argument has another shape.

  A slot past the cache is an error on the host, raised where the result is first needed. On CUDA it is skipped; with
  XLA_GPU_CHECK_INPUTS=1 in the environment when the call is traced it is an error there too.
"""

_check = Checks("reshape_and_cache")


def _signature(
    key: ArraySpec,
    value: ArraySpec,
    kv_cache: ArraySpec,
    slot_mapping: ArraySpec,
    *,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    check_inputs: bool = False,
) -> Signature:
    axes = "num_tokens, num_kv_heads, head_dim"
    _check.dtype("key", key, FLOATS)
    num_tokens, num_kv_heads, head_dim = _check.rank("key", key, axes)
    _check.dtype("value", value, (key.dtype,), " (as key)")
    _check.shape("value", value, key.shape, axes)
    cache = check_cache(_check, kv_cache, key.dtype, "key")
    if (cache.num_kv_heads, cache.head_dim) != (num_kv_heads, head_dim):
        raise _check.value_error("kv_cache", f"num_kv_heads {num_kv_heads} and head_dim {head_dim} (as key)", kv_cache)
    _check.dtype("slot_mapping", slot_mapping, ("int32", "int64"))
    (num_slots,) = _check.rank("slot_mapping", slot_mapping, "num_slots")
    if num_slots > num_tokens:
        raise _check.value_error("slot_mapping", f"at most num_tokens = {num_tokens} slots", slot_mapping)
    kv_scales = check_scales(_check, kv_cache, num_kv_heads, k_scale, v_scale)
    return Signature(
        results=(kv_cache,), attributes={"check_inputs": np.bool_(check_inputs), "kv_scales": np.bool_(kv_scales)}
    )


OPERATOR = Operator(
    "reshape_and_cache",
    "(Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping, "
    "*, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    _signature,
    _DOCSTRING,
    in_place="kv_cache",
)
