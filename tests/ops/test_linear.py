"""linear: every format of the weight, every number of rows, and what stands behind the product."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import baseline, cases, compare, reference


def check(frontend, arrays, **options):
    (got,) = frontend.call("linear", arrays, **options)
    assert got.dtype == arrays["x"].dtype
    (want,) = reference.linear(**arrays, **options)
    compare.assert_close(got, want, baseline.linear(**arrays, **options), f"{frontend.name}: linear")
    return got


@pytest.mark.parametrize("weight_format", cases.WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_formats(frontend, weight_format, dtype):
    """n and k that no tile divides, where the format allows that."""
    k = 640 if weight_format.startswith("int4") else 592
    check(frontend, cases.linear_inputs(weight_format, 5, 208, k, dtype))


@pytest.mark.parametrize("weight_format", ["plain", "float8-block", "int4"])
@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 65, 130])
@pytest.mark.frontends("eager", "jax", "torch_xla", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_rows(frontend, rows, weight_format):
    check(frontend, cases.linear_inputs(weight_format, rows, 144, 256))


@pytest.mark.parametrize("activation", [None, "silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "int4-zero-point"])
@pytest.mark.parametrize("rows", [3, 70])
def test_epilogue(frontend, rows, weight_format, activation):
    """Bias, activation and residual together; n / 2 is no multiple of a work tile's 64 features."""
    features = 160 if activation is None else 80
    arrays = cases.linear_inputs(weight_format, rows, 160, 384, "float16", bias=True, residual=features)
    check(frontend, arrays, activation=activation)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activation_and_residual_alone(frontend, dtype):
    arrays = cases.linear_inputs("plain", 2, 96, 64, dtype, residual=48)
    check(frontend, arrays, activation="silu_and_mul")


@pytest.mark.parametrize("weight_format", cases.WEIGHT_FORMATS)
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_bits_of_a_row_do_not_depend_on_the_others(frontend, weight_format):
    """A row alone, among others, elsewhere, with neighbours of NaN: the same bits up to 64 rows."""
    arrays = cases.linear_inputs(weight_format, 64, 176, 1280)
    (whole,) = frontend.call("linear", arrays)
    x = arrays["x"]
    for rows in ([0], [7], [63], list(range(9)), list(range(5, 38)), [40, 2, 2, 61]):
        (part,) = frontend.call("linear", {**arrays, "x": x[rows]})
        compare.assert_bitwise_equal(part, whole[rows], f"{frontend.name}: rows {rows}")
    poisoned = x.copy()
    poisoned[1], poisoned[33] = np.nan, np.inf
    (got,) = frontend.call("linear", {**arrays, "x": poisoned})
    others = [row for row in range(64) if row not in (1, 33)]
    compare.assert_bitwise_equal(got[others], whole[others], f"{frontend.name}: beside NaN and inf")
    assert np.isnan(got[1].astype(np.float32)).all() and not np.isfinite(got[33].astype(np.float32)).any()


@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "float8-block", "int8", "int4-zero-point"])
@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.frontends("eager", "eager-cuda")
def test_magnitudes_that_float16_does_not_have(frontend, rows, weight_format):
    """Of whole rows, of 128 values beside others, and of single values beside others."""
    arrays = cases.linear_inputs(weight_format, rows, 176, 1280)
    powers = np.array([-100, -40, -20, -9, 0, 13, 30, 100])[np.arange(rows) % 8, None]
    x = arrays["x"].astype(np.float32)
    x[:, 128:256] *= 2.0**-12
    x[:, 256:384] = 0
    x[:, 384:512:3] *= 2.0**-20
    x[:, 512:640:5] *= 2.0**12
    arrays["x"] = np.ldexp(x, powers).astype(arrays["x"].dtype)
    (got,) = frontend.call("linear", arrays)
    (want,) = reference.linear(**arrays)
    results = [result.astype(np.float64) for result in (got, want, baseline.linear(**arrays))]
    compare.assert_close(*(np.ldexp(result, -powers) for result in results), f"{frontend.name}: linear")


@pytest.mark.parametrize("weight_format", ["float8-channel", "float8-tensor", "int8"])
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.frontends("eager", "jax", "torch_xla", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_float16_does_not_overflow(frontend, rows, weight_format):
    """Products of the stored values alone would be over 65504; what they mean is not."""
    arrays = cases.linear_inputs(weight_format, rows, 32, 4096, "float16")
    arrays["x"][:] = 1
    arrays["weight"][:] = 96
    arrays["weight_scale"][:] = 1e-4
    (got,) = frontend.call("linear", arrays)
    # XLA adds in float16 on the CPU.
    np.testing.assert_allclose(got.astype(np.float32), 4096 * 96 * 1e-4, rtol=0.02)


@pytest.mark.parametrize("weight_format", cases.WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.frontends("eager", "eager-cuda")
def test_an_infinite_value_of_x(frontend, weight_format, dtype):
    """Infinite results with the sign of its weight, NaN where that is 0; other rows are as they were."""
    arrays = cases.linear_inputs(weight_format, 12, 144, 384, dtype)
    arrays["x"][3, 130] = np.inf
    arrays["x"][9, 7] = -np.inf
    with np.errstate(invalid="ignore"):
        (want,) = reference.linear(**arrays)
    (got,) = frontend.call("linear", arrays)
    compare.assert_same_special(got.astype(np.float64), want, f"{frontend.name}: linear")
    finite = {**arrays, "x": np.delete(arrays["x"], [3, 9], axis=0)}
    check(frontend, finite)
    compare.assert_bitwise_equal(np.delete(got, [3, 9], axis=0), frontend.call("linear", finite)[0], "the other rows")


@pytest.mark.parametrize("weight_format", ["float8-channel", "float8-block"])
@pytest.mark.frontends("eager", "eager-cuda")
def test_long_rows(frontend, weight_format):
    """Rows that take more scratch memory than partial sums; a row alone has the same bits."""
    arrays = cases.linear_inputs(weight_format, 48, 32, 81936)
    got = check(frontend, arrays)
    (alone,) = frontend.call("linear", {**arrays, "x": arrays["x"][-1:]})
    compare.assert_bitwise_equal(alone, got[-1:], f"{frontend.name}: the last row alone")


def test_no_rows(frontend):
    (got,) = frontend.call("linear", cases.linear_inputs("plain", 0, 32, 32))
    assert got.shape == (0, 32)


def test_nan_in_a_float8_weight_stays_in_its_feature(frontend):
    arrays = cases.linear_inputs("float8-tensor", 3, 64, 256)
    arrays["weight"][17, 200] = np.nan
    got = check(frontend, arrays)
    assert np.isnan(got[:, 17].astype(np.float32)).all()


@pytest.mark.frontends(platform="cuda")
def test_zero_point_out_of_range_is_nan(frontend):
    arrays = cases.linear_inputs("int4-zero-point", 3, 64, 256)
    arrays["weight_zero_point"][9, 1] = 200
    (got,) = frontend.call("linear", arrays)
    finite = np.isfinite(got.astype(np.float32))
    assert not finite[:, 9].any() and np.delete(finite, 9, axis=1).all()


@pytest.mark.frontends(platform="host")
def test_zero_point_out_of_range_is_an_error(frontend):
    arrays = cases.linear_inputs("int4-zero-point", 3, 64, 256)
    arrays["weight_zero_point"][9, 1] = 200
    with pytest.raises(Exception, match="linear: weight_zero_point: expected values of 0 to 127, got 200 for row 9"):
        frontend.call("linear", arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 14336), (28672, 4096)])
@pytest.mark.parametrize("weight_format", ["plain", "float8-block", "int4"])
@pytest.mark.frontends("eager-cuda")
def test_work_tiles_shared_by_ctas(frontend, weight_format, n, k):
    """Shapes of Llama 3 8B: CTAs share work tiles. The order of summation is fixed: every run gives the same bits."""
    arrays = cases.linear_inputs(weight_format, 3, n, k)
    got = check(frontend, arrays)
    for _ in range(5):
        compare.assert_bitwise_equal(frontend.call("linear", arrays)[0], got, "the same call again")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16912, 19024])
@pytest.mark.parametrize("rows", [1, 33, 64])
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "float8-block"])
@pytest.mark.frontends("eager-cuda")
def test_work_tiles_by_the_number_of_sms(frontend, weight_format, n, rows, activation):
    """118 and 119 work tiles of 144 and 160 features, of which the last is not whole."""
    arrays = cases.linear_inputs(weight_format, rows, n, 80, bias=True, residual=n if activation is None else n // 2)
    got = check(frontend, arrays, activation=activation)
    last = {name: arrays[name][-1:] for name in ("x", "residual")}
    (alone,) = frontend.call("linear", {**arrays, **last}, activation=activation)
    compare.assert_bitwise_equal(alone, got[-1:], f"{frontend.name}: the last row alone")
