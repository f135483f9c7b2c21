"""Wrong static inputs of the operators around attention and matrix products."""

from __future__ import annotations

import math

import numpy as np

from tests.properties.bad import Bad, option, put

T = TypeError


def rms_norm_cases() -> list[Bad]:
    def bad(*args, **kwargs):
        return Bad("rms_norm", *args, **kwargs)

    return [
        bad("rank-0", "x", "float16[]", put("x", ())),
        bad("float64", "x", "float64", put("x", dtype=np.float64), T),
        bad("other-float", "weight", "float32", put("weight", dtype=np.float32), T),
        bad("too-short", "weight", "[23]", put("weight", (23,))),
        bad("rank-2", "weight", "[1, 24]", put("weight", (1, 24))),
        bad("other-shape", "residual", "[4, 24]", put("residual", (4, 24))),
        bad("other-float", "residual", "float32", put("residual", dtype=np.float32), T),
        bad("negative", "eps", "-1", option("eps", -1.0)),
        bad("nan", "eps", "nan", option("eps", math.nan)),
        bad("infinite", "weight_offset", "inf", option("weight_offset", math.inf)),
    ]


def gated_cases(operator: str) -> list[Bad]:
    return [
        Bad(operator, "rank-0", "x", "[]", put("x", ())),
        Bad(operator, "odd", "x", "[5, 47]", put("x", (5, 47))),
        Bad(operator, "int32", "x", "int32", put("x", dtype=np.int32), T),
        Bad(operator, "float64", "x", "float64", put("x", dtype=np.float64), T),
    ]


def sample_cases() -> list[Bad]:
    def bad(*args, **kwargs):
        return Bad("sample", *args, **kwargs)

    return [
        bad("rank-1", "logits", "[101]", put("logits", (101,))),
        bad("int32", "logits", "int32", put("logits", dtype=np.int32), T),
        bad("no-vocabulary", "logits", "[7, 0]", put("logits", (7, 0))),
        bad("too-few", "temperature", "[6]", put("temperature", (6,))),
        bad("float64", "temperature", "float64", put("temperature", dtype=np.float64), T),
        bad("int64", "top_k", "int64", put("top_k", dtype=np.int64), T),
        bad("rank-0", "top_p", "[]", put("top_p", ())),
        bad("bfloat16", "min_p", "float16", put("min_p", dtype=np.float16), T),
        bad("float32", "seed", "float32", put("seed", dtype=np.float32), T),
        bad("rank-2", "seed", "[7, 1]", put("seed", (7, 1))),
        bad("int64", "step", "int64", put("step", dtype=np.int64), T),
    ]


LAYER = [*rms_norm_cases(), *gated_cases("silu_and_mul"), *gated_cases("gelu_and_mul"), *sample_cases()]
