"""grouped_linear: every format of the weight, groups of any size, and rows that belong to none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import compare, grouped_cases

FORMATS = grouped_cases.FORMATS


def check(frontend, arrays):
    (got,) = frontend.call("grouped_linear", arrays)
    assert got.dtype == arrays["x"].dtype
    want, rounded = grouped_cases.expected(arrays), grouped_cases.rounded(arrays)
    compare.assert_close(got, want, rounded, f"{frontend.name}: grouped_linear")
    return got


def k_of(weight_format: str) -> int:
    """A size that no chunk divides, where the format allows that."""
    return 640 if weight_format.startswith("int4") else 608 if weight_format == "mxfp4" else 592


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_formats(frontend, weight_format, dtype, bias):
    """n that no work tile divides; groups of no row, of one, and of more than a row tile of 8."""
    check(frontend, grouped_cases.inputs(weight_format, [3, 0, 1, 12, 0], 208, k_of(weight_format), dtype, bias=bias))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("sizes", [[0, 90, 0], [200, 1], [17, 70, 64, 33]])
def test_many_rows(frontend, weight_format, sizes):
    """Several row tiles of a group, the last one not whole; one group with all rows."""
    check(frontend, grouped_cases.inputs(weight_format, sizes, 144, k_of(weight_format), bias=True))


@pytest.mark.parametrize("weight_format", ["plain", "mxfp4"])
def test_many_groups(frontend, weight_format):
    """More groups than a CTA has threads, and more than rows; the first and the last ones are empty."""
    sizes = np.zeros(300, np.int32)
    sizes[[7, 8, 128, 129, 255, 290]] = [1, 2, 20, 1, 3, 5]
    check(frontend, grouped_cases.inputs(weight_format, sizes, 16, 128))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_bits_of_a_row_do_not_depend_on_the_others(frontend, weight_format):
    """A row alone, in a group of other sizes, with neighbours of NaN; by row tiles of 8, 16 and 64."""
    arrays = grouped_cases.inputs(weight_format, [100, 40], 176, 1280, bias=True)
    (whole,) = frontend.call("grouped_linear", arrays)
    x = arrays["x"]
    twelve = (range(6), range(100, 106))
    for first, second in [([0], []), ([], [100]), ([5, 99], [139]), twelve, (range(30), range(100, 109))]:
        sizes = np.array([len(first), len(second)], np.int32)
        rows = [*first, *second]
        (part,) = frontend.call("grouped_linear", {**arrays, "x": x[rows], "group_sizes": sizes})
        compare.assert_bitwise_equal(part, whole[rows], f"{frontend.name}: rows {rows}")
    poisoned = x.copy()
    poisoned[50] = np.nan
    (out,) = frontend.call("grouped_linear", {**arrays, "x": poisoned})
    others = np.arange(len(x)) != 50
    compare.assert_bitwise_equal(out[others], whole[others], f"{frontend.name}: beside NaN")
    assert np.isnan(out[50].astype(np.float64)).all()


@pytest.mark.parametrize("weight_format", ["plain", "int4", "mxfp4"])
@pytest.mark.parametrize(
    "sizes",
    [
        [0, 0, 0],
        [2, 0, 3],
        [-5, 4, -(2**31)],
        [3, 2**31 - 1, 2**31 - 1],
        [2**31 - 1, 2**31 - 1, 2**31 - 1],
        [20, 30, 40],
    ],
)
def test_any_sizes(frontend, weight_format, sizes):
    """Rows of no group are 0, also where x is NaN; sizes below 0 are 0, and rows past the last are not there."""
    arrays = grouped_cases.inputs(weight_format, [9, 8, 6], 48, 256)
    arrays["group_sizes"] = np.array(sizes, np.int32)
    used = min(sum(max(size, 0) for size in sizes), 23)
    arrays["x"][used:] = np.nan
    got = check(frontend, arrays)
    compare.assert_bitwise_equal(got[used:], np.zeros_like(got[used:]), frontend.name)


@pytest.mark.parametrize("weight_format", ["plain", "int8"])
def test_no_rows(frontend, weight_format):
    arrays = grouped_cases.inputs(weight_format, [0, 0], 32, 64, rows=0)
    (got,) = frontend.call("grouped_linear", arrays)
    assert got.shape == (0, 32)


@pytest.mark.frontends("jax")
def test_more_rows_than_a_kernel_takes(frontend):
    """An array without memory."""
    import jax

    from xla_gpu.jax import grouped_linear

    arrays = grouped_cases.inputs("plain", [1, 1], 32, 64)
    arrays["x"] = jax.ShapeDtypeStruct((2**30, 64), arrays["x"].dtype)
    with pytest.raises(
        ValueError, match=r"^grouped_linear: x: expected up to 1073741823 rows, got .*\[1073741824, 64\]"
    ):
        jax.eval_shape(lambda x: grouped_linear(**{**arrays, "x": x}), arrays["x"])


@pytest.mark.frontends("jax")
@pytest.mark.parametrize("symbols", ["groups, 32, 64", "2, n, 64"])
def test_symbolic_sizes_of_weights_are_named(frontend, symbols):
    import jax
    from jax import export

    from xla_gpu.jax import grouped_linear

    arrays = grouped_cases.inputs("plain", [1, 1], 32, 64)
    weight = jax.ShapeDtypeStruct(export.symbolic_shape(symbols), arrays["weight"].dtype)
    with pytest.raises(ValueError, match=r"^grouped_linear: expected known sizes .* got .*weight bfloat16\["):
        export.export(jax.jit(lambda weight: grouped_linear(**{**arrays, "weight": weight})))(weight)


@pytest.mark.frontends(platform="host")
def test_zero_point_out_of_range_is_an_error(frontend):
    """Of a group without rows too."""
    arrays = grouped_cases.inputs("int4-zero-point", [2, 0, 1], 32, 256)
    arrays["weight_zero_point"][1, 9, 1] = 200
    expected = r"grouped_linear: weight_zero_point: expected values of 0 to 127, got 200 at \[1, 9, 1\]"
    with pytest.raises(Exception, match=expected):
        frontend.call("grouped_linear", arrays)


@pytest.mark.frontends("eager", "jax")
@pytest.mark.parametrize("scale_dtype", ["float32", None])
def test_mxfp4_with_other_scales_names_them(frontend, scale_dtype):
    """Not k, which is no multiple of 128 as int4's."""
    arrays = grouped_cases.inputs("mxfp4", [2, 1], 32, 96)
    scale = arrays.pop("weight_scale")
    if scale_dtype:
        arrays["weight_scale"] = scale.astype(scale_dtype)
    with pytest.raises((TypeError, ValueError), match=f"grouped_linear: weight_scale: expected .*{scale_dtype}"):
        frontend.call("grouped_linear", arrays)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_mxfp4_value(frontend, dtype):
    """All codes with scales from small to large: with one number of x that is 1 a result is the weight itself."""
    k, exponents = 64, range(-12, 14)
    codes = np.arange(16, dtype=np.uint8)
    weight = np.zeros((len(exponents), 16, k // 2), np.uint8)
    weight[:, :, 17] = codes << 4  # value 35
    scale = np.zeros((len(exponents), 16, k // 32), np.uint8)
    scale[:, :, 1] = np.array(exponents)[:, None] + 127
    x = np.zeros((len(exponents), k), np.float32)
    x[:, 35] = 1
    arrays = {"x": x.astype(dtype) if dtype == "float16" else x.astype("bfloat16"), "weight": weight}
    arrays |= {"group_sizes": np.ones(len(exponents), np.int32), "weight_scale": scale}
    (got,) = frontend.call("grouped_linear", arrays)
    want = grouped_cases.mxfp4_values(weight, scale)[:, :, 35]
    np.testing.assert_array_equal(got.astype(np.float64), want)
