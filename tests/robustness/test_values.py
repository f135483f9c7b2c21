"""Numbers that break naive kernels: they come out right, or as the NaN and infinities that the reference has, in the
rows that see them and in no others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.common import cases, compare, reference
from tests.common.cases import AttentionCase

pytestmark = pytest.mark.frontends("eager", "eager-cuda")
FLOATS = pytest.mark.parametrize("dtype", cases.FLOATS)
# For the kernels for decoding and for those of prompts.
LOADS = {"few-rows": ((3, 40), (1, 33)), "many-rows": ((20, 40), (33, 33))}
ROWS = pytest.mark.parametrize("load", LOADS)


def small(name, load, **fields):
    return AttentionCase(
        name, LOADS[load], **{"num_heads": 4, "num_kv_heads": 2, "page_size": 8, "head_dim": 64} | fields
    )


def both(frontend, case, inputs):
    """((out, lse) of the front end, (out, lse) of the reference)."""
    got = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    with np.errstate(invalid="ignore", over="ignore"):
        return got, reference.paged_attention(**inputs.arrays(), **case.options())


def used_slots(inputs, s, part):
    """The keys (part 0) or values (part 1) of sequence s, as an index [page, slot] into their pages."""
    pages = reference.split_cache(inputs.kv_cache)[part]
    positions = np.arange(inputs.context_lens[s])
    return pages, inputs.block_tables[s, positions // pages.shape[1]], positions % pages.shape[1]


@ROWS
@FLOATS
@pytest.mark.parametrize("sinks", [False, True])
def test_equal_logits_are_the_mean(frontend, dtype, load, sinks):
    case = small("equal", load, dtype=dtype, sinks=sinks)
    inputs = cases.build(case)
    inputs.query[:] = 0
    (out, lse), (want, want_lse) = both(frontend, case, inputs)
    compare.assert_same_special(out, want)
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), want, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@ROWS
@FLOATS
@pytest.mark.parametrize("logit", [6e4, -6e4])
def test_every_logit_is_huge_and_the_same(frontend, dtype, load, logit):
    """A softmax that subtracts no maximum gives 0/0 or inf/inf; the mean of V is right."""
    case = small("huge", load, dtype=dtype, scale=1.0)
    inputs = cases.build(case)
    inputs.query[:] = math.copysign(30.0, logit)
    for s in range(2):
        pages, page, slot = used_slots(inputs, s, 0)
        pages[page, slot] = abs(logit) / 30.0 / 64
    (out, lse), (want, want_lse) = both(frontend, case, inputs)
    compare.assert_same_special(out, want)
    compare.assert_same_special(lse, want_lse)
    tolerance = {"float32": 2e-2, "float16": 2e-2, "bfloat16": 3e-2}[dtype]  # a logit's own rounding is 4e-3
    np.testing.assert_allclose(out.astype(np.float64), want, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@ROWS
def test_values_near_the_largest_float16_do_not_overflow(frontend, load):
    case = small("large-values", load, dtype="float16")
    inputs = cases.build(case)
    for s in range(2):
        pages, page, slot = used_slots(inputs, s, 1)
        pages[page, slot] = np.where(np.arange(64) % 2, 65504, -65504)
    (out, _), (want, _) = both(frontend, case, inputs)
    compare.assert_same_special(out, want)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1e-3)


@ROWS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scaled_values_past_float16_become_infinite(frontend, dtype, load):
    """A float8 cache whose v_scale takes it past float16: infinities of the right sign; in float32 the number."""
    case = small("overflow", load, dtype=dtype, cache_dtype="float8_e4m3fn", scales="one")
    inputs = cases.build(case)
    for s in range(2):
        pages, page, slot = used_slots(inputs, s, 1)
        pages[page, slot] = np.where(np.arange(64) % 2, 448, -448)
    inputs.v_scale[:] = 1000.0
    (out, _), (want, _) = both(frontend, case, inputs)
    with np.errstate(over="ignore"):
        want = want.astype(out.dtype)
    compare.assert_same_special(out, want)
    if dtype == "float32":
        np.testing.assert_allclose(out, want, rtol=1e-4)
    else:
        assert np.isinf(out).any()


@ROWS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_past_float32(frontend, dtype, load):
    """q·k past float32 is an infinite logit: of +inf the row is NaN, as in every softmax; of -inf the key is out."""
    case = small("products", load, dtype=dtype)
    clean = cases.build(case)
    want_clean, lse_clean = frontend.call("paged_attention_with_lse", clean.arrays(), **case.options())
    inputs = cases.build(case)
    row = int(inputs.query_start_loc[1])  # the first row of the second sequence
    inputs.query[row] = 1e20
    pages, page, slot = used_slots(inputs, 1, 0)
    pages[page[0], slot[0]] = 1e20
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    assert np.isnan(out[row].astype(np.float32)).all() and not np.isfinite(lse[row]).any()
    first = slice(0, row)
    compare.assert_bitwise_equal(out[first], want_clean[first], "the other sequence")
    compare.assert_bitwise_equal(lse[first], lse_clean[first], "the other sequence")

    if LOADS[load][1][0] > 1:
        return
    pages[page[0], slot[0]] = -1e20
    pages[page[1:], slot[1:]] = 0
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    values, page, slot = used_slots(inputs, 1, 1)
    mean = values[page[1:], slot[1:]].astype(np.float64).mean(axis=0).repeat(2, axis=0)
    np.testing.assert_allclose(out[row].astype(np.float64), mean, atol=1e-2)
    np.testing.assert_allclose(lse[row], math.log(len(page) - 1), rtol=1e-5)


@ROWS
@FLOATS
@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_nan_in_a_used_slot_stays_in_the_rows_that_see_it(frontend, dtype, load, part, special):
    """The last key of the first sequence, of one kv head: its last row's heads, and nothing else. On CUDA a value may
    reach the sequence's other rows, which multiply it by a weight of 0."""
    case = small("nan", load, dtype=dtype)
    clean = frontend.call("paged_attention_with_lse", cases.build(case).arrays(), **case.options())
    inputs = cases.build(case)
    pages, page, slot = used_slots(inputs, 0, part)
    pages[page[-1], slot[-1], 1] = special
    row = int(inputs.query_start_loc[1]) - 1
    got = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    # Infinite keys make logits of both signs, and their sum NaN.
    assert not np.isfinite(got[0][row, 2:].astype(np.float32)).any()
    first = 0 if frontend.platform == "cuda" and part == 1 else row
    for g, w in zip(got, clean, strict=True):
        g[first : row + 1, 2:] = w[first : row + 1, 2:]
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: rows and heads that do not see it")


@ROWS
@FLOATS
def test_nan_in_a_query_row_stays_there(frontend, dtype, load):
    case = small("nan-query", load, dtype=dtype)
    clean = frontend.call("paged_attention_with_lse", cases.build(case).arrays(), **case.options())
    inputs = cases.build(case)
    inputs.query[1, 2, 5] = np.nan
    got = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    assert np.isnan(got[0][1, 2].astype(np.float32)).all() and np.isnan(got[1][1, 2])
    for g, w in zip(got, clean, strict=True):
        g[1, 2] = w[1, 2]
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: the other rows and heads")


@ROWS
@FLOATS
def test_a_sink_of_minus_infinity_is_none(frontend, dtype, load):
    case = small("sink", load, dtype=dtype, sinks=True)
    inputs = cases.build(case)
    inputs.sinks[:] = -np.inf
    with_sinks = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    inputs.sinks = None
    without = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    for g, w in zip(with_sinks, without, strict=True):
        compare.assert_same_special(g, w, frontend.name)
        np.testing.assert_allclose(g.astype(np.float32), w.astype(np.float32), rtol=1e-6, atol=1e-6)


@ROWS
@FLOATS
def test_a_sink_far_above_all_logits(frontend, dtype, load):
    """All weight goes to the sink: 0, not NaN; the log-sum-exp is the sink."""
    case = small("sink-above", load, dtype=dtype, sinks=True)
    inputs = cases.build(case)
    inputs.sinks[:] = 3e4
    (out, lse), (want, want_lse) = both(frontend, case, inputs)
    assert not out.any() and not want.any()
    compare.assert_same_special(lse, want_lse)
    owned = np.isfinite(lse)
    np.testing.assert_allclose(lse[owned], want_lse[owned], rtol=1e-6)


@FLOATS
def test_subnormal_results_are_not_flushed_or_are_all_zero(frontend, dtype):
    """Values below the smallest normal number: the sum is off by at most that number."""
    case = small("subnormal", "few-rows", dtype=dtype)
    inputs = cases.build(case)
    tiny = float(np.finfo(np.float32).smallest_normal) if dtype != "float16" else 6.1e-5
    for s in range(2):
        pages, page, slot = used_slots(inputs, s, 1)
        pages[page, slot] = tiny / 4
    (out, _), (want, _) = both(frontend, case, inputs)
    assert np.abs(out.astype(np.float64) - want).max() <= tiny
