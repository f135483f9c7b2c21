"""Comparing results: where infinities and NaN are, first; then bits, or an error against a baseline."""

from __future__ import annotations

import numpy as np


def bits(x: np.ndarray) -> np.ndarray:
    """The same array as unsigned integers, so that NaN equals itself and 0 differs from -0."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def without_nan(x: np.ndarray, number: float = 0) -> np.ndarray:
    """x with a number in the places of NaN. (np.nan_to_num leaves ml_dtypes' types as they are.)"""
    return np.where(np.isnan(x), x.dtype.type(number), x)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


def assert_bitwise_equal(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Fails with the first coordinate that differs, both values and both bit patterns."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    differ = np.atleast_1d(bits(got) != bits(want))
    if differ.any():
        at = _first(differ)
        g, w = (np.atleast_1d(x)[at] for x in (got, want))
        g_bits, w_bits = (int(np.atleast_1d(bits(x))[at]) for x in (got, want))
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.size} elements differ, first at {at}: "
            f"{g} (bits {g_bits:#x}) instead of {w} (bits {w_bits:#x})"
        )


def assert_equal_numbers(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """As assert_bitwise_equal, but any NaN equals any other: no operator promises the bits of one."""
    wide = [x.astype(np.float64) for x in (got, want)]
    assert_same_special(*wide, what)
    numbers = [np.where(np.isnan(w), x.dtype.type(0), x) for x, w in zip((got, want), wide, strict=True)]
    assert_bitwise_equal(*numbers, what)


def assert_within_ulps(got: np.ndarray, want: np.ndarray, ulps: int, what: str = "") -> None:
    """Fails where more than `ulps` numbers of the dtype lie between the two. NaN equals NaN alone, and 0 equals -0."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert_same_special(got, want, what)
    half = 1 << (8 * got.dtype.itemsize - 1)
    places = [np.atleast_1d(bits(x)).astype(np.int64) for x in (got, want)]
    # The bits of negative numbers count downwards from `half`.
    g, w = (np.where(place < half, place, half - place) for place in places)
    far = (np.abs(g - w) > ulps) & ~np.atleast_1d(np.isnan(want))
    if far.any():
        at = _first(far)
        raise AssertionError(
            f"{what}: {int(far.sum())} of {far.size} elements differ by more than {ulps} ulp, first at {at}: "
            f"{np.atleast_1d(got)[at]} instead of {np.atleast_1d(want)[at]}"
        )


def assert_same_special(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """NaN, +inf and -inf are at the same indices."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        got_has, want_has = test(got), test(want)
        if (got_has != want_has).any():
            at = _first(got_has != want_has)
            raise AssertionError(
                f"{what}: {name} at {int(got_has.sum())} places instead of {int(want_has.sum())}; first difference at "
                f"{at}: {got[at]} instead of {want[at]}"
            )


def error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| where both are finite, 0 elsewhere."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(want)
    return np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))


def assert_close(got: np.ndarray, want: np.ndarray, baseline: np.ndarray, what: str = "", floor: float = 1e-5) -> None:
    """The rule of this project. The largest error against the float64 reference `want` is at most twice that of
    `baseline` (the same computation in the same dtype by plain PyTorch) plus `floor`, and so is the root
    mean square."""
    got = got.astype(np.float64)
    assert_same_special(got, want, what)
    mine, base_error = error(got, want), error(baseline, want)
    if mine.size == 0:
        return
    for name, measure in (("largest", np.max), ("root mean square", lambda e: np.sqrt(np.mean(e * e)))):
        limit = 2 * measure(base_error) + floor
        if measure(mine) > limit:
            at = np.unravel_index(int(mine.argmax()), mine.shape)
            raise AssertionError(
                f"{what}: {name} error {measure(mine):.3g} exceeds {limit:.3g} "
                f"(plain PyTorch: {measure(base_error):.3g}); "
                f"worst at {tuple(int(i) for i in at)}: {got[at]} instead of {want[at]}"
            )


def assert_norm(got: np.ndarray, want: np.ndarray, what: str, floor: float = 0.0) -> None:
    """Within the error of a float32 sum over the row, which moves each rounding to T by at most one unit."""
    import ml_dtypes

    info = ml_dtypes.finfo(want.dtype)
    wide = want.astype(np.float64)
    size = want.shape[-1]
    error = np.abs(got.astype(np.float64) - wide)
    units = 2 * float(info.eps) + (4 + size**0.5) * 2.0**-24
    allowed = units * np.abs(wide) + float(info.smallest_subnormal) + floor
    assert got.dtype == want.dtype
    assert (error <= allowed).all(), f"{what}: {float((error / allowed).max(initial=0.0))} times what is allowed"
