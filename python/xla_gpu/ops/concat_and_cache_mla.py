"""concat_and_cache_mla: stores new latents and rotary keys into slots of a paged cache of latents."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning

_DOCSTRING = """
Token i goes to slot ``slot_mapping[i]``, which is ``page * page_size + offset``: its latent, and behind it its rotary
key (vLLM's concat_and_cache_mla). mla_attention reads the cache.

Args:
  kv_c: T[num_tokens, kv_lora_rank], the latents. T is float32, float16 or bfloat16; kv_lora_rank is a multiple of 8.
  k_pe: T[num_tokens, rope_dim], the rotary keys, which all heads share. rope_dim is a multiple of 8.
  kv_cache: T[num_pages, page_size, kv_lora_rank + rope_dim].
  slot_mapping: int32[num_slots] or int64[num_slots], num_slots <= num_tokens. A negative slot is skipped, so that
    batches can be padded; tokens from num_slots on are skipped too. If two tokens have the same slot, one of them is
    stored.

Returns:
  The cache with the new tokens, of the shape and dtype of kv_cache. All other slots keep their bits.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape.

Note: Slots past the end of the cache
  On a CPU the call fails, with an error that names the token, and nothing is written. On CUDA such a slot is skipped;
  with ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the call fails as on a CPU.
"""

_check = Checks("concat_and_cache_mla")


def _signature(
    kv_c: ArraySpec,
    k_pe: ArraySpec,
    kv_cache: ArraySpec,
    slot_mapping: ArraySpec,
    *,
    check_inputs: bool = False,
) -> Signature:
    _check.dtype("kv_c", kv_c, FLOATS)
    num_tokens, kv_lora_rank = _check.rank("kv_c", kv_c, "num_tokens, kv_lora_rank")
    if kv_lora_rank < 8 or kv_lora_rank % 8 != 0:
        raise _check.value_error("kv_c", "kv_lora_rank a positive multiple of 8", kv_c)
    _check.dtype("k_pe", k_pe, (kv_c.dtype,), " (as kv_c)")
    _, rope_dim = _check.rank("k_pe", k_pe, "num_tokens, rope_dim")
    _check.shape("k_pe", k_pe, (num_tokens, rope_dim), "num_tokens, rope_dim")
    if rope_dim < 8 or rope_dim % 8 != 0:
        raise _check.value_error("k_pe", "rope_dim a positive multiple of 8", k_pe)
    _check.dtype("kv_cache", kv_cache, (kv_c.dtype,), " (as kv_c)")
    _, page_size, width = _check.rank("kv_cache", kv_cache, "num_pages, page_size, kv_lora_rank + rope_dim")
    if width != kv_lora_rank + rope_dim:
        raise _check.value_error("kv_cache", f"kv_lora_rank + rope_dim = {kv_lora_rank + rope_dim} elements", kv_cache)
    if page_size < 1:
        raise _check.value_error("kv_cache", "page_size >= 1", kv_cache)
    _check.dtype("slot_mapping", slot_mapping, ("int32", "int64"))
    (num_slots,) = _check.rank("slot_mapping", slot_mapping, "num_slots")
    if num_slots > num_tokens:
        raise _check.value_error("slot_mapping", f"at most num_tokens = {num_tokens} slots", slot_mapping)
    # All heads share a latent: each device has the whole cache, and stores all tokens.
    partitioning = Partitioning(operands={}, results=((None, None, None),), never_gathered=("kv_cache",))
    return Signature((kv_cache,), {"check_inputs": np.bool_(check_inputs)}, partitioning=partitioning)


OPERATOR = Operator(
    "concat_and_cache_mla",
    "(Tensor kv_c, Tensor k_pe, Tensor kv_cache, Tensor slot_mapping) -> Tensor",
    _signature,
    _DOCSTRING,
    in_place="kv_cache",
)
