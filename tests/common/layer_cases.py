"""Inputs of the operators around attention and matrix products: norms, rotary embeddings, activations, sampling."""

from __future__ import annotations

import numpy as np

from tests.common import cases, reference


def rms_norm(dtype: str, shape: tuple[int, ...], with_residual: bool, seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"rms_norm {dtype} {shape}", seed)
    arrays = {"x": rng.standard_normal(shape) * 3, "weight": rng.uniform(0.2, 1.8, shape[-1:])}
    if with_residual:
        arrays["residual"] = rng.standard_normal(shape)
    return {name: x.astype(cases.DTYPES[dtype]) for name, x in arrays.items()}


def gated(dtype: str, shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"gated {dtype} {shape}", seed)
    return {"x": (rng.standard_normal(shape) * 3).astype(cases.DTYPES[dtype])}


def sampling(dtype: str, rows: int, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Logits of a language model's spread, and options of every kind in turn."""
    rng = cases.rng_for(f"sampling {dtype} {rows} {vocab}", seed)

    def column(values, dtype):
        return np.resize(np.array(values, dtype), rows)

    return {
        "logits": (rng.standard_normal((rows, vocab)) * 3).astype(cases.DTYPES[dtype]),
        "temperature": column([1, 0, 0.6, 1.5, 1, 0.8, 2], np.float32),
        "top_k": column([0, 5, 50, 0, 1, vocab, 20], np.int32),
        "top_p": column([1, 0.9, 0.9, 0.5, 0.95, 0.1], np.float32),
        "min_p": column([0, 0, 0.02, 0.3, 0], np.float32),
        "seed": rng.integers(-(2**63), 2**63 - 1, rows),
        "step": rng.integers(0, 2**31 - 1, rows).astype(np.int32),
    }


def assert_sampled(arrays: dict[str, np.ndarray], token: np.ndarray, logprob: np.ndarray, what: str) -> None:
    """Tokens and log-probabilities against float64, with room for float32's rounding where scores or the edges of what
    is kept are that near."""
    for r, chosen in enumerate(token.tolist()):
        x, row = arrays["logits"][r].astype(np.float32), {n: float(v[r]) for n, v in arrays.items() if n != "logits"}
        wide = x.astype(np.float64)
        exact = wide[chosen] - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        assert chosen >= 0 and abs(logprob[r] - exact) <= 2e-5 + 1e-6 * abs(exact), f"{what}: row {r}: {logprob[r]}"
        if row["temperature"] == 0:
            assert chosen == wide.argmax(), f"{what}: row {r}"
            continue
        rule = row["temperature"], int(row["top_k"]), row["top_p"], row["min_p"]
        words = reference.philox(int(arrays["seed"][r]), int(arrays["step"][r]), x.size)
        scores = (wide - wide.max()) / row["temperature"] + reference.gumbel(words)
        more, less = (reference.kept_tokens(x, *rule, slack=slack) for slack in (2e-4, -2e-4))
        assert more[chosen], f"{what}: row {r}: token {chosen} is not among those kept"
        best = scores[less].max(initial=-np.inf)
        assert scores[chosen] >= best - 1e-4 * max(1, abs(best)), f"{what}: row {r}: token {chosen} has not won"


# The operators of samples(); each folder's name stands in the tests that list them.
NAMES = ("rms_norm", "silu_and_mul", "gelu_and_mul", "sample")


def samples() -> dict[str, tuple[dict[str, np.ndarray], dict]]:
    """Small sound arguments of each operator: (arrays, options)."""
    return {
        "rms_norm": (rms_norm("float16", (5, 24), with_residual=True), {"eps": 1e-5, "weight_offset": 0.5}),
        "silu_and_mul": (gated("bfloat16", (5, 48)), {}),
        "gelu_and_mul": (gated("float32", (3, 2, 22)), {}),
        "sample": (sampling("bfloat16", 7, 101), {}),
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
        made += [("sample", (sampling(dtype, rows, vocab), {})) for rows, vocab in ((1, 7), (9, 1000), (2, 9001))]
    return made
