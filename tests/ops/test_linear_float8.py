"""linear with float8 weights: the sizes at which its kernel of sm_90a divides k and n differently."""

from __future__ import annotations

import pytest

from tests.common import linear_rows

# n, k, activation: k in 1 to 8 parts, chunks of 128 in odd numbers or not filled, work tiles that n does not fill.
SIZES = [
    (144, 128, None),
    (176, 3984, None),
    (1024, 4096, None),
    (4096, 2688, None),
    (4880, 1424, None),
    (5888, 1424, None),
    (6144, 1152, None),
    (9232, 1536, None),
    (1056, 2064, "silu_and_mul"),
    (11008, 1280, "silu_and_mul"),
    (28672, 528, "gelu_and_mul"),
    (10496, 1040, None),
    (34832, 256, None),
    (37888, 272, "silu_and_mul"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, activation", SIZES)
@pytest.mark.parametrize("weight_format", ["float8-channel", "float8-tensor"])
@pytest.mark.frontends("eager-cuda")
def test_parts_of_k(frontend, n, k, activation, weight_format):
    linear_rows.check(frontend, (1, 8, 9, 16, 17, 24, 25, 33, 48, 49), n, k, activation, weight_format)
