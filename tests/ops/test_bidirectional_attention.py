"""bidirectional_attention: values, padding, rows that do not depend on the rest of the batch, wrong metadata."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.common import bidirectional_cases, cases, compare, machine
from tests.common.bidirectional_cases import Case

ERRORS = (ValueError, RuntimeError)


def check(frontend, case: Case, seed: int = 0) -> None:
    arrays, options = bidirectional_cases.build(case, seed), case.options()
    (got,) = frontend.call("bidirectional_attention", arrays, **options)
    assert got.dtype == arrays["query"].dtype
    want = bidirectional_cases.expected(arrays, **options)
    compare.assert_close(got, want, bidirectional_cases.rounded(arrays, **options), f"{frontend.name} {case.name}")
    before, behind = case.padding
    padding = np.concatenate([got[:before], got[len(got) - behind :]])
    compare.assert_bitwise_equal(padding, np.zeros_like(padding), f"{frontend.name} {case.name}: padding rows")


@pytest.mark.parametrize("case", bidirectional_cases.CASES, ids=lambda case: case.name)
def test_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("case", bidirectional_cases.MORE, ids=lambda case: case.name)
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_more_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.frontends("eager", "eager-cuda")
def test_random_batches(frontend, seed):
    """Lengths about those of the kernels' tiles, and any options."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 111, 112, 113, 200], rng.integers(1, 12))
    kv_heads = int(rng.integers(1, 4))
    case = Case(
        f"random-{seed}",
        tuple(map(int, lengths)),
        num_heads=kv_heads * int(rng.integers(1, 5)),
        num_kv_heads=kv_heads,
        head_dim=int(rng.choice([8, 32, 64, 80, 128])),
        dtype=str(rng.choice(cases.FLOATS)),
        sliding_window=rng.choice([None, 1, 2, 16, 50]),
        soft_cap=rng.choice([None, 30.0]),
        spare_seqs=int(rng.integers(0, 4)),
        padding=(int(rng.integers(0, 4)), int(rng.integers(0, 40))),
    )
    check(frontend, case)


@pytest.mark.parametrize("window", [16, 17, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_windows_that_end_where_tiles_do(frontend, dtype, window):
    """On both sides of a query: key tiles have 32 or 64 keys, or other numbers, and row tiles up to 128 rows."""
    for head_dim, kv_heads in ((64, 2), (128, 1), (256, 2)):
        shape = dict(num_heads=2, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        check(frontend, Case(f"edges-{head_dim}", (64, 129, 31, 128, 300), sliding_window=window, **shape))


@pytest.mark.parametrize("window", [300, 2**31, 2**63 - 1])
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_windows_that_hide_nothing(frontend, window):
    """Up to the largest that an attribute holds: no position minus it may overflow."""
    for dtype in cases.FLOATS:
        case = Case(f"all-{dtype}", (300, 17, 140), num_heads=2, num_kv_heads=1, head_dim=64, dtype=dtype)
        arrays, options = bidirectional_cases.build(case), case.options()
        (want,) = frontend.call("bidirectional_attention", arrays, **options)
        (got,) = frontend.call("bidirectional_attention", arrays, **options | {"sliding_window": window})
        compare.assert_bitwise_equal(got, want, f"{frontend.name} {case.name}: window {window}")


@pytest.mark.frontends("eager", "eager-cuda")
def test_as_pytorchs_own_attention(frontend):
    """Each sequence by scaled_dot_product_attention."""
    import torch

    case = Case("sdpa", (70, 9, 1), num_heads=6, num_kv_heads=2, head_dim=32)
    arrays = bidirectional_cases.build(case)
    (got,) = frontend.call("bidirectional_attention", arrays, **case.options())
    starts = arrays["query_start_loc"]
    for first, last in itertools.pairwise(starts[:4]):
        q, k, v = (
            torch.from_numpy(arrays[name][first:last]).transpose(0, 1)[None] for name in ("query", "key", "value")
        )
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
        np.testing.assert_allclose(got[first:last], want.numpy(), atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_bits_do_not_depend_on_the_batch(frontend, dtype, window):
    """A sequence alone, among others, behind any number of rows, and where there is room for more sequences."""
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype, sliding_window=window)
    alone = Case("subject", (130,), spare_seqs=0, padding=(0, 0), **shape)
    arrays = bidirectional_cases.build(alone)
    (want,) = frontend.call("bidirectional_attention", arrays, **alone.options())
    for before, behind in (((1, 90), (3,)), ((0,), (300, 0, 17)), ((5,) * 40, ())):
        case = Case("neighbours", (*before, 130, *behind), spare_seqs=70, padding=(1, 25), **shape)
        batch = bidirectional_cases.build(case)
        first = case.padding[0] + sum(before)
        for name in ("query", "key", "value"):
            batch[name][first : first + 130] = arrays[name]
        (got,) = frontend.call("bidirectional_attention", batch, **case.options())
        compare.assert_bitwise_equal(got[first : first + 130], want, f"{frontend.name}: {len(case.lengths)} sequences")


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 16), ("float16", 128), ("bfloat16", 64)])
def test_nan_stays_in_its_sequence(frontend, dtype, head_dim, window):
    case = Case("nan", (20, 30, 5), dtype=dtype, head_dim=head_dim, sliding_window=window)
    arrays = bidirectional_cases.build(case)
    (want,) = frontend.call("bidirectional_attention", arrays, **case.options())
    rows = slice(*arrays["query_start_loc"][1:3])
    for name in ("query", "key", "value"):
        arrays[name][rows] = np.nan
    (got,) = frontend.call("bidirectional_attention", arrays, **case.options())
    assert np.isnan(got[rows].astype(np.float32)).all()
    others = np.ones(len(got), bool)
    others[rows] = False
    compare.assert_bitwise_equal(got[others], want[others], frontend.name)


def test_keys_of_no_weight_on_one_side(frontend):
    """Logits of -inf, a row's own among them."""
    case = Case("infinite-logits", (6,), num_heads=1, num_kv_heads=1, head_dim=8, padding=(0, 0), scale=1.0)
    arrays = bidirectional_cases.build(case)
    arrays["query"][:] = 2.0
    arrays["key"][:] = 0.0
    arrays["key"][4:] = -3e38  # of no weight for any row
    (got,) = frontend.call("bidirectional_attention", arrays, **case.options())
    mean = arrays["value"][:4, 0].astype(np.float64).mean(0)
    np.testing.assert_allclose(got[:, 0], np.broadcast_to(mean, (6, 8)), atol=1e-6)


# ---- Wrong metadata --------------------------------------------------------------------------------------------------
WRONG = Case("wrong-metadata", (2, 3, 1), padding=(0, 3))


def start(*values):
    def change(arrays):
        arrays["query_start_loc"][: len(values)] = values

    return change


def seqs(value):
    def change(arrays):
        arrays["num_seqs"][0] = value

    return change


VALUES = {
    "starts-fall": (start(0, 4, 2, 6), "sequence 1"),
    "starts-fall-and-overlap": (start(0, 5, 1, 6), "sequence 1"),
    "starts-negative": (start(-1, 2, 5, 6), "sequence 0"),
    "starts-most-negative": (start(0, -(2**31), 5, 6), "sequence [01]"),
    "starts-past-num_tokens": (start(0, 2, 10, 10), "sequence 1"),
    "starts-2147483647": (start(0, 2, 5, 2**31 - 1), "sequence 2"),
    "starts-wrap": (start(0, 2**31 - 1, -(2**31), 6), "sequence 0"),
    "num_seqs-negative": (seqs(-1), "num_seqs"),
    "num_seqs-over-max_seqs": (seqs(6), "num_seqs"),
    "num_seqs-2147483647": (seqs(2**31 - 1), "num_seqs"),
}


def wrong(name: str) -> dict:
    arrays = bidirectional_cases.build(WRONG)
    VALUES[name][0](arrays)
    return arrays


def assert_error(frontend, name):
    with pytest.raises(ERRORS, match=f"(?s)bidirectional_attention.*{VALUES[name][1]}.*expected"):
        frontend.call("bidirectional_attention", wrong(name), **WRONG.options())
    check(frontend, WRONG)  # the next call is as ever


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.frontends(platform="host")
def test_host_names_what_is_wrong(frontend, name):
    assert_error(frontend, name)


@pytest.mark.parametrize("num_seqs", [-1, 1])
def test_no_room_for_the_sequences_that_there_are(frontend, num_seqs):
    case = next(case for case in bidirectional_cases.CASES if case.name == "no-room-for-a-sequence")
    arrays = bidirectional_cases.build(case)
    arrays["num_seqs"][0] = num_seqs
    if frontend.platform == "host":
        text = f"(?s)bidirectional_attention: num_seqs: expected .* max_seqs = 0, got {num_seqs}"
        with pytest.raises(ERRORS, match=text):
            frontend.call("bidirectional_attention", arrays, **case.options())
    else:
        assert np.isnan(frontend.call("bidirectional_attention", arrays, **case.options())[0]).all()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.frontends(platform="cuda")
def test_cuda_rows_are_nan(frontend, name, dtype, window):
    case = WRONG.but(dtype=dtype, sliding_window=window)
    arrays = bidirectional_cases.build(case)
    VALUES[name][0](arrays)
    (got,) = frontend.call("bidirectional_attention", arrays, **case.options())
    assert np.isnan(got.astype(np.float32)).all()
    check(frontend, case)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.frontends("eager-cuda")
def test_cuda_error_where_asked_for(frontend, name, monkeypatch):
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    assert_error(frontend, name)


ALL_ERRORS = """
import os, sys
from tests.common import frontends
from tests.ops import test_bidirectional_attention as tests

frontend = frontends.ALL[sys.argv[1]]
assert not frontend.unavailable()
for name in tests.VALUES:
    tests.assert_error(frontend, name)
print("all errors were raised", flush=True)
os._exit(0)
"""


@pytest.mark.frontends(platform="cuda")
def test_cuda_errors_where_asked_for_at_the_start(frontend):
    """In programs of several calls too, which XLA would run as a CUDA graph."""
    result = subprocess.run(
        [sys.executable, "-c", ALL_ERRORS, frontend.name],
        cwd=machine.ROOT,
        env={**os.environ, "XLA_GPU_CHECK_INPUTS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "all errors were raised" in result.stdout, result.stderr[-3000:]
