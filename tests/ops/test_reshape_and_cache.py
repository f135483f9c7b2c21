"""reshape_and_cache against the NumPy reference, bit for bit: nothing is computed but one division and one rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, reference
from tests.common.cache_cases import CacheCase


def check(frontend, case: CacheCase) -> None:
    arrays = cache_cases.build_cache(case)
    want = reference.reshape_and_cache(**arrays)
    (cache,) = frontend.call("reshape_and_cache", arrays)
    compare.assert_bitwise_equal(cache, want, f"{frontend.name} {case.name}")


@pytest.mark.parametrize("case", cache_cases.CACHE_CASES, ids=lambda c: c.name)
def test_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("case", cache_cases.cache_grid(), ids=lambda c: c.name)
@pytest.mark.frontends("eager", "eager-cuda")
def test_grid(frontend, case):
    check(frontend, case)


# test_in_place.py compiles it, and reads the module.
@pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
@pytest.mark.parametrize("case", [c for c in cache_cases.CACHE_CASES if c.num_tokens], ids=lambda c: c.name)
def test_in_place(frontend, case):
    from tests.common.arrays import to_numpy

    arrays = cache_cases.build_cache(case)
    tensors = frontend.tensors(arrays)
    returned = frontend.module().reshape_and_cache_(**tensors)
    want = reference.reshape_and_cache(**arrays)
    compare.assert_bitwise_equal(to_numpy(tensors["kv_cache"]), want, f"{frontend.name}: the argument")
    assert returned is None or returned is tensors["kv_cache"]


@pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
def test_functional_leaves_its_argument_alone(frontend):
    from tests.common.arrays import to_numpy

    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[0])
    tensors = frontend.tensors(arrays)
    new = frontend.module().reshape_and_cache(**tensors)
    compare.assert_bitwise_equal(to_numpy(new), reference.reshape_and_cache(**arrays), frontend.name)
    compare.assert_bitwise_equal(to_numpy(tensors["kv_cache"]), arrays["kv_cache"], f"{frontend.name}: the argument")


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_of_duplicate_slots_one_wins_whole(frontend, cache_dtype):
    case = CacheCase(
        "duplicates", num_tokens=64, cache_dtype=cache_dtype, scales=cache_dtype and "one", page_size=4, num_pages=4,
        skipped=0, num_slots=16,
    )  # fmt: skip
    arrays = cache_cases.build_cache(case)
    arrays["slot_mapping"] = np.repeat(np.array([3, 5, 11, 8], np.int32), 16)
    (cache,) = frontend.call("reshape_and_cache", arrays)
    stored = reference.to_storage(arrays["key"], arrays.get("k_scale"), cache.dtype)
    stored_v = reference.to_storage(arrays["value"], arrays.get("v_scale"), cache.dtype)
    k_pages, v_pages = reference.split_cache(cache)
    for turn, slot in enumerate((3, 5, 11, 8)):
        candidates = range(16 * turn, 16 * turn + 16)
        k, v = k_pages[slot // 4, slot % 4], v_pages[slot // 4, slot % 4]
        winners = [t for t in candidates if (compare.bits(stored[t]) == compare.bits(k)).all()]
        assert winners, f"slot {slot} holds no token's key"
        assert any((compare.bits(stored_v[t]) == compare.bits(v)).all() for t in winners), (
            f"slot {slot}: K and V of two tokens"
        )
        if frontend.platform == "host":
            assert candidates[-1] in winners, "on the host the last token stays"


@pytest.mark.parametrize("cache_dtype", cases.FLOAT8S)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_every_bfloat16_rounds_to_nearest_float8(frontend, dtype, cache_dtype):
    """All 65536 patterns (of bfloat16, or of float16; as float32 those of bfloat16), NaN and infinities included."""
    source = cases.DTYPES["float16" if dtype == "float16" else "bfloat16"]
    key = np.arange(65536, dtype=np.uint16).view(source).astype(cases.DTYPES[dtype]).reshape(64, 4, 256)
    arrays = {
        "key": key,
        "value": key[::-1].copy(),
        "kv_cache": np.zeros((64, 1, 8, 256), cases.DTYPES[cache_dtype]),
        "slot_mapping": np.arange(64, dtype=np.int32),
        "k_scale": np.array([1.0], np.float32),
        "v_scale": np.array([0.7], np.float32),
    }
    (cache,) = frontend.call("reshape_and_cache", arrays)
    want = reference.reshape_and_cache(**arrays)
    compare.assert_same_special(cache.astype(np.float32), want.astype(np.float32), frontend.name)
    number = ~np.isnan(want.astype(np.float32))  # the bit pattern of a NaN is not promised
    compare.assert_bitwise_equal(
        np.where(number, compare.bits(cache), 0), np.where(number, compare.bits(want), 0), frontend.name
    )
