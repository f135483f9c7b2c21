"""linear with int4 weights: the sizes at which its kernel of sm_90a divides k and n differently."""

from __future__ import annotations

import pytest

from tests.common import linear_rows

# n, k, activation: k in 1 to 8 parts, chunks of 256 that k does not fill, work tiles that n does not; and sizes at
# which warps of 16 features would be too few.
SIZES = [
    (144, 128, None),
    (176, 3968, None),
    (1024, 4096, None),
    (4096, 2688, None),
    (4608, 2560, None),
    (5888, 2304, None),
    (6144, 1024, None),
    (9232, 1536, None),
    (1056, 2048, "silu_and_mul"),
    (11008, 1152, "silu_and_mul"),
    (28672, 512, "gelu_and_mul"),
    (34832, 256, None),
    (2048, 4096, "silu_and_mul"),
    (3584, 4096, None),
    (7680, 2048, None),
    (10496, 1536, None),
    (37888, 512, "silu_and_mul"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, activation", SIZES)
@pytest.mark.parametrize("weight_format", ["int4", "int4-zero-point"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.frontends("eager-cuda")
def test_parts_of_k(frontend, n, k, activation, weight_format, dtype):
    linear_rows.check(frontend, (1, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49), n, k, activation, weight_format, dtype)
