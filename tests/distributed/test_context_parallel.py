"""Decode over pages spread over devices, beside the same call on one device."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.common import cases, compare
from tests.distributed import devices

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
P = jax.sharding.PartitionSpec

PAGE, HEADS, KV_HEADS, DIM = 4, 8, 2, 32
LENGTHS = (1, 4, 5, 17, 64, 63, 16)  # one page on one device alone, ends within and at the end of pages
PAGES = 16  # of a sequence, at most


def inputs(dtype: str, layout: str) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"context parallel {dtype} {layout}")
    max_seqs = len(LENGTHS) + 1
    shape = (max_seqs * PAGES, PAGE, 2 * KV_HEADS, DIM)
    if layout == "split":
        shape = (2, max_seqs * PAGES, PAGE, KV_HEADS, DIM)
    new = (max_seqs, KV_HEADS, DIM)
    return {
        "query": rng.standard_normal((max_seqs, HEADS, DIM)).astype(cases.DTYPES[dtype]),
        "key": rng.standard_normal(new).astype(cases.DTYPES[dtype]),
        "value": rng.standard_normal(new).astype(cases.DTYPES[dtype]),
        "kv_cache": rng.standard_normal(shape).astype(cases.DTYPES[dtype]),
        "context_lens": np.array([*LENGTHS, 0], np.int32),
        "block_tables": rng.permutation(max_seqs * PAGES).reshape(max_seqs, PAGES).astype(np.int32),
        "query_start_loc": np.array([*range(len(LENGTHS) + 1), len(LENGTHS)], np.int32),
        "num_seqs": np.array([len(LENGTHS)], np.int32),
    }


def on_one_device(a: dict[str, np.ndarray], **options) -> np.ndarray:
    last = np.maximum(a["context_lens"] - 1, 0)
    slots = a["block_tables"][np.arange(len(last)), last // PAGE] * PAGE + last % PAGE
    slots = np.where(a["context_lens"] > 0, slots, -1).astype(np.int32)
    cache = xg.reshape_and_cache(a["key"], a["value"], a["kv_cache"], slots)
    metadata = (a["context_lens"], a["block_tables"], a["query_start_loc"], a["num_seqs"])
    return np.asarray(xg.paged_attention(a["query"], cache, *metadata, scale=0.2, **options))


def spread(a: dict[str, np.ndarray], count: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Each device's cache and table, stacked: the pages it owns, numbered anew; the others' are not there."""
    axis = 1 if layout == "split" else 0
    caches, tables = [], []
    for device in range(count):
        owned = a["block_tables"][:, device::count]
        caches.append(np.take(a["kv_cache"], owned.reshape(-1), axis=axis))
        tables.append(np.arange(owned.size, dtype=np.int32).reshape(owned.shape))
    return np.stack(caches), np.stack(tables)


def step(axis, group, options, query, key, value, cache, context_lens, table, query_start_loc, num_seqs):
    cache, table = cache[0], table[0]
    slots = xg.context_parallel_slots(context_lens - 1, table, page_size=PAGE, axis=axis)
    cache = xg.reshape_and_cache(key, value, cache, slots)
    return xg.context_parallel_paged_attention(
        query, cache, context_lens, table, query_start_loc, num_seqs, axis=axis, group=group, scale=0.2, **options
    )


@pytest.mark.parametrize("layout", ["combined", "split"])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize(
    ("platform", "count"),
    [("cpu", 1), ("cpu", 2), ("cpu", 4), pytest.param("cuda", 2, marks=pytest.mark.gpu)],
)
def test_is_attention_over_all_pages(platform, count, dtype, layout):
    mesh = devices.mesh(platform, cp=count)
    a, options = inputs(dtype, layout), {"soft_cap": 15.0}
    with jax.default_device(mesh.devices.flat[0]):
        want = on_one_device(a, **options)
    caches, tables = spread(a, count, layout)
    order = (a["query"], a["key"], a["value"], caches, a["context_lens"], tables, a["query_start_loc"], a["num_seqs"])
    specs = (P(), P(), P(), P("cp"), P(), P("cp"), P(), P())
    outs = []
    group = xg.DeviceGroup(mesh, "cp")
    for check_vma, out_specs, given in (
        (devices.infers_replication(), P(), None),
        (False, P("cp"), None),
        (False, P("cp"), group),
    ):
        body = functools.partial(step, "cp", given, options)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
        outs.append(np.asarray(jax.jit(mapped)(*order)))
    for device in np.split(outs[1], count):
        compare.assert_bitwise_equal(device, outs[0], "a device beside another")
    for device in np.split(outs[2], count):
        np.testing.assert_array_equal(device.astype(np.float32), outs[0].astype(np.float32), "through the group")
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    np.testing.assert_allclose(outs[0].astype(np.float32), want.astype(np.float32), rtol=tolerance, atol=tolerance)
    assert (outs[0][len(LENGTHS) :] == 0).all()


def test_num_seqs_may_be_an_int():
    mesh, a = devices.mesh("cpu", cp=2), inputs("float32", "split")
    caches, tables = spread(a, 2, "split")
    outs = []
    for num_seqs in (a["num_seqs"], len(LENGTHS)):

        def attend(cache, table, *metadata, num_seqs=num_seqs):
            given = (a["query"], cache[0], metadata[0], table[0], metadata[1], num_seqs)
            return xg.context_parallel_paged_attention(*given, axis="cp", scale=0.2)

        specs = (P("cp"), P("cp"), P(), P())
        check_vma = devices.infers_replication()
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        outs.append(np.asarray(jax.jit(mapped)(caches, tables, a["context_lens"], a["query_start_loc"])))
    compare.assert_bitwise_equal(*outs, "num_seqs")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"positions": [1, 2]}, TypeError, "positions: expected a JAX or NumPy array, got list"),
        ({"positions": np.zeros((2, 1), np.int32)}, ValueError, r"positions: expected rank 1 .* got int32\[2, 1\]"),
        (
            {"positions": np.zeros(2, np.float32)},
            TypeError,
            r"positions: expected dtype int32 or int64, got float32\[2\]",
        ),
        ({"block_tables": np.zeros(2, np.int32)}, ValueError, r"block_tables: expected rank 2 .* got int32\[2\]"),
        ({"block_tables": np.zeros((3, 4), np.int32)}, ValueError, r"block_tables: expected shape \[2, 4\] .*\[3, 4\]"),
        ({"page_size": 0}, ValueError, "page_size: expected a positive int, got 0"),
        ({"page_size": 2.0}, ValueError, r"page_size: expected a positive int, got 2\.0"),
    ],
)
def test_wrong_arguments_of_slots(change, error, text):
    given = {"positions": np.zeros(2, np.int32), "block_tables": np.zeros((2, 4), np.int32), "page_size": 8} | change

    def slots(_):
        return xg.context_parallel_slots(**given, axis="cp")

    mapped = jax.shard_map(slots, mesh=devices.mesh("cpu", cp=2), in_specs=P(), out_specs=P("cp"), check_vma=False)
    with pytest.raises(error, match=f"^context_parallel_slots: {text}"):
        mapped(np.zeros(1))


def test_misuse_is_named():
    a = inputs("float32", "combined")
    metadata = (a["context_lens"], a["block_tables"], a["query_start_loc"], a["num_seqs"])
    with pytest.raises(ValueError, match=r"context_parallel_paged_attention: axis: expected the name of a mesh axis"):
        xg.context_parallel_paged_attention(a["query"], a["kv_cache"], *metadata, axis="cp", scale=1.0)
    for axis in ("cp", 0):
        with pytest.raises(ValueError, match=f"context_parallel_slots: axis: expected the name .* got {axis!r}"):
            xg.context_parallel_slots(a["context_lens"], a["block_tables"], page_size=PAGE, axis=axis)
    mesh = devices.mesh("cpu", cp=2)

    def attend(query, *rest):
        query = jax.numpy.concatenate([query, query])
        return xg.context_parallel_paged_attention(query, *rest, axis="cp", scale=1.0)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"query: expected at most max_seqs = 8 rows, one for each sequence, got 16"):
        jax.jit(mapped)(a["query"], a["kv_cache"], *metadata)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"num_seqs": -1}, ValueError, "num_seqs: expected an int >= 0, got -1"),
        ({"num_seqs": 9}, ValueError, "num_seqs: expected an int <= 8, got 9"),
        ({"num_seqs": None}, TypeError, r"num_seqs: expected a tensor int32\[1\], or an int .*, got NoneType"),
        ({"query": None}, TypeError, "query: expected a JAX or NumPy array, got NoneType"),
        ({"kv_cache": np.zeros((4, 4, 4, 16), np.float32)}, ValueError, r"kv_cache: expected head_dim 32 .*, 16\]"),
        ({"context_lens": np.zeros(8, np.float32)}, TypeError, r"context_lens: expected dtype int32, got float32\[8\]"),
        ({"block_tables": np.zeros(8, np.int32)}, ValueError, r"block_tables: expected rank 2 .* got int32\[8\]"),
        ({"query_start_loc": np.zeros(8, np.int32)}, ValueError, r"query_start_loc: expected shape \[9\] .*\[8\]"),
        ({"scale": "1"}, TypeError, "scale: expected a number known when the call is traced, got str"),
        ({"soft_cap": 0.0}, ValueError, r"soft_cap: expected a number from .*, got 0\.0"),
        ({"k_scale": np.ones(1, np.float32)}, ValueError, r"k_scale: expected None .*, got float32\[1\]"),
    ],
)
def test_wrong_arguments_of_attention(change, error, text):
    """They name the function that was called, and not those that it is made of."""
    a = inputs("float32", "combined")
    names = ("query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs")
    given = {name: a[name] for name in names} | {"scale": 1.0} | change

    def attend(_):
        return xg.context_parallel_paged_attention(**given, axis="cp")

    mapped = jax.shard_map(attend, mesh=devices.mesh("cpu", cp=2), in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(error, match=f"^context_parallel_paged_attention: {text}"):
        mapped(np.zeros(1))
