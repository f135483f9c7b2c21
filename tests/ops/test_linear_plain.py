"""linear with weights that are not quantised: the sizes at which its kernels of sm_90a divide n and k differently."""

from __future__ import annotations

import pytest

from tests.common import linear_rows

# n, k, activation: k in 1 to 8 parts of equal and of unequal numbers of chunks of 64, the last one not whole; work
# tiles that n does not fill.
SIZES = [
    (144, 64, None),
    (176, 3984, None),
    (176, 1040, "gelu_and_mul"),
    (1024, 4096, None),
    (4096, 2688, None),
    (4224, 768, None),
    (4608, 720, None),
    (5888, 1040, None),
    (6144, 592, "silu_and_mul"),
    (9232, 1536, None),
    (7168, 2048, "silu_and_mul"),
    (10752, 400, "silu_and_mul"),
    (16912, 272, None),
    (19024, 80, None),
    (28672, 528, "gelu_and_mul"),
    (10496, 400, None),
    (34832, 256, None),
    (37888, 208, "silu_and_mul"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, activation", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.frontends("eager-cuda")
def test_parts_of_k(frontend, n, k, activation, dtype):
    linear_rows.check(frontend, (1, 2, 3, 5, 8, 9, 15, 16, 17, 24, 32, 33, 48), n, k, activation, "plain", dtype)
