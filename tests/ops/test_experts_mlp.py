"""experts_mlp: every format of the weights, any routing, and rows that do not depend on the others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare, experts_cases, grouped_cases


def check(frontend, arrays, activation="silu_and_mul"):
    (got,) = frontend.call("experts_mlp", arrays, activation=activation)
    assert got.dtype == arrays["x"].dtype
    want, rounded = experts_cases.expected(arrays, activation), experts_cases.rounded(arrays, activation)
    compare.assert_close(got, want, rounded, f"{frontend.name}: experts_mlp")
    return got


@pytest.mark.parametrize("weight_format", grouped_cases.FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_formats(frontend, weight_format, dtype, bias):
    check(frontend, experts_cases.inputs(weight_format, 40, 5, 2, dtype=dtype, bias=bias))


@pytest.mark.parametrize("activation", experts_cases.ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations(frontend, activation, dtype):
    """With values past swigluoai's limits."""
    arrays = experts_cases.inputs("plain", 6, 4, 3, dtype=dtype)
    arrays["x"] = (arrays["x"] * 8).astype(arrays["x"].dtype)
    check(frontend, arrays, activation)


def test_other_sizes(frontend):
    """More columns than hidden, formats of each product's own, weights of x's dtype, ids of 64 bits."""
    arrays = experts_cases.inputs("mxfp4", 5, 3, 2, hidden=96, intermediate=32)
    down = grouped_cases.inputs("int8", [1] * 3, 112, 32)
    arrays |= {"down_weight": down["weight"], "down_scale": down["weight_scale"]}
    arrays["topk_weights"] = arrays["topk_weights"].astype(arrays["x"].dtype)
    arrays["topk_ids"] = arrays["topk_ids"].astype(np.int64)
    assert check(frontend, arrays).shape == (5, 112)


ROUTINGS = {
    "one expert": (9, 1, 1, lambda rng, shape: np.zeros(shape)),
    "all rows to one": (70, 6, 2, lambda rng, shape: np.full(shape, 4)),
    "the same expert twice": (5, 6, 2, lambda rng, shape: np.repeat(rng.integers(0, 6, (shape[0], 1)), 2, 1)),
    "most experts without rows": (3, 200, 2, lambda rng, shape: rng.integers(0, 200, shape)),
    "as many as there are": (4, 5, 5, lambda rng, shape: np.tile(np.arange(5)[::-1], (shape[0], 1))),
    "no expert at all": (4, 3, 2, lambda rng, shape: np.full(shape, -1)),
    "numbers that are no expert": (40, 3, 2, lambda rng, shape: rng.choice([-(2**31), -1, 0, 1, 3, 2**31 - 1], shape)),
    # More pairs than are compared with each other: they are sorted.
    "many rows": (300, 7, 4, lambda rng, shape: rng.integers(-2, 9, shape)),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(frontend, routing):
    rows, num_experts, top_k, ids = ROUTINGS[routing]
    arrays = experts_cases.inputs("plain", rows, num_experts, min(top_k, num_experts), 64, 32)
    arrays["topk_ids"] = ids(np.random.default_rng(1), (rows, top_k)).astype(np.int32)
    check(frontend, arrays)


def test_what_has_no_expert_is_not_read(frontend):
    """Rows of NaN and weights of NaN; a row whose experts are all elsewhere is 0."""
    arrays = experts_cases.inputs("plain", 6, 4, 2, 64, 32)
    arrays["topk_ids"][2] = [-1, 4]
    arrays["topk_ids"][4, 1] = 2**31 - 1
    arrays["topk_weights"][4, 1] = np.nan
    arrays["x"][2], arrays["topk_weights"][2] = np.nan, np.nan
    got = check(frontend, arrays)
    compare.assert_bitwise_equal(got[2], np.zeros_like(got[2]), frontend.name)
    assert np.isfinite(got.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinite_weights(frontend, dtype):
    """A result is infinite where one chosen expert's weight is; where infinities of both signs meet it is NaN."""
    arrays = experts_cases.inputs("plain", 4, 4, 2, 64, 32)
    arrays["topk_weights"] = arrays["topk_weights"].astype(cases.DTYPES[dtype])
    arrays["topk_weights"][1, 0], arrays["topk_weights"][2] = -np.inf, [np.inf, np.inf]
    (got,) = frontend.call("experts_mlp", arrays)
    with np.errstate(invalid="ignore"):
        want = experts_cases.expected(arrays)
    assert np.isinf(want[1]).all() and np.isinf(want[2]).any() and np.isnan(want[2]).any()
    np.testing.assert_array_equal(got[1:3].astype(np.float64), want[1:3])
    assert np.isfinite(got[[0, 3]].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinite_results_of_experts(frontend, dtype):
    """As the products are: weights of few bits, of which the lower part is 0, weights of all, zeros, and NaN."""
    arrays = experts_cases.inputs("plain", 6, 4, 2, 64, 32, bias=True)
    weights = [[0.5, 0.25], [0.3, 0.7], [0.0, 1.0], [-1.0, 0.5], [np.nan, 0.5], [np.inf, 1.0]]
    arrays["topk_weights"] = np.array(weights, cases.DTYPES[dtype])
    arrays["down_bias"][:, 0], arrays["down_bias"][:, 1] = np.inf, -np.inf
    (got,) = frontend.call("experts_mlp", arrays)
    with np.errstate(invalid="ignore"):
        want = experts_cases.expected(arrays)
    np.testing.assert_array_equal(got[:, :2].astype(np.float64), want[:, :2])
    assert np.isinf(want[[0, 1, 5], :2]).all() and np.isnan(want[2:5, :2]).all()
    assert np.isfinite(got[:4, 2:].astype(np.float64)).all()


@pytest.mark.parametrize(("rows", "top_k"), [(0, 2), (3, 0)])
def test_no_pairs(frontend, rows, top_k):
    arrays = experts_cases.inputs("plain", rows, 3, top_k, 64, 32)
    (got,) = frontend.call("experts_mlp", arrays)
    compare.assert_bitwise_equal(got, np.zeros((rows, 64), arrays["x"].dtype), frontend.name)


@pytest.mark.parametrize("activation", experts_cases.ACTIVATIONS)
def test_bits_of_a_row_do_not_depend_on_the_others(frontend, activation):
    """A row alone, in batches of other sizes, compared and sorted, and beside rows of NaN."""
    arrays = experts_cases.inputs("plain", 300, 6, 4, 64, 32, bias=True)
    (whole,) = frontend.call("experts_mlp", arrays, activation=activation)
    for rows in ([7], [299, 0, 7], list(range(0, 300, 5))):
        part = {name: arrays[name][rows] for name in ("x", "topk_weights", "topk_ids")}
        (got,) = frontend.call("experts_mlp", {**arrays, **part}, activation=activation)
        compare.assert_bitwise_equal(got, whole[rows], f"{frontend.name}: {len(rows)} rows")
    poisoned = arrays["x"].copy()
    poisoned[50] = np.nan
    (got,) = frontend.call("experts_mlp", {**arrays, "x": poisoned}, activation=activation)
    others = np.arange(300) != 50
    compare.assert_bitwise_equal(got[others], whole[others], f"{frontend.name}: beside NaN")
    assert np.isnan(got[50].astype(np.float64)).all()
