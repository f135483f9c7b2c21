"""Wrong static inputs of the operators around attention and matrix products."""

from __future__ import annotations

import math

import numpy as np

from tests.common import cases
from tests.properties.bad import Bad, drop, option, put

T = TypeError


def linear_cases() -> list[Bad]:
    """Of packed int4 with zero points; n = 32, k = 256, float16."""

    def bad(*args, **kwargs):
        return Bad("linear", *args, **kwargs)

    return [
        bad("rank-3", "x", "[1, 3, 256]", put("x", (1, 3, 256))),
        bad("float64", "x", "float64", put("x", dtype=np.float64), T),
        bad("half-a-group", "x", "[3, 192]", put("x", (3, 192))),
        bad("other-k", "weight", "[32, 64]", put("weight", (32, 64))),
        bad("not-packed", "weight", "[32, 256]", put("weight", (32, 256))),
        bad("n-not-of-16", "weight", "[24, 128]", put("weight", (24, 128))),
        bad("no-features", "weight", "[0, 128]", put("weight", (0, 128))),
        bad("rank-1", "weight", "[128]", put("weight", (128,))),
        bad("int32", "weight", "int32", put("weight", dtype=np.int32), T),
        bad("other-float", "weight", "float32", put("weight", (32, 256), np.float32), T),
        bad("missing", "weight_scale", "None", drop("weight_scale")),
        bad("channels", "weight_scale", "[32]", put("weight_scale", (32,))),
        bad("groups-of-64", "weight_scale", "[32, 4]", put("weight_scale", (32, 4))),
        bad("float32", "weight_scale", "float32", put("weight_scale", dtype=np.float32), T),
        bad("transposed", "weight_zero_point", "[2, 32]", put("weight_zero_point", (2, 32))),
        bad("int32", "weight_zero_point", "int32", put("weight_zero_point", dtype=np.int32), T),
        bad("of-float8", "weight_zero_point", "[32, 2]", put("weight", (32, 256), cases.DTYPES["float8_e4m3fn"])),
        bad("too-short", "bias", "[31]", put("bias", (31,))),
        bad("other-float", "bias", "float32", put("bias", dtype=np.float32), T),
        bad("other-rows", "residual", "[4, 32]", put("residual", (4, 32))),
        bad("other-float", "residual", "float32", put("residual", dtype=np.float32), T),
        bad("halved", "residual", "[3, 32]", option("activation", "silu_and_mul")),
        bad("unknown", "activation", "relu", option("activation", "relu")),
    ]


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


def rotary_cases() -> list[Bad]:
    def bad(*args, **kwargs):
        return Bad("rotary_embedding", *args, **kwargs)

    def cache(*args, **kwargs):
        return Bad("rotary_and_cache", *args, **kwargs)

    return [
        bad("rank-2", "query", "[7, 144]", put("query", (7, 144))),
        bad("int32", "query", "int32", put("query", dtype=np.int32), T),
        bad("other-tokens", "key", "[6, 2, 24]", put("key", (6, 2, 24))),
        bad("other-head-dim", "key", "[7, 2, 32]", put("key", (7, 2, 32))),
        bad("other-float", "key", "float32", put("key", dtype=np.float32), T),
        bad("too-few", "positions", "[6]", put("positions", (6,))),
        bad("int64", "positions", "int64", put("positions", dtype=np.int64), T),
        bad("rank-2", "table", "[50, 24]", put("table", (50, 24))),
        bad("too-many-angles", "table", "[50, 13, 2]", put("table", (50, 13, 2))),
        bad("float64", "table", "float64", put("table", dtype=np.float64), T),
        cache("rank-3", "qkv", "[9, 10, 64]", put("qkv", (9, 10, 64))),
        cache("part-of-a-head", "qkv", "[9, 639]", put("qkv", (9, 639))),
        cache("no-query", "qkv", "[9, 256]", put("qkv", (9, 256))),
        cache("float64", "qkv", "float64", put("qkv", dtype=np.float64), T),
        cache("too-few", "positions", "[8]", put("positions", (8,))),
        cache("rank-2", "table", "[50, 64]", put("table", (50, 64))),
        cache("rank-3", "kv_cache", "[9, 16, 64]", put("kv_cache", (9, 16, 64))),
        cache("other-float", "kv_cache", "float16", put("kv_cache", dtype=np.float16), T),
        cache("head-dim-640", "kv_cache", "[9, 16, 4, 640]", put("kv_cache", (9, 16, 4, 640))),
        cache("too-many", "slot_mapping", "[10]", put("slot_mapping", (10,))),
        cache("float32", "slot_mapping", "float32", put("slot_mapping", dtype=np.float32), T),
        cache("without-float8", "k_scale", "float32[1]", put("k_scale", (1,), np.float32)),
        cache("other-float", "q_norm_weight", "float32", put("q_norm_weight", dtype=np.float32), T),
        cache("too-short", "k_norm_weight", "[63]", put("k_norm_weight", (63,))),
        cache("too-short", "bias", "[64]", put("bias", (64,))),
        cache("negative", "norm_eps", "-1", option("norm_eps", -1.0)),
    ]


LAYER = [
    *linear_cases(),
    *rms_norm_cases(),
    *gated_cases("silu_and_mul"),
    *gated_cases("gelu_and_mul"),
    *sample_cases(),
    *rotary_cases(),
]
