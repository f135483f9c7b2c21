"""reshape_and_cache: stores new keys and values into slots of a paged KV cache."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning
from ._cache import cache_axes, check_cache, check_scales

_DOCSTRING = """
Token i goes to slot ``slot_mapping[i]``, which is ``page * page_size + offset`` (vLLM's reshape_and_cache).

Args:
  key: T[num_tokens, num_kv_heads, head_dim]. T is float32, float16 or bfloat16.
  value: of the shape and dtype of key.
  kv_cache: the cache, in either layout and any dtype that paged_attention takes.
  slot_mapping: int32[num_slots] or int64[num_slots], num_slots <= num_tokens. A negative slot is skipped, so that
    batches can be padded; tokens from num_slots on are skipped too. If two tokens have the same slot, one of them is
    stored.
  k_scale: float32[1] or float32[num_kv_heads], required with a float8 cache and refused with others. ``key /
    k_scale`` is stored, rounded to nearest even and saturated at the largest finite number of the dtype.
  v_scale: as k_scale, for value.

Returns:
  The cache with the new tokens, of the shape and dtype of kv_cache. All other slots keep their bits.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape.

Note: Slots past the end of the cache
  On a CPU the call fails, with an error that names the token, and nothing is written. On CUDA such a slot is skipped;
  with ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the call fails as on a CPU.
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
    scale_axes = ("kv_heads" if k_scale is not None and k_scale.shape[0] == num_kv_heads else None,)
    partitioning = Partitioning(
        operands={
            "key": (None, "kv_heads", None),
            "value": (None, "kv_heads", None),
            "kv_cache": cache_axes(kv_cache),
            "k_scale": scale_axes,
            "v_scale": scale_axes,
        },
        results=(cache_axes(kv_cache),),
        sizes={"kv_heads": num_kv_heads},
        never_gathered=("kv_cache",),
    )
    attributes = {"check_inputs": np.bool_(check_inputs), "kv_scales": np.bool_(kv_scales)}
    return Signature(results=(kv_cache,), attributes=attributes, partitioning=partitioning)


OPERATOR = Operator(
    "reshape_and_cache",
    "(Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping, "
    "*, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    _signature,
    _DOCSTRING,
    in_place="kv_cache",
)
