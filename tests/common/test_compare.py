"""The checks that the other tests lean on can fail, and the poison is where it should be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.common import baseline, cases, compare, reference

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def changed(value, at=(1, 2)):
    y = X.copy()
    y[at] = value
    return y


def test_bitwise_names_the_first_difference():
    compare.assert_bitwise_equal(X, X.copy())
    with pytest.raises(AssertionError, match=r"1 of 12 elements differ, first at \(1, 2\): 5.0 \(bits 0x40a00000\)"):
        compare.assert_bitwise_equal(changed(5), X)
    zeros = np.zeros(3, np.float32)
    with pytest.raises(AssertionError, match="3 of 3"):
        compare.assert_bitwise_equal(-zeros, zeros)
    compare.assert_bitwise_equal(changed(np.nan), changed(np.nan))
    with pytest.raises(AssertionError, match="dtype"):
        compare.assert_bitwise_equal(X, X.astype(np.float64))
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_bitwise_equal(X, X[:2])


@pytest.mark.parametrize("dtype", [*cases.FLOATS, "float8_e5m2", "int32"])
def test_numbers_are_equal_where_bits_of_nan_differ(dtype):
    dtype = cases.DTYPES.get(dtype, np.dtype(getattr(ml_dtypes, dtype, np.int32)))
    want = np.arange(6).astype(dtype)
    got = want.copy()
    compare.assert_equal_numbers(got, want)
    if dtype.kind != "i":
        want[1] = got[1] = np.nan
        compare.bits(got)[1] |= 1  # another NaN
        compare.assert_equal_numbers(got, want)
        with pytest.raises(AssertionError, match="NaN at 1 places instead of 0"):
            compare.assert_equal_numbers(got, np.arange(6).astype(dtype))
    got[2] = 3
    with pytest.raises(AssertionError, match=r"first at \(2,\)"):
        compare.assert_equal_numbers(got, want)


@pytest.mark.parametrize("dtype", [*cases.FLOATS, *cases.FLOAT8S])
def test_without_nan_keeps_the_type_and_all_numbers(dtype):
    dtype = cases.DTYPES[dtype]
    x = np.array([np.nan, -1.5, 0.0, 448.0], dtype)
    got = compare.without_nan(x)
    compare.assert_bitwise_equal(got, np.array([0.0, -1.5, 0.0, 448.0], dtype))
    assert compare.without_nan(x, 2)[0] == 2 and np.isnan(x[0])
    if dtype.itemsize > 1:
        infinite = np.array([-np.inf, np.inf], dtype)
        compare.assert_bitwise_equal(compare.without_nan(infinite), infinite)


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_ulps_are_counted_across_zero(dtype):
    dtype = cases.DTYPES[dtype]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    steps = np.array([0, 1, 2, 3], unsigned)
    up, down = steps.view(dtype), (steps | unsigned.type(1 << (8 * dtype.itemsize - 1))).view(dtype)
    zeros = np.zeros(4, dtype)
    for got in (up, down):
        compare.assert_within_ulps(got, zeros, 3)
        compare.assert_within_ulps(got[:3], zeros[:3], 2)
        with pytest.raises(AssertionError, match=r"1 of 4 elements differ by more than 2 ulp, first at \(3,\)"):
            compare.assert_within_ulps(got, zeros, 2)
    compare.assert_within_ulps(up[1:2], down[1:2], 2)
    with pytest.raises(AssertionError, match="1 of 1"):
        compare.assert_within_ulps(up[1:2], down[1:2], 1)
    nan = np.full(4, np.nan, dtype)
    compare.assert_within_ulps(nan, nan, 0)
    with pytest.raises(AssertionError, match="NaN at 0 places instead of 4"):
        compare.assert_within_ulps(zeros, nan, 2)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_are_compared_by_place(special):
    compare.assert_close(changed(special), changed(special), X)
    for got, want in ((changed(special), X), (X, changed(special)), (changed(special), changed(special, (0, 0)))):
        with pytest.raises(AssertionError, match="first difference at"):
            compare.assert_close(got, want, X)


def test_tolerance_is_twice_the_baseline_error():
    want = X.astype(np.float64)
    base = changed(X[1, 2] + 1e-3)
    compare.assert_close(changed(X[1, 2] + 1.9e-3), want, base)
    with pytest.raises(AssertionError, match=r"largest error .* worst at \(1, 2\)"):
        compare.assert_close(changed(X[1, 2] + 2.1e-3), want, base)
    with pytest.raises(AssertionError, match="root mean square"):
        compare.assert_close(X + np.float32(1.5e-3), want, base)
    compare.assert_close(X + np.float32(0.9e-5), want, X)
    with pytest.raises(AssertionError, match="exceeds"):
        compare.assert_close(X + np.float32(1.1e-5), want, X)


def test_poison_is_in_every_unread_place_and_in_no_other():
    case = cases.AttentionCase("poison", ((1, 20), (0, 0), (3, 9)), page_size=8, head_dim=8)
    clean, poisoned = cases.build(case, poison=False), cases.build(case, poison=True)
    used = sum(context_len for _, context_len in case.sequences)
    k, v = reference.split_cache(poisoned.kv_cache)
    for part in (k, v):
        assert np.isfinite(part).all(axis=(2, 3)).sum() == used
        assert np.isnan(part).all(axis=(2, 3)).sum() == part.shape[0] * part.shape[1] - used
    assert np.isnan(poisoned.query[-case.padding_tokens :]).all()
    num_pages = poisoned.kv_cache.shape[0]
    outside = (poisoned.block_tables < 0) | (poisoned.block_tables >= num_pages)
    assert outside.sum() == poisoned.block_tables.size - sum(-(-c // case.page_size) for _, c in case.sequences)
    assert set(poisoned.context_lens[3:]) <= {2**31 - 1, -(2**31), -5}
    assert set(poisoned.query_start_loc[4:]) <= {-7, 2**31 - 1}
    # Reading poison changes a result: without poison these are the same inputs.
    for want, got in zip(
        reference.paged_attention(**clean.arrays(), **case.options()),
        reference.paged_attention(**poisoned.arrays(), **case.options()),
        strict=True,
    ):
        compare.assert_bitwise_equal(got, want)


@pytest.mark.parametrize("case", [*cases.COMMON, *cases.MORE, *cases.grid()], ids=lambda c: c.name)
def test_reference_and_plain_pytorch_agree(case):
    """Two ways to write the semantics down: float64 loops, and the models' eager attention. Where they part, a test
    that passes means nothing."""
    inputs = cases.build(case)
    want, want_lse = reference.paged_attention(**inputs.arrays(), **case.options())
    out, lse = baseline.paged_attention(inputs, **case.options())
    compare.assert_same_special(lse, want_lse, case.name)
    tolerance = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}[case.dtype] * max(1, case.spread)
    assert compare.error(out, want).max(initial=0) < tolerance
    assert compare.error(lse, want_lse).max(initial=0) < tolerance
