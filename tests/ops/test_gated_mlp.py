"""gated_mlp: the bits of the operators that it is made of."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.common import cases, compare, layer_cases
from xla_gpu._core.operator import ArraySpec
from xla_gpu.ops.gated_mlp import OPERATOR


def by_parts(frontend, arrays, *, activation="silu_and_mul", **norm):
    h = arrays["x"]
    if "norm_weight" in arrays:
        (h,) = frontend.call("rms_norm", {"x": h, "weight": arrays["norm_weight"]}, **norm)

    def product(h, prefix, **options):
        names = {"weight": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point", "bias": "bias"}
        given = {of: arrays[f"{prefix}_{its}"] for its, of in names.items() if f"{prefix}_{its}" in arrays}
        if prefix == "down" and "residual" in arrays:
            given["residual"] = arrays["residual"]
        return frontend.call("linear", {"x": h, **given}, **options)[0]

    return product(product(h, "gate_up", activation=activation), "down")


def check(frontend, arrays, **options):
    options = {"eps": 1e-5, **options}
    (got,) = frontend.call("gated_mlp", arrays, **options)
    compare.assert_bitwise_equal(got, by_parts(frontend, arrays, **options), f"{frontend.name}: gated_mlp")
    return got


@pytest.mark.parametrize("weight_format", cases.WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "jax", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_formats(frontend, weight_format, dtype):
    sizes = (256, 384) if weight_format.startswith("int4") else (208, 144)
    check(frontend, layer_cases.gated_mlp(weight_format, 5, *sizes, dtype, bias=True))


@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 65, 130])
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel"])
@pytest.mark.frontends("eager", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_rows(frontend, rows, weight_format):
    check(frontend, layer_cases.gated_mlp(weight_format, rows, 256, 144))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["int4-zero-point", "float8-channel"])
@pytest.mark.parametrize(
    "hidden, dtype", [(256, "bfloat16"), (1280, "float16"), (4096, "bfloat16"), (16384, "bfloat16")]
)
@pytest.mark.frontends("eager-cuda")
def test_few_rows(frontend, weight_format, hidden, dtype):
    """Numbers of rows that differ in how a work tile's x and sums lie in shared memory."""
    for rows, gemma in itertools.product((1, 2, 3, 4, 5, 8, 9, 16), (False, True)):
        options = {"weight_offset": 1.0, "round_once": True} if gemma else {}
        check(frontend, layer_cases.gated_mlp(weight_format, rows, hidden, 256, dtype, bias=gemma), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [208, 1040, 4096, 16384, 16400])
@pytest.mark.frontends("eager-cuda")
def test_norm_that_splits_rows(frontend, hidden):
    """From 33 to 64 rows beside float8 weights the norm of up to 16 384 values writes what the product multiplies."""
    for rows, gemma in itertools.product((33, 50, 64), (False, True)):
        options = {"weight_offset": 1.0, "round_once": True} if gemma else {}
        check(frontend, layer_cases.gated_mlp("float8-channel", rows, hidden, 144, bias=gemma), **options)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("norm", [False, True], ids=["no-norm", "norm"])
@pytest.mark.parametrize("residual", [False, True], ids=["no-residual", "residual"])
@pytest.mark.frontends("eager", "jax", "torch_xla", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_parts_that_are_left_out(frontend, rows, norm, residual):
    arrays = layer_cases.gated_mlp("plain", rows, 96, 64, norm=norm, residual=residual)
    options = {"weight_offset": 1.0, "round_once": True} if norm else {}
    check(frontend, arrays, activation="gelu_and_mul", **options)


@pytest.mark.frontends("eager", "eager-cuda")
def test_bits_of_a_row_do_not_depend_on_the_others(frontend):
    arrays = layer_cases.gated_mlp("float8-block", 64, 512, 384)
    (whole,) = frontend.call("gated_mlp", arrays, eps=1e-5)
    for rows in ([0], [63], list(range(5, 38)), [40, 2, 2, 61]):
        some = {name: arrays[name][rows] for name in ("x", "residual")}
        (part,) = frontend.call("gated_mlp", {**arrays, **some}, eps=1e-5)
        compare.assert_bitwise_equal(part, whole[rows], f"{frontend.name}: rows {rows}")


def test_no_rows(frontend):
    (got,) = frontend.call("gated_mlp", layer_cases.gated_mlp("plain", 0, 32, 32))
    assert got.shape == (0, 32)


@pytest.mark.frontends(platform="host")
def test_zero_point_out_of_range_is_an_error(frontend):
    arrays = layer_cases.gated_mlp("int4-zero-point", 3, 128, 128)
    arrays["down_zero_point"][9, 0] = 200
    with pytest.raises(Exception, match="gated_mlp: down_zero_point: expected values of 0 to 127, got 200 for row 9"):
        frontend.call("gated_mlp", arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "int4"])
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.frontends("eager-cuda")
def test_chained_kernels(frontend, rows, weight_format):
    """Kernels of Llama 3 8B's sizes, of which each starts before the one in front has ended: every run has the bits."""
    arrays = layer_cases.gated_mlp(weight_format, rows, 4096, 14336)
    got = check(frontend, arrays)
    assert np.isfinite(got.astype(np.float32)).all()
    for _ in range(5):
        compare.assert_bitwise_equal(frontend.call("gated_mlp", arrays, eps=1e-5)[0], got, "the same call again")


def test_an_error_about_the_second_product_names_what_its_k_comes_from():
    x, gate_up_weight, down_weight = (ArraySpec(shape, "float32") for shape in ((3, 64), (96, 64), (64, 64)))
    with pytest.raises(ValueError, match=r"down_weight: expected shape \[n, 48\] \(k = 48, from gate_up_weight\)"):
        OPERATOR.bind(x=x, gate_up_weight=gate_up_weight, down_weight=down_weight)


@pytest.mark.frontends("eager", "jax")
def test_without_an_activation(frontend):
    """It is linear's that may be None."""
    arrays, options = layer_cases.gated_mlp("plain", 2, 32, 32), {"eps": 1e-5, "activation": None}
    with pytest.raises(TypeError, match="gated_mlp: activation: expected silu_and_mul or gelu_and_mul, got NoneType"):
        frontend.call("gated_mlp", arrays, **options)
