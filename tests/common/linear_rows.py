"""linear on a GPU: its rows, the last of a call of 64 rows, in calls of fewer rows."""

from __future__ import annotations

from collections.abc import Iterable

from tests.common import baseline, cases, compare, reference
from tests.common.frontends import Frontend


def check(frontend: Frontend, numbers_of_rows: Iterable[int], n, k, activation, weight_format, dtype="bfloat16"):
    """Each number of rows has the bits that 64 rows have; those of 8 rows are compared with the reference."""
    features = n if activation is None else n // 2
    arrays = cases.linear_inputs(weight_format, 64, n, k, dtype, bias=True, residual=features)
    (whole,) = frontend.call("linear", arrays, activation=activation)
    for rows in numbers_of_rows:
        part = {**arrays, "x": arrays["x"][-rows:], "residual": arrays["residual"][-rows:]}
        (got,) = frontend.call("linear", part, activation=activation)
        compare.assert_bitwise_equal(got, whole[-rows:], f"{frontend.name}: the last {rows} rows")
        if rows == 8:
            (want,) = reference.linear(**part, activation=activation)
            compare.assert_close(got, want, baseline.linear(**part, activation=activation), f"{frontend.name}: linear")
