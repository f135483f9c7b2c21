"""silu_and_mul and gelu_and_mul, beside PyTorch's activations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare, layer_cases, reference

OPERATORS = ("silu_and_mul", "gelu_and_mul")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_values(frontend, dtype, operator):
    arrays = layer_cases.gated(dtype, (3, 5, 80))
    (out,) = frontend.call(operator, arrays)
    (want,) = getattr(reference, operator)(**arrays)
    compare.assert_norm(out, want, frontend.name, floor=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_sizes(frontend, dtype, operator):
    for shape in ((0, 8), (4, 0), (2,), (7, 2), (3, 14), (5, 2046), (2, 28672), (70_000, 2)):
        arrays = layer_cases.gated(dtype, shape)
        (out,) = frontend.call(operator, arrays)
        compare.assert_norm(out, getattr(reference, operator)(**arrays)[0], f"{frontend.name} {shape}", floor=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_extreme_values(frontend, operator):
    gate = np.array([-np.inf, -1e30, -100, -88, -0.0, 0.0, 1e-40, 88, 1e30, np.inf, np.nan, 5], np.float32)
    up = np.ones_like(gate)
    up[-1] = np.nan
    (out,) = frontend.call(operator, {"x": np.concatenate([gate, up])})
    assert np.isnan(out[[0, 10, 11]]).all()  # as PyTorch: -inf * 0, and NaN
    np.testing.assert_allclose(out[1:6], 0, atol=1e-30)
    np.testing.assert_array_equal(out[7:10], gate[7:10])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_are_those_of_pytorch(dtype):
    torch = pytest.importorskip("torch")
    import xla_gpu.torch
    from tests.common.arrays import to_numpy, to_torch

    x = to_torch(layer_cases.gated(dtype, (40, 512))["x"])
    gate, up = x.chunk(2, -1)
    for operator, activation in (
        ("silu_and_mul", torch.nn.functional.silu),
        ("gelu_and_mul", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        got, want = to_numpy(getattr(xla_gpu.torch, operator)(x)), to_numpy(activation(gate) * up)
        # Below, PyTorch's 1 + tanh(u) has lost its last bits.
        told = gate.float().numpy() > (-1 if operator == "gelu_and_mul" else -np.inf)
        assert (compare.bits(got) == compare.bits(want))[told].mean() > 0.995, operator
