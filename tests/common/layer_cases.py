"""Inputs of the operators around attention and matrix products: norms, rotary embeddings, activations, sampling."""

from __future__ import annotations

import numpy as np

from tests.common import cases


def rms_norm(dtype: str, shape: tuple[int, ...], with_residual: bool, seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"rms_norm {dtype} {shape}", seed)
    arrays = {"x": rng.standard_normal(shape) * 3, "weight": rng.uniform(0.2, 1.8, shape[-1:])}
    if with_residual:
        arrays["residual"] = rng.standard_normal(shape)
    return {name: x.astype(cases.DTYPES[dtype]) for name, x in arrays.items()}


def gated(dtype: str, shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"gated {dtype} {shape}", seed)
    return {"x": (rng.standard_normal(shape) * 3).astype(cases.DTYPES[dtype])}


# The operators of samples(); each folder's name stands in the tests that list them.
NAMES = ("rms_norm", "silu_and_mul", "gelu_and_mul")


def samples() -> dict[str, tuple[dict[str, np.ndarray], dict]]:
    """Small sound arguments of each operator: (arrays, options)."""
    return {
        "rms_norm": (rms_norm("float16", (5, 24), with_residual=True), {"eps": 1e-5, "weight_offset": 0.5}),
        "silu_and_mul": (gated("bfloat16", (5, 48)), {}),
        "gelu_and_mul": (gated("float32", (3, 2, 22)), {}),
    }


def grid() -> list[tuple[str, tuple[dict[str, np.ndarray], dict]]]:
    """What the sanitizers run: each operator in each dtype, with sizes that vectors divide and that they do not."""
    made = []
    for dtype in cases.FLOATS:
        for size in (8, 33, 1000, 4099):
            made.append(("rms_norm", (rms_norm(dtype, (3, size), size % 2 == 0), {"eps": 1e-5})))
            if size % 2 == 0:
                made += [
                    ("silu_and_mul", (gated(dtype, (3, size)), {})),
                    ("gelu_and_mul", (gated(dtype, (3, size)), {})),
                ]
    return made
