"""Caches of more than 2**31 elements and more than 4 GiB: what 32-bit offsets get wrong. The memory is reserved, not
touched: of the host's pages only those exist that are written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare, mla_cases, reference
from tests.common.arrays import to_numpy

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.frontends("eager", "eager-cuda"), pytest.mark.usefixtures("much_memory")]

CASE = cases.AttentionCase("large", ((1, 60), (4, 33)), num_heads=4, num_kv_heads=4, head_dim=128, dtype="bfloat16")
PAGE = CASE.page_size * CASE.num_kv_heads * CASE.head_dim  # elements of K in a page
NUM_PAGES = 2**31 // PAGE + 5  # K and V together: 2**32 elements, 8 GiB and a little


def large_cache(frontend, layout: str):
    shape = {
        "combined": (NUM_PAGES, CASE.page_size, 2 * CASE.num_kv_heads, CASE.head_dim),
        "split": (2, NUM_PAGES, CASE.page_size, CASE.num_kv_heads, CASE.head_dim),
    }[layout]
    try:
        return torch.empty(shape, dtype=torch.bfloat16, device=frontend.device())
    except RuntimeError as e:
        pytest.skip(f"no {2 * 2 * NUM_PAGES * PAGE / 2**30:.1f} GiB to reserve: {str(e)[:100]}")


@pytest.mark.parametrize("layout", ["combined", "split"])
def test_the_last_pages_are_written_and_read(frontend, layout):
    small = cases.build(CASE)
    (want,) = frontend.call("paged_attention", small.arrays(), **CASE.options())

    # The same keys and values, on pages of which every second is at the end of the large cache.
    cache = large_cache(frontend, layout)
    num_small = small.kv_cache.shape[0]
    places = np.array([i if i % 2 else NUM_PAGES - 1 - i for i in range(num_small)])
    k, v = reference.split_cache(small.kv_cache)
    key, value = (part.reshape(-1, CASE.num_kv_heads, CASE.head_dim) for part in (k, v))
    offsets = np.arange(CASE.page_size)
    slots = (places[:, None] * CASE.page_size + offsets).reshape(-1)
    ops = frontend.module()
    tensors = frontend.tensors(
        {"key": np.ascontiguousarray(key), "value": np.ascontiguousarray(value), "slot_mapping": slots}
    )
    ops.reshape_and_cache_(tensors["key"], tensors["value"], cache, tensors["slot_mapping"])
    k_cache, v_cache = (cache[:, :, 0::2], cache[:, :, 1::2]) if layout == "combined" else (cache[0], cache[1])
    for page, place in enumerate(places):
        compare.assert_bitwise_equal(to_numpy(k_cache[place]), k[page], f"K of page {place}")
        compare.assert_bitwise_equal(to_numpy(v_cache[place]), v[page], f"V of page {place}")

    tables = small.block_tables.copy()
    for s, (_, context_len) in enumerate(CASE.sequences):
        used = -(-context_len // CASE.page_size)
        tables[s, :used] = places[tables[s, :used]]
    assert tables[:2].max() > 2**31 // (2 * PAGE)
    arrays = {k: x for k, x in small.arrays().items() if k != "kv_cache"} | {"block_tables": tables}
    out = ops.paged_attention(kv_cache=cache, **frontend.tensors(arrays), **CASE.options())
    compare.assert_bitwise_equal(to_numpy(out), want, f"{frontend.name} {layout}")


LATENTS = mla_cases.Case(
    "large", ((1, 60), (4, 33)), num_heads=16, head_dim=576, value_dim=512, page_size=16, dtype="bfloat16"
)


def test_the_last_pages_of_latents_are_written_and_read(frontend):
    """concat_and_cache_mla and mla_attention."""
    small = mla_cases.build(LATENTS)
    (want,) = frontend.call("mla_attention", small, **LATENTS.options())
    num_pages = 2**32 // (16 * 576) + 5  # 2**32 elements, 8 GiB and a little
    try:
        cache = torch.empty((num_pages, 16, 576), dtype=torch.bfloat16, device=frontend.device())
    except RuntimeError as e:
        pytest.skip(f"no 8 GiB to reserve: {str(e)[:100]}")
    places = np.array([i if i % 2 else num_pages - 1 - i for i in range(len(small["kv_cache"]))])
    latents = small["kv_cache"].reshape(-1, 576)
    new = {"kv_c": np.ascontiguousarray(latents[:, :512]), "k_pe": np.ascontiguousarray(latents[:, 512:])}
    new["slot_mapping"] = (places[:, None] * 16 + np.arange(16)).reshape(-1)
    ops = frontend.module()
    ops.concat_and_cache_mla_(kv_cache=cache, **frontend.tensors(new))
    for page, place in enumerate(places):
        compare.assert_bitwise_equal(to_numpy(cache[place]), small["kv_cache"][page], f"page {place}")

    tables = small["block_tables"].copy()
    for s, (_, context) in enumerate(LATENTS.sequences):
        used = -(-context // 16)
        tables[s, :used] = places[tables[s, :used]]
    assert tables[:2].max() > 2**31 // (16 * 576)
    arrays = {name: x for name, x in small.items() if name != "kv_cache"} | {"block_tables": tables}
    out = ops.mla_attention(kv_cache=cache, **frontend.tensors(arrays), **LATENTS.options())
    compare.assert_bitwise_equal(to_numpy(out), want, frontend.name)
