"""linear with float8 weights: the sizes at which its kernel of sm_90a divides k and n differently."""

from __future__ import annotations

import pytest

from tests.common import baseline, cases, compare, reference

# n, k, activation: k in 1 to 8 parts, chunks of 128 in odd numbers or not filled, work tiles that n does not fill.
SIZES = [
    (144, 128, None),
    (176, 3984, None),
    (1024, 4096, None),
    (4096, 2688, None),
    (4880, 1424, None),
    (6144, 1152, None),
    (9232, 1536, None),
    (1056, 2064, "silu_and_mul"),
    (11008, 1280, "silu_and_mul"),
    (28672, 528, "gelu_and_mul"),
    (34832, 256, None),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, activation", SIZES)
@pytest.mark.parametrize("weight_format", ["float8-channel", "float8-tensor"])
@pytest.mark.frontends("eager-cuda")
def test_parts_of_k(frontend, n, k, activation, weight_format):
    """Against the reference, and each number of rows has the bits that 64 rows have."""
    features = n if activation is None else n // 2
    arrays = cases.linear_inputs(weight_format, 64, n, k, bias=True, residual=features)
    (whole,) = frontend.call("linear", arrays, activation=activation)
    for rows in (1, 8, 9, 17, 33):
        part = {**arrays, "x": arrays["x"][-rows:], "residual": arrays["residual"][-rows:]}
        (got,) = frontend.call("linear", part, activation=activation)
        compare.assert_bitwise_equal(got, whole[-rows:], f"{frontend.name}: the last {rows} rows")
        if rows == 8:
            (want,) = reference.linear(**part, activation=activation)
            compare.assert_close(got, want, baseline.linear(**part, activation=activation), f"{frontend.name}: linear")
