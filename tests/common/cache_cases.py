"""Calls of reshape_and_cache, as in cases.py."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.common.cases import DTYPES, FLOAT8S, FLOATS, combine, rng_for


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """A call of reshape_and_cache."""

    name: str
    num_tokens: int = 12
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 9
    dtype: str = "float32"
    cache_dtype: str | None = None
    layout: str = "combined"
    scales: str | None = None
    slot_dtype: str = "int32"
    num_slots: int | None = None  # None: num_tokens; fewer: the tokens beyond have no slot
    skipped: int = 2  # how many of the slots are negative
    spread: float = 1.0


CACHE_CASES = (
    CacheCase("llama3-8b-decode-bf16", num_tokens=8, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    CacheCase("prefill-chunk", num_tokens=90, num_pages=8),
    CacheCase("slots-int64-split-layout", slot_dtype="int64", layout="split", dtype="float16"),
    CacheCase("fewer-slots-than-tokens", num_slots=7),
    CacheCase("all-skipped", skipped=12),
    CacheCase("no-slots", num_slots=0, skipped=0),
    CacheCase("no-tokens", num_tokens=0, skipped=0),
    CacheCase("odd-sizes", num_kv_heads=3, head_dim=24, page_size=7, num_pages=5, dtype="bfloat16", layout="split"),
    CacheCase("page-of-one", page_size=1, num_pages=40),
    CacheCase("fp8-e4m3-per-head", cache_dtype="float8_e4m3fn", scales="per_head", dtype="bfloat16"),
    CacheCase("fp8-e4m3-saturates", cache_dtype="float8_e4m3fn", scales="one", spread=3000.0),
    CacheCase("fp8-e5m2-saturates", cache_dtype="float8_e5m2", scales="one", spread=4e5, layout="split"),
    CacheCase("fp8-e5m2-per-head", cache_dtype="float8_e5m2", scales="per_head", dtype="float16", slot_dtype="int64"),
    CacheCase("fp8-subnormals", cache_dtype="float8_e4m3fn", scales="one", spread=0.005),
)


def cache_grid() -> list[CacheCase]:
    cases = []
    for i, dtype in enumerate(FLOATS):
        for j, cache_dtype in enumerate((None, *FLOAT8S)):
            for k, layout in enumerate(("combined", "split")):
                for m, slot_dtype in enumerate(("int32", "int64")):
                    turn = i + j + k + m
                    cases.append(
                        CacheCase(
                            f"grid-{dtype}-{cache_dtype}-{layout}-{slot_dtype}",
                            dtype=dtype,
                            cache_dtype=cache_dtype,
                            layout=layout,
                            slot_dtype=slot_dtype,
                            scales=None if cache_dtype is None else ("one", "per_head")[turn % 2],
                            head_dim=(8, 80, 128, 256)[turn % 4],
                            num_kv_heads=(1, 2, 5)[turn % 3],
                            page_size=(1, 3, 16, 64)[turn % 4],
                            num_pages=40,
                        )
                    )
    return cases


def build_cache(case: CacheCase, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays by argument name. Half of the cache's slots hold NaN, which must survive bit for bit."""
    rng = rng_for(case.name, seed)
    dtype, cache_dtype = DTYPES[case.dtype], DTYPES[case.cache_dtype or case.dtype]
    shape = (case.num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    k = rng.standard_normal(shape).astype(cache_dtype)
    v = rng.standard_normal(shape).astype(cache_dtype)
    k[rng.random(shape[:2]) < 0.5] = cache_dtype.type(np.nan)

    tokens = (case.num_tokens, case.num_kv_heads, case.head_dim)
    num_slots = case.num_tokens if case.num_slots is None else case.num_slots
    slots = rng.permutation(case.num_pages * case.page_size)[:num_slots].astype(DTYPES[case.slot_dtype])
    lowest = np.iinfo(slots.dtype).min
    slots[rng.permutation(num_slots)[: case.skipped]] = rng.choice(
        np.array([-1, -7, lowest], slots.dtype), case.skipped
    )
    arrays = {
        "key": (rng.standard_normal(tokens) * case.spread).astype(dtype),
        "value": (rng.standard_normal(tokens) * case.spread).astype(dtype),
        "kv_cache": combine(k, v, case.layout),
        "slot_mapping": slots,
    }
    if case.scales is not None:
        count = case.num_kv_heads if case.scales == "per_head" else 1
        arrays["k_scale"] = rng.uniform(0.3, 3.0, count).astype(np.float32)
        arrays["v_scale"] = rng.uniform(0.3, 3.0, count).astype(np.float32)
    return arrays
