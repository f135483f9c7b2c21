"""The paged KV cache as an argument: its two layouts, and scales for float8."""

from __future__ import annotations

from typing import NamedTuple

from .._core.checks import FLOAT8S, Checks
from .._core.operator import ArraySpec
from .._core.partitioning import Axes


class CacheShape(NamedTuple):
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def check_cache(check: Checks, kv_cache: ArraySpec, dtype: str, whose: str) -> CacheShape:
    """Checks dtype and layout of a cache used with ``whose`` ("query") arrays of ``dtype``."""
    check.dtype("kv_cache", kv_cache, (dtype, *FLOAT8S), f" ({dtype} as {whose})")
    shape = kv_cache.shape
    if len(shape) == 4:
        num_pages, page_size, heads, head_dim = shape
        if heads % 2 != 0 or heads < 2:
            raise check.value_error(
                "kv_cache",
                "[num_pages, page_size, 2 * num_kv_heads, head_dim], K of head h at 2h and V at 2h + 1",
                kv_cache,
            )
        num_kv_heads = heads // 2
    elif len(shape) == 5:
        two, num_pages, page_size, num_kv_heads, head_dim = shape
        if two != 2 or num_kv_heads < 1:
            raise check.value_error("kv_cache", "[2, num_pages, page_size, num_kv_heads, head_dim]", kv_cache)
    else:
        raise check.value_error(
            "kv_cache",
            "rank 4 [num_pages, page_size, 2 * num_kv_heads, head_dim] "
            "or rank 5 [2, num_pages, page_size, num_kv_heads, head_dim]",
            kv_cache,
        )
    if page_size < 1:
        raise check.value_error("kv_cache", "page_size >= 1", kv_cache)
    return CacheShape(num_pages, page_size, num_kv_heads, head_dim)


def check_scales(
    check: Checks, kv_cache: ArraySpec, num_kv_heads: int, k_scale: ArraySpec | None, v_scale: ArraySpec | None
) -> bool:
    """Checks k_scale and v_scale, given with a float8 cache and with no other; returns whether they are given."""
    required = kv_cache.dtype in FLOAT8S
    for argument, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if required:
                raise check.value_error(
                    argument, f"float32[1] or float32[{num_kv_heads}] with a {kv_cache.dtype} cache", None
                )
            continue
        check.array(argument, scale)
        if not required:
            raise check.value_error(argument, f"None with a {kv_cache.dtype} cache, which has no scales", scale)
        check.dtype(argument, scale, ("float32",))
        check.rank(argument, scale, "1 or num_kv_heads")
        if scale.shape[0] not in (1, num_kv_heads):
            raise check.value_error(argument, f"shape [1] or [num_kv_heads = {num_kv_heads}]", scale)
    if k_scale is not None and v_scale is not None and k_scale.shape != v_scale.shape:
        raise check.value_error("v_scale", f"shape {list(k_scale.shape)} (as k_scale)", v_scale)
    return required


def cache_axes(kv_cache: ArraySpec) -> Axes:
    """The cache's axes over devices: its kv heads, K and V of one together."""
    return (None, None, "kv_heads", None) if len(kv_cache.shape) == 4 else (None, None, None, "kv_heads", None)
