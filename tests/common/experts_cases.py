"""experts_mlp: inputs, the float64 reference with a loop over rows, and the same with roundings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.common import baseline, cases, grouped_cases, reference

ACTIVATIONS = ("silu_and_mul", "gelu_and_mul", "swigluoai_and_mul")

Arrays = dict[str, np.ndarray]


def inputs(
    weight_format: str,
    rows: int,
    num_experts: int,
    top_k: int,
    hidden: int = 256,
    intermediate: int = 128,
    dtype: str = "bfloat16",
    *,
    bias: bool = False,
) -> Arrays:
    """Operands by name: a row's experts differ, and its weights in float32 add up to 1."""
    rng = cases.rng_for(f"experts {rows} {num_experts} {top_k}")
    arrays = {"x": cases.normal(rng, (rows, hidden), 1.0, cases.DTYPES[dtype])}
    for prefix, n, k in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
        made = grouped_cases.inputs(weight_format, [1] * num_experts, n, k, dtype, bias=bias)
        arrays |= {f"{prefix}_{name.removeprefix('weight_')}": a for name, a in made.items() if name in _OF_WEIGHTS}
    arrays["topk_ids"] = np.argsort(rng.random((rows, num_experts)), 1)[:, :top_k].astype(np.int32)
    weights = rng.random((rows, top_k)) + 0.1
    arrays["topk_weights"] = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return arrays


_OF_WEIGHTS = ("weight", "weight_scale", "weight_zero_point", "bias")


def expected(arrays: Arrays, activation: str = "silu_and_mul") -> np.ndarray:
    """float64[rows, out_features]."""
    return _by_rows(arrays, activation, reference.linear, np.float64)


def rounded(arrays: Arrays, activation: str = "silu_and_mul") -> np.ndarray:
    """T[rows, out_features] of the baseline's products, with their roundings and that of the activation."""
    dtype = arrays["x"].dtype
    return _by_rows(arrays, activation, baseline.linear, dtype).astype(dtype)


def _by_rows(arrays: Arrays, activation: str, product: Callable, dtype) -> np.ndarray:
    num_experts, out_features = arrays["down_weight"].shape[:2]
    of_expert = {}  # all rows by each expert that is chosen
    for expert in set(arrays["topk_ids"].ravel().tolist()) & set(range(num_experts)):
        products = _product(arrays, "gate_up", expert, arrays["x"], product).astype(dtype)
        hidden = _activated(products.astype(np.float64), activation, dtype)
        of_expert[expert] = _product(arrays, "down", expert, hidden, product).astype(dtype).astype(np.float64)
    out = np.zeros((len(arrays["x"]), out_features))
    for i, (weights, ids) in enumerate(zip(arrays["topk_weights"], arrays["topk_ids"].tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            if expert in of_expert:
                out[i] += float(weight) * of_expert[expert][i]
    return out


def _product(arrays: Arrays, prefix: str, expert: int, x: np.ndarray, product: Callable) -> np.ndarray:
    own = {
        name: arrays[key][expert : expert + 1]
        for name in _OF_WEIGHTS
        if (key := f"{prefix}_{name.removeprefix('weight_')}") in arrays
    }
    return grouped_cases.by_groups(product, x, group_sizes=[len(x)], **own)


def _activated(hidden: np.ndarray, activation: str, dtype) -> np.ndarray:
    """dtype[rows, intermediate] of gate and up, float64[rows, 2 * intermediate], rounded where the operators round."""
    gate, up = np.split(hidden, 2, -1)
    if activation == "swigluoai_and_mul":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(dtype)
    if activation == "silu_and_mul":
        act = gate / (1 + np.exp(-gate))
    else:
        act = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (act.astype(dtype).astype(np.float64) * up).astype(dtype)
