"""linear with weights that sm_90a converts: the sizes at which that kernel divides k differently, and its row tiles.

int8, float8 with scales of blocks, and float8 in float16: what has no other kernel. int4 has a file of its own.
"""

from __future__ import annotations

import pytest

from tests.common import linear_rows

# n, k, activation: k in 1 to 8 parts of equal and of unequal numbers of chunks of 128, the last one not whole; work
# tiles that n does not fill.
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
    (10496, 1040, None),
    (34832, 256, None),
    (37888, 528, "silu_and_mul"),
]
FORMATS = [("int8", "bfloat16"), ("float8-block", "bfloat16"), ("float8-channel", "float16"), ("int8", "float16")]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, activation", SIZES)
@pytest.mark.parametrize("weight_format, dtype", FORMATS)
@pytest.mark.frontends("eager-cuda")
def test_parts_of_k(frontend, n, k, activation, weight_format, dtype):
    linear_rows.check(frontend, (1, 8, 9, 23, 24, 25, 32, 33, 47, 48, 49), n, k, activation, weight_format, dtype)
