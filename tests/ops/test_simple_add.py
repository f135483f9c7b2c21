"""simple_add through every front end. One rounding of an exact sum: the bits are known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare

SHAPES = ((7,), (3, 5, 4), (1000,), (), (0,), (4, 0, 2))


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_sum_bit_for_bit(frontend, dtype, shape):
    rng = cases.rng_for(f"simple_add {dtype} {shape}")
    a, b = (rng.standard_normal(shape).astype(cases.DTYPES[dtype]) for _ in range(2))
    (out,) = frontend.call("simple_add", {"a": a, "b": b})
    compare.assert_bitwise_equal(
        out, np.asarray(a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype), frontend.name
    )


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_special_values(frontend, dtype):
    big = np.float32({"float32": 3e38, "float16": 65504.0, "bfloat16": 3e38}[dtype])
    a = np.array([np.inf, -np.inf, np.inf, np.nan, big, -0.0], np.float32).astype(cases.DTYPES[dtype])
    b = np.array([1.0, np.inf, np.inf, 0.0, big, -0.0], np.float32).astype(cases.DTYPES[dtype])
    (out,) = frontend.call("simple_add", {"a": a, "b": b})
    want = np.array([np.inf, np.nan, np.inf, np.nan, np.inf, -0.0], np.float32)
    compare.assert_same_special(out.astype(np.float32), want, frontend.name)
    assert np.signbit(out[-1].astype(np.float32))


@pytest.mark.frontends("eager", "eager-cuda")
def test_more_than_one_thread_block_of_elements(frontend):
    a, b = (cases.rng_for(name).standard_normal(3_000_001).astype(np.float32) for name in "ab")
    (out,) = frontend.call("simple_add", {"a": a, "b": b})
    compare.assert_bitwise_equal(out, a + b, frontend.name)
