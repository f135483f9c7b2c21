"""grouped_linear: inputs, the float64 reference, and the baseline in plain operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.common import baseline, cases, reference

FORMATS = ("plain", "float8-channel", "float8-block", "int8", "int4", "int4-zero-point", "mxfp4")

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def inputs(
    weight_format: str, sizes: Sequence[int], n: int, k: int, dtype: str = "bfloat16", *, bias=False, rows=None
) -> dict[str, np.ndarray]:
    """grouped_linear's operands by name: results of order 1. rows: of x; by default as many as the groups have."""
    rows = sum(sizes) if rows is None else rows
    made = {}
    if weight_format == "mxfp4":
        rng = cases.rng_for(f"mxfp4 {len(sizes)} {n} {k}")
        spread = round(-np.log2(k) / 2) - 2
        made["weight"] = rng.integers(0, 256, (len(sizes), n, k // 2), dtype=np.uint8)
        made["weight_scale"] = rng.integers(126 + spread, 129 + spread, (len(sizes), n, k // 32), dtype=np.uint8)
    else:
        # The number of rows is part of the seed: each group has numbers of its own.
        parts = [cases.linear_inputs(weight_format, 1 + group, n, k, dtype) for group in range(len(sizes))]
        made = {name: np.stack([part[name] for part in parts]) for name in parts[0] if name != "x"}
    rng = cases.rng_for(f"grouped {rows} {k}")
    kind = cases.DTYPES[dtype]
    made["x"] = cases.normal(rng, (rows, k), 1.0, kind)
    made["group_sizes"] = np.array(sizes, np.int32)
    if bias:
        made["bias"] = rng.standard_normal((len(sizes), n)).astype(kind)
    return made


def mxfp4_values(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64[..., k]: what mxfp4 means."""
    codes = np.stack([weight & 15, weight >> 4], -1).reshape(*weight.shape[:-1], -1)
    values = np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
    return values * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, -1)


def by_groups(product, x, weight, group_sizes, weight_scale=None, weight_zero_point=None, bias=None) -> np.ndarray:
    """``product`` of each group's rows, one call for each, in float64; rows of no group are 0."""
    if weight_scale is not None and weight_scale.dtype == np.uint8:
        weight, weight_scale = mxfp4_values(weight, weight_scale).astype(x.dtype), None
    out = np.zeros((x.shape[0], weight.shape[1]), np.float64)
    begin = 0
    for group, size in enumerate(group_sizes):
        end = min(begin + max(int(size), 0), x.shape[0])
        of_group = {"weight_scale": weight_scale, "weight_zero_point": weight_zero_point, "bias": bias}
        given = {name: array[group] for name, array in of_group.items() if array is not None}
        if end > begin:
            result = product(x[begin:end], weight[group], **given)
            out[begin:end] = result[0] if isinstance(result, tuple) else result
        begin = end
    return out


def expected(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """float64[rows, n]."""
    return by_groups(reference.linear, **arrays)


def rounded(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """T[rows, n] of the baseline."""
    return by_groups(baseline.linear, **arrays).astype(arrays["x"].dtype)
