"""rms_norm: with and without a residual, as Llama's and as Gemma's models round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.common import cases, compare, layer_cases, reference

GEMMA = {"weight_offset": 1.0, "round_once": True}


@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_values(frontend, dtype, with_residual, options):
    arrays = layer_cases.rms_norm(dtype, (3, 5, 96), with_residual)
    got = frontend.call("rms_norm", arrays, eps=1e-5, **options)
    want = reference.rms_norm(**arrays, eps=1e-5, **options)
    assert len(got) == len(want)
    compare.assert_norm(got[0], want[0], frontend.name)
    if with_residual:
        compare.assert_bitwise_equal(got[1], want[1], f"{frontend.name}: sum")


# Vectors of a warp, of a CTA, more than a thread keeps, and rows that no vector divides.
SIZES = (1, 7, 8, 33, 128, 1000, 1024, 4096, 4099, 20000)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_sizes(frontend, dtype):
    for size, with_residual in itertools.product(SIZES, (False, True)):
        arrays = layer_cases.rms_norm(dtype, (3, size), with_residual)
        got = frontend.call("rms_norm", arrays, eps=1e-6)
        for g, w in zip(got, reference.rms_norm(**arrays, eps=1e-6), strict=True):
            compare.assert_norm(g, w, f"{frontend.name}: {size}")


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 4)], ids=str)
@pytest.mark.frontends("eager", "jax", "eager-cuda", "jax-cuda")
def test_nothing(frontend, shape):
    arrays = layer_cases.rms_norm("float32", shape, with_residual=True)
    out, sum_ = frontend.call("rms_norm", arrays, eps=1e-6)
    assert out.shape == sum_.shape == shape


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_bits_of_a_row_are_its_own(frontend, dtype):
    for size in (128, 4096):
        arrays = layer_cases.rms_norm(dtype, (600, size), with_residual=True)
        whole = frontend.call("rms_norm", arrays, eps=1e-6)
        for rows in ([0], [66, 3, 3, 12], list(range(599, -1, -1))):
            part = {n: x if n == "weight" else x[rows] for n, x in arrays.items()}
            for g, w in zip(frontend.call("rms_norm", part, eps=1e-6), whole, strict=True):
                compare.assert_bitwise_equal(g, w[rows], f"{frontend.name}: rows {rows[:4]} of {size}")


@pytest.mark.frontends("eager", "eager-cuda")
def test_special_values_stay_in_their_rows(frontend):
    arrays = layer_cases.rms_norm("bfloat16", (6, 256), with_residual=True)
    clean = frontend.call("rms_norm", arrays, eps=1e-6)
    arrays["x"][1, 5], arrays["residual"][4, 0] = np.nan, np.inf
    arrays["x"][2], arrays["residual"][2] = 0, 0
    out, sum_ = frontend.call("rms_norm", arrays, eps=1e-6)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(out[4, 0]) and (np.delete(out[4].astype(np.float32), 0) == 0).all()
    assert not out[2].any() and not sum_[2].any()
    for row in (0, 3, 5):
        compare.assert_bitwise_equal(out[row], clean[0][row], f"{frontend.name}: row {row}")


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_is_the_norm_of_transformers(dtype):
    """The modules that models are made of."""
    torch = pytest.importorskip("torch")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    import xla_gpu.torch
    from tests.common.arrays import to_numpy, to_torch

    arrays = {name: to_torch(x) for name, x in layer_cases.rms_norm(dtype, (9, 320), with_residual=False).items()}
    for module, options in (
        (LlamaRMSNorm(320, eps=1e-6), {}),
        (gemma.GemmaRMSNorm(320, eps=1e-6), GEMMA),
    ):
        module.weight = torch.nn.Parameter(arrays["weight"])
        with torch.no_grad():
            want = to_numpy(module(arrays["x"]))
        got = to_numpy(xla_gpu.torch.rms_norm(**arrays, eps=1e-6, **options))
        compare.assert_norm(got, want, type(module).__name__)
        if dtype != "float32":  # whose last bit follows the order of the sum
            assert (compare.bits(got) == compare.bits(want)).mean() > 0.97
