"""Sizes past what 16 and 32 bits count: caches, tables, rows, grids. test_large_caches.py has eager tensors' caches in
bfloat16. On the host, memory that is not touched here exists only as addresses."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from tests.common import cases, compare, layer_cases, process, reference
from tests.common.cases import AttentionCase

torch = pytest.importorskip("torch")
GIB = 2**30


def available_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def reserve(shape, dtype, device):
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as e:
        pytest.skip(f"{math.prod(shape) * dtype.itemsize / GIB:.1f} GiB cannot be reserved: {str(e)[:100]}")


# ---- Caches ----------------------------------------------------------------------------------------------------------
FP8 = AttentionCase(
    "large-fp8", ((1, 60), (20, 33)), num_heads=4, num_kv_heads=4, head_dim=128, dtype="bfloat16",
    cache_dtype="float8_e4m3fn", scales="per_head",
)  # fmt: skip


def scattered(case: AttentionCase, num_pages: int):
    """(inputs over a small cache, slot of each small one in a cache of num_pages, tables for that cache)."""
    small = cases.build(case)
    pages = reference.split_cache(small.kv_cache)[0].shape[0]
    places = np.array([i if i % 2 else num_pages - 1 - i for i in range(pages)])
    tables = small.block_tables.copy()
    for s, (_, context_len) in enumerate(case.sequences):
        used = -(-context_len // case.page_size)
        tables[s, :used] = places[tables[s, :used]]
    slots = (places[:, None] * case.page_size + np.arange(case.page_size)).reshape(-1)
    return small, slots, tables


@pytest.mark.parametrize("layout", ["combined", "split"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float32"])
@pytest.mark.frontends("eager", "eager-cuda")
def test_the_last_pages_of_caches_of_other_types(frontend, dtype, layout):
    """Of more than 2**31 elements in K, and again in V: 4 GiB of float8, 16 GiB of float32."""
    from tests.common.arrays import TORCH_DTYPES, to_numpy

    case = FP8.but(layout=layout)
    if dtype == "float32":
        case = case.but(cache_dtype=None, scales=None, dtype="float32")
    page = case.page_size * case.num_kv_heads * case.head_dim
    num_pages = 2**31 // page + 5
    shape = {
        "combined": (num_pages, case.page_size, 2 * case.num_kv_heads, case.head_dim),
        "split": (2, num_pages, case.page_size, case.num_kv_heads, case.head_dim),
    }[layout]
    small, slots, tables = scattered(case, num_pages)
    (want,) = frontend.call("paged_attention", small.arrays(), **case.options())
    cache = reserve(shape, TORCH_DTYPES[dtype], frontend.device())

    # Stored with a scale of 1 a float8 number keeps its bits.
    ones = {name: np.ones(1, np.float32) for name in ("k_scale", "v_scale")} if dtype != "float32" else {}
    new = [
        np.ascontiguousarray(part.reshape(-1, case.num_kv_heads, case.head_dim)).astype(cases.DTYPES[case.dtype])
        for part in reference.split_cache(small.kv_cache)
    ]
    tensors = frontend.tensors({"key": new[0], "value": new[1], "slot_mapping": slots} | ones)
    frontend.module().reshape_and_cache_(kv_cache=cache, **tensors)
    arrays = {k: x for k, x in small.arrays().items() if k != "kv_cache"} | {"block_tables": tables}
    out = frontend.module().paged_attention(kv_cache=cache, **frontend.tensors(arrays), **case.options())
    compare.assert_bitwise_equal(to_numpy(out), want, f"{frontend.name} {dtype} {layout}")


@pytest.mark.frontends("jax", "jax-cuda")
def test_a_large_cache_in_a_compiled_program(frontend):
    """Donated, updated in place, read: 2**31 elements and 4 GiB, of which a copy would double the memory."""
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax

    if frontend.platform == "host" and available_memory() < 12 * GIB:
        pytest.skip("less than 12 GiB of memory are free")
    case = AttentionCase("large", ((1, 60), (20, 33)), num_heads=4, num_kv_heads=4, head_dim=128, dtype="bfloat16")
    page = case.page_size * 2 * case.num_kv_heads * case.head_dim
    num_pages = 2**31 // page + 5
    small, slots, tables = scattered(case, num_pages)
    (want,) = frontend.call("paged_attention", small.arrays(), **case.options())
    key, value = (
        np.ascontiguousarray(part.reshape(-1, case.num_kv_heads, case.head_dim))
        for part in reference.split_cache(small.kv_cache)
    )
    arrays = {k: x for k, x in small.arrays().items() if k != "kv_cache"} | {"block_tables": tables}
    with jax.default_device(frontend.device()):
        shape = (num_pages, case.page_size, 2 * case.num_kv_heads, case.head_dim)
        cache = jnp.zeros(shape, jnp.bfloat16)

        def step(cache, key, value, slots, arrays):
            cache = xla_gpu.jax.reshape_and_cache(key, value, cache, slots)
            return cache, xla_gpu.jax.paged_attention(kv_cache=cache, **arrays, **case.options())

        cache, out = jax.jit(step, donate_argnums=0)(cache, key, value, slots.astype(np.int32), arrays)
        compare.assert_bitwise_equal(np.asarray(out), want, frontend.name)
        del cache


# ---- Rows, sequences, tables -----------------------------------------------------------------------------------------
def assert_is_the_value(frontend, out, value):
    """What a softmax over a single key leaves of its value: all of it, bit for bit; but on CUDA in float32 the weight
    is exp2 of a difference that a fused multiplication leaves not quite 0, and it and the division may round once each.
    """
    if frontend.platform == "cuda" and value.dtype == np.float32:
        compare.assert_within_ulps(out, value, 2, frontend.name)
    else:
        compare.assert_bitwise_equal(out, value, frontend.name)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_more_sequences_than_16_bits_count(frontend, dtype):
    """70 000 decodes of one key each: the result is that key's value."""
    num_seqs, pages = 70_000, 97
    cache = cases.rng_for("many").standard_normal((pages, 4, 4, 16)).astype(cases.DTYPES[dtype])
    rng = cases.rng_for("many-pages")
    arrays = {
        "query": rng.standard_normal((num_seqs, 2, 16)).astype(cases.DTYPES[dtype]),
        "kv_cache": cache,
        "context_lens": np.ones(num_seqs, np.int32),
        "block_tables": rng.integers(0, pages, (num_seqs, 1)).astype(np.int32),
        "query_start_loc": np.arange(num_seqs + 1, dtype=np.int32),
        "num_seqs": np.array([num_seqs], np.int32),
    }
    (out,) = frontend.call("paged_attention", arrays, scale=0.25)
    assert_is_the_value(frontend, out, cache[arrays["block_tables"][:, 0], 0][:, 1::2])


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_more_tokens_than_16_bits_count(frontend, dtype):
    """A prompt of 70 000 tokens that see themselves alone, 100 000 slots to store, and as many rows to merge."""
    rows, width = 70_000, 16
    rng = cases.rng_for("long")
    T = cases.DTYPES[dtype]
    key, value = (rng.standard_normal((rows, 2, width)).astype(T) for _ in range(2))
    slots = rng.permutation(100_000)[:rows].astype(np.int32)
    cache = np.zeros((100_000 // 16, 16, 4, width), T)
    (stored,) = frontend.call(
        "reshape_and_cache", {"key": key, "value": value, "kv_cache": cache, "slot_mapping": slots}
    )
    flat = stored.reshape(-1, 4, width)
    compare.assert_bitwise_equal(flat[slots][:, 0::2], key, frontend.name)
    compare.assert_bitwise_equal(flat[slots][:, 1::2], value, frontend.name)

    pages = -(-rows // 16)
    cache = np.zeros((pages * 16, 4, width), T)
    cache[:rows, 0::2], cache[:rows, 1::2] = key, value
    prompt = {
        "query": rng.standard_normal((rows, 2, width)).astype(T),
        "kv_cache": cache.reshape(pages, 16, 4, width),
        "context_lens": np.array([rows], np.int32),
        "block_tables": np.arange(pages, dtype=np.int32)[None],
        "query_start_loc": np.array([0, rows], np.int32),
        "num_seqs": np.array([1], np.int32),
    }
    (out,) = frontend.call("paged_attention", prompt, scale=0.25, sliding_window=1)
    assert_is_the_value(frontend, out, value)

    whole = {"query": key, "key": key, "value": value, **{n: prompt[n] for n in ("query_start_loc", "num_seqs")}}
    (out,) = frontend.call("bidirectional_attention", whole, scale=0.25, sliding_window=1)
    assert_is_the_value(frontend, out, value)

    lse = np.zeros((rows, 2), np.float32)
    nothing = np.full_like(lse, -np.inf)
    (merged, _) = frontend.call(
        "merge_attention_states", {"out_a": key, "lse_a": lse, "out_b": value, "lse_b": nothing}
    )
    compare.assert_bitwise_equal(merged, key, frontend.name)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_more_latents_than_16_bits_count(frontend, dtype):
    """concat_and_cache_mla of 70 000 tokens, and mla_attention of as many sequences of one token."""
    rows = 70_000
    rng = cases.rng_for("latents")
    new = {name: rng.standard_normal((rows, 8)).astype(cases.DTYPES[dtype]) for name in ("kv_c", "k_pe")}
    slots = rng.permutation(100_000)[:rows].astype(np.int32)
    cache = np.zeros((100_000, 1, 16), cases.DTYPES[dtype])
    (stored,) = frontend.call("concat_and_cache_mla", new | {"kv_cache": cache, "slot_mapping": slots})
    compare.assert_bitwise_equal(stored[slots, 0], np.concatenate([new["kv_c"], new["k_pe"]], 1), frontend.name)
    arrays = {
        "query": np.ones((rows, 2, 16), cases.DTYPES[dtype]),
        "kv_cache": np.array(stored),
        "context_lens": np.ones(rows, np.int32),
        "block_tables": slots[:, None].copy(),
        "query_start_loc": np.arange(rows + 1, dtype=np.int32),
        "num_seqs": np.array([rows], np.int32),
    }
    (out,) = frontend.call("mla_attention", arrays, scale=0.25, value_dim=8)
    assert_is_the_value(frontend, out, np.repeat(new["kv_c"][:, None], 2, 1))


@pytest.mark.frontends("eager", "eager-cuda")
def test_layer_rows_of_more_than_16_bits_count(frontend):
    """More rows than a grid has CTAs. All rows are one, so their results are."""
    rows = 600_000
    row = cases.rng_for("layer rows").standard_normal((1, 16)).astype(np.float32)
    arrays = {"x": np.broadcast_to(row, (rows, 16)).copy(), "weight": np.ones(16, np.float32)}
    square = {"x": arrays["x"], "weight": np.eye(16, dtype=np.float32)}
    for operator, given, options in (
        ("rms_norm", arrays, {"eps": 1e-6}),
        ("silu_and_mul", {"x": arrays["x"]}, {}),
        ("linear", square, {}),
        (
            "gated_mlp",
            {"x": arrays["x"], "gate_up_weight": np.eye(32, 16, dtype=np.float32), "down_weight": square["weight"]},
            {},
        ),
    ):
        (out,) = frontend.call(operator, given, **options)
        assert (out == out[0]).all() and np.isfinite(out[0]).all()
    x = arrays["x"].astype(np.float16)
    groups = {"weight": np.stack([np.eye(16, dtype=np.float16)] * 2), "group_sizes": np.array([1, rows - 2], np.int32)}
    (out,) = frontend.call("grouped_linear", {"x": x, **groups})
    compare.assert_bitwise_equal(out[:-1], x[:-1], frontend.name)
    assert not out[-1].any()
    block, options = layer_cases.attention_block(
        cases.AttentionCase("rows", ((1, 9),), 1, 1, 16, dtype="float32", padding_tokens=70_000), hidden=16
    )
    out, _ = frontend.call("attention_block", block, **options)
    compare.assert_bitwise_equal(out[1:], block["residual"][1:], frontend.name)  # padding rows attend to nothing
    turned = layer_cases.rotary("float32", 70_000, 2, 1, 8)
    query, _ = frontend.call("rotary_embedding", turned)
    last = {n: x if n == "table" else x[-9:] for n, x in turned.items()}
    compare.assert_norm(query[-9:], reference.rotary_embedding(**last)[0], frontend.name, floor=1e-6)
    sampled = layer_cases.sampling("float32", 70_000, 9)
    token, logprob = frontend.call("sample", sampled)
    layer_cases.assert_sampled({n: x[-50:] for n, x in sampled.items()}, token[-50:], logprob[-50:], frontend.name)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.frontends("eager-cuda")
def test_weights_of_more_than_2_31_values(frontend):
    """linear: int8[131 088, 32 768], of which the last feature alone is not 0."""
    import torch

    n, k = 131_088, 32_768
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of device memory")
    weight = torch.zeros(n, k, dtype=torch.int8, device="cuda")
    weight[-1] = 1
    x, scale = torch.ones(2, k, dtype=torch.float16, device="cuda"), torch.full((n,), 0.5, device="cuda")
    out = frontend.module().linear(x, weight, weight_scale=scale)
    assert (out[:, -1] == k / 2).all() and not out[:, :-1].any()


@pytest.mark.frontends("eager-cuda")
def test_tables_of_more_than_2_31_entries(frontend):
    """int32[70 000, 32 768]: over 9 GB, of which the last row's first pages are used, at offsets past 2**31."""
    from tests.common.arrays import to_numpy

    case = AttentionCase("wide-table", ((1, 60), (20, 33)), num_heads=4, num_kv_heads=2, dtype="bfloat16")
    for sequences in (case.sequences, case.sequences[::-1]):
        small = cases.build(case.but(sequences=sequences))
        (want,) = frontend.call("paged_attention", small.arrays(), **case.options())
        max_seqs, columns = 70_000, 32_768
        tables = reserve((max_seqs, columns), torch.int32, "cuda")
        tables[-2:, : small.block_tables.shape[1]] = torch.from_numpy(small.block_tables[:2])
        contexts = np.zeros(max_seqs, np.int32)
        contexts[-2:] = small.context_lens[:2]
        starts = np.zeros(max_seqs + 1, np.int32)
        starts[-2:] = small.query_start_loc[1:3]
        arrays = small.arrays() | {
            "context_lens": contexts,
            "query_start_loc": starts,
            "num_seqs": np.array([max_seqs], np.int32),
        }
        del arrays["block_tables"]
        out = frontend.module().paged_attention(block_tables=tables, **frontend.tensors(arrays), **case.options())
        compare.assert_bitwise_equal(to_numpy(out), want, frontend.name)


@pytest.mark.frontends("eager-cuda")
def test_sums_and_merges_of_more_than_2_31_elements(frontend):
    ops, count = frontend.module(), 2**31 + 2**20 + 3
    a = torch.arange(251, device="cuda", dtype=torch.bfloat16).repeat(count // 251 + 1)[:count]
    out = ops.simple_add(a, a)
    for part in (slice(0, 1000), slice(2**31 - 500, 2**31 + 500), slice(count - 1000, count)):
        assert torch.equal(out[part], a[part] * 2)
    del out
    rows = count // 128
    state = a[: rows * 128].view(rows, 1, 128)
    lse = torch.zeros(rows, 1, device="cuda")
    merged, _ = ops.merge_attention_states(state, lse, state, lse)
    for part in (slice(0, 10), slice(2**24 - 5, 2**24 + 5), slice(rows - 10, rows)):
        assert torch.equal(merged[part], state[part])


@pytest.mark.frontends("eager-cuda")
@pytest.mark.parametrize("num_heads", [1, 32])
def test_a_query_of_more_than_2_31_elements(frontend, num_heads):
    """Nearly all of it is padding, which becomes 0; the sequences stand at both ends."""
    from tests.common.arrays import to_numpy

    case = AttentionCase(
        "long-query", ((2, 60), (20, 33)), num_heads=num_heads, num_kv_heads=1, head_dim=128, dtype="bfloat16",
        padding_tokens=0,
    )  # fmt: skip
    small = cases.build(case)
    (want,) = frontend.call("paged_attention", small.arrays(), **case.options())
    num_tokens = 2**31 // (num_heads * 128) + 1000
    query = torch.full((num_tokens, num_heads, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    place = num_tokens - 22
    query[place:] = frontend.tensors({"q": small.query})["q"]
    starts = small.query_start_loc.copy()
    starts[:3] += place
    arrays = small.arrays() | {"query_start_loc": starts}
    del arrays["query"]
    out = frontend.module().paged_attention(query, **frontend.tensors(arrays), **case.options())
    compare.assert_bitwise_equal(to_numpy(out[place:]), want, frontend.name)
    for part in out[:place].split(2**20 // num_heads):
        assert not part.any()


TOO_MANY_ROWS = """
import ctypes, sys
import torch
from xla_gpu._runtime import targets
from xla_gpu._runtime.call_frame import Frame
from xla_gpu._runtime.scratch import all_results
from xla_gpu._core.operator import ArraySpec
from xla_gpu.ops.bidirectional_attention import OPERATOR as BIDIRECTIONAL
from xla_gpu.ops.mla_attention import OPERATOR as MLA, OPERATOR_WITH_LSE as MLA_WITH_LSE
from xla_gpu.ops.paged_attention import OPERATOR

def spec(dtype, *shape): return ArraySpec(shape, dtype)

# Checked before anything is read or launched, so the addresses need not be anything.
num_tokens, num_heads = 2**24, 128
call = OPERATOR.bind(
    query=spec("bfloat16", num_tokens, num_heads, 8), kv_cache=spec("bfloat16", 4, 16, 2, 8),
    context_lens=spec("int32", 2), block_tables=spec("int32", 2, 1), query_start_loc=spec("int32", 3),
    num_seqs=spec("int32", 1), scale=1.0)
torch.zeros(1, device="cuda")
try:
    Frame(call, targets.lookup(call.target, "CUDA"), all_results(call)).run([4096] * 6, [4096] * 2, 0, 0)
except ValueError as e:
    print(e)
for tokens, heads in ((num_tokens, num_heads), (2**31 - 128, 1)):
    call = BIDIRECTIONAL.bind(
        **{name: spec("bfloat16", tokens, heads, 8) for name in ("query", "key", "value")},
        query_start_loc=spec("int32", 3), num_seqs=spec("int32", 1), scale=1.0)
    try:
        Frame(call, targets.lookup(call.target, "CUDA"), all_results(call)).run([4096] * 5, [4096], 0, 0)
    except ValueError as e:
        print(e)
for operator, tokens, pages, page_size in ((MLA, num_tokens, 4, 16), (MLA_WITH_LSE, 1, 0, 2**32)):
    call = operator.bind(
        query=spec("bfloat16", tokens, num_heads, 8), kv_cache=spec("bfloat16", pages, page_size, 8),
        context_lens=spec("int32", 2), block_tables=spec("int32", 2, 1), query_start_loc=spec("int32", 3),
        num_seqs=spec("int32", 1), scale=1.0, value_dim=8)
    results = all_results(call)
    try:
        Frame(call, targets.lookup(call.target, "CUDA"), results).run([4096] * 6, [4096] * len(results), 0, 0)
    except ValueError as e:
        print(e)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.frontends("eager-cuda")
def test_more_rows_than_a_grid_counts_is_an_error(frontend):
    del frontend
    text = process.run(TOO_MANY_ROWS, timeout=120)
    for operator in ("paged_attention", "bidirectional_attention", "mla_attention"):
        assert f"\n{operator}: query: expected fewer than 2^31 rows" in f"\n{text}"
    assert f"mla_attention_with_lse: kv_cache: expected a page_size below 2^31, got {2**32}" in text
    assert f"bidirectional_attention: query: expected at most {2**31 - 129} tokens, got {2**31 - 128}" in text
