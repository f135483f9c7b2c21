"""triton_call on a GPU, in every front end."""

from __future__ import annotations

import numpy as np
import pytest

triton = pytest.importorskip("triton")

from tests.user_kernels import triton_functions as functions  # noqa: E402 - imports Triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.frontends("eager-cuda", "jax-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled"),
]

RNG = np.random.default_rng(0)
X = RNG.standard_normal(1000, np.float32)


class Like:
    """A result's shape and dtype."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


def call(frontend, fn, result, **options):
    """triton_call of the front end's module, outside of the program that is traced."""
    module = frontend.module() if hasattr(frontend, "module") else __import__("xla_gpu.jax").jax
    return module.triton_call(fn, result, **options)


def test_add(frontend):
    bound = call(
        frontend, functions.add, Like((1000,), np.float32), grid=lambda m: triton.cdiv(m["n"], m["BLOCK"]), BLOCK=256
    )
    for n in (1000, 992, 1):
        (y,) = frontend.run(lambda ops, x, n=n: bound(x, x, n), {"x": X})
        np.testing.assert_array_equal(y[:n], (X + X)[:n])


def test_softmax(frontend):
    x = RNG.standard_normal((37, 300), np.float32)
    bound = call(frontend, functions.softmax, Like(x.shape, np.float32), grid=(37,), num_warps=8, BLOCK=512)
    (y,) = frontend.run(lambda ops, x: bound(x, 300), {"x": x})
    expected = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, expected / expected.sum(1, keepdims=True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_matmul_with_tensor_descriptors(frontend, num_ctas):
    a = RNG.standard_normal((256, 192), np.float32).astype(np.float16)
    b = RNG.standard_normal((192, 128), np.float32).astype(np.float16)
    bound = call(
        *(frontend, functions.matmul, Like((256, 128), np.float16)),
        **dict(grid=(2, 1), num_warps=4, num_stages=3, num_ctas=num_ctas, BM=128, BN=128, BK=64),
    )
    (y,) = frontend.run(lambda ops, a, b: bound(a, b, ops.Result(0), 256, 128, 192), {"a": a, "b": b})
    np.testing.assert_allclose(y, (a.astype(np.float64) @ b.astype(np.float64)), rtol=2e-3, atol=2e-2)


def test_alias(frontend):
    bound = call(
        *(frontend, functions.increment, Like((1000,), np.float32)), grid=4, BLOCK=256, input_output_aliases={0: 0}
    )
    y, kept = frontend.run(lambda ops, x: (bound(x, 1000), x + 0), {"x": X})
    np.testing.assert_array_equal(y, X + 1)
    np.testing.assert_array_equal(kept, X)


@pytest.mark.frontends("eager-cuda", "torch_xla-cuda")
def test_in_place(frontend):
    def body(ops, x):
        bound = ops.triton_call_(functions.increment, x, grid=4, BLOCK=256, input_output_aliases={0: 0})
        return bound(x, 1000), x + 0

    for result in frontend.run(body, {"x": X}):
        np.testing.assert_array_equal(result, X + 1)


@pytest.mark.frontends("eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_numbers(frontend):
    bound = call(frontend, functions.numbers, Like((5,), np.float32), grid=1)
    for values in ((1, 2.5, True, np.int64(-7)), (2**40, -0.5, False, np.float64(0.25)), (16, 1.0, True, np.int8(-3))):
        (y,) = frontend.run(lambda ops, x, values=values: bound(x, *values, None), {"x": X})
        np.testing.assert_array_equal(y, np.array([*values, 1.0], np.float32))


@pytest.mark.frontends("eager-cuda")
def test_tuned_eagerly(frontend):
    bound = call(frontend, functions.tuned, Like((1000,), np.float32), grid=lambda m: triton.cdiv(m["n"], m["BLOCK"]))
    for _ in range(2):
        (y,) = frontend.run(lambda ops, x: bound(x, 1000), {"x": X})
        np.testing.assert_array_equal(y, X * 2)


def test_with_a_given_configuration(frontend):
    for config in functions.tuned.configs:
        bound = call(
            *(frontend, functions.tuned, Like((1024,), np.float32)),
            **dict(grid=lambda m: triton.cdiv(m["n"], m["BLOCK"]), config=config),
        )
        x = np.resize(X, 1024)
        np.testing.assert_array_equal(frontend.run(lambda ops, x, bound=bound: bound(x, 1024), {"x": x})[0], x * 2)
