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
        bad("rank-0", "x", "float16[]", put("x", ())),
        bad("rank-3", "residual", "[1, 3, ", put("residual", (1, 3, 128))),
        bad("float64", "x", "float64", put("x", dtype=np.float64), T),
        bad("half-a-group", "x", "[3, 192]", put("x", (3, 192))),
        bad("k-past-31-bits", "x", "2147483648", put("x", (0, 2**31))),
        bad("n-past-31-bits", "weight", "[2147483648, 0]", put("weight", (2**31, 0))),
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


def grouped_linear_cases() -> list[Bad]:
    """Of packed int4 with zero points; 4 rows, 3 groups, n = 32, k = 256, float16."""

    def bad(*args, **kwargs):
        return Bad("grouped_linear", *args, **kwargs)

    float8 = cases.DTYPES["float8_e4m3fn"]
    return [
        bad("rank-3", "x", "[1, 4, 256]", put("x", (1, 4, 256))),
        bad("float32", "x", "float32", put("x", dtype=np.float32), T),
        bad("half-a-group", "x", "192", put("x", (4, 192))),
        bad("k-past-29-bits", "x", "536870912", put("x", (0, 2**29))),
        bad("n-past-29-bits", "weight", "[3, 536870912, 0]", put("weight", (3, 2**29, 0))),
        bad("rank-2", "weight", "[32, 128]", put("weight", (32, 128))),
        bad("other-k", "weight", "[3, 32, 64]", put("weight", (3, 32, 64))),
        bad("n-not-of-16", "weight", "[3, 24, 128]", put("weight", (3, 24, 128))),
        bad("no-groups", "weight", "[0, 32, 128]", put("weight", (0, 32, 128))),
        bad("too-many-groups", "weight", "[1025, 32, 128]", put("weight", (1025, 32, 128))),
        bad("int32", "weight", "int32", put("weight", dtype=np.int32), T),
        bad("too-few", "group_sizes", "[2]", put("group_sizes", (2,))),
        bad("int64", "group_sizes", "int64", put("group_sizes", dtype=np.int64), T),
        bad("missing", "weight_scale", "None", drop("weight_scale")),
        bad("of-one", "weight_scale", "[32, 2]", put("weight_scale", (32, 2))),
        bad("of-mxfp4", "weight_scale", "[3, 32, 2]", put("weight_scale", dtype=np.uint8)),
        bad("float32", "weight_scale", "float32", put("weight_scale", dtype=np.float32), T),
        bad("transposed", "weight_zero_point", "[3, 2, 32]", put("weight_zero_point", (3, 2, 32))),
        bad("int32", "weight_zero_point", "int32", put("weight_zero_point", dtype=np.int32), T),
        bad("of-float8", "weight_zero_point", "[3, 32, 2]", of_float8(put("weight", (3, 32, 256), float8))),
        bad("of-one", "bias", "[32]", put("bias", (32,))),
        bad("other-float", "bias", "float32", put("bias", dtype=np.float32), T),
    ]


def of_float8(change):
    """With the scales that a weight in float8 has."""

    def both(arrays, options):
        change(arrays, options)
        arrays["weight_scale"] = np.ones((3, 32), np.float32)

    return both


def gated_mlp_cases() -> list[Bad]:
    """Of packed int4 with zero points; hidden and intermediate are 128, float16."""

    def bad(*args, **kwargs):
        return Bad("gated_mlp", *args, **kwargs)

    return [
        bad("rank-0", "x", "float16[]", put("x", ())),
        bad("rank-3", "residual", "[1, 3, ", put("residual", (1, 3, 128))),
        bad("float64", "x", "float64", put("x", dtype=np.float64), T),
        bad("too-short", "norm_weight", "[127]", put("norm_weight", (127,))),
        bad("other-float", "norm_weight", "float32", put("norm_weight", dtype=np.float32), T),
        bad("other-k", "gate_up_weight", "[256, 32]", put("gate_up_weight", (256, 32))),
        bad("other-float", "gate_up_weight", "float32", put("gate_up_weight", (256, 128), np.float32), T),
        bad("transposed", "gate_up_scale", "[1, 256]", put("gate_up_scale", (1, 256))),
        bad("missing", "gate_up_scale", "None", drop("gate_up_scale")),
        bad("int32", "gate_up_zero_point", "int32", put("gate_up_zero_point", dtype=np.int32), T),
        bad("too-short", "gate_up_bias", "[255]", put("gate_up_bias", (255,))),
        bad("other-intermediate", "down_weight", "[128, 128]", put("down_weight", (128, 128))),
        bad("n-not-of-16", "down_weight", "[120, 64]", put("down_weight", (120, 64))),
        bad("float32", "down_scale", "float32", put("down_scale", dtype=np.float32), T),
        bad("transposed", "down_zero_point", "[1, 128]", put("down_zero_point", (1, 128))),
        bad("other-float", "down_bias", "float32", put("down_bias", dtype=np.float32), T),
        bad("other-rows", "residual", "[4, 128]", put("residual", (4, 128))),
        bad("unknown", "activation", "relu", option("activation", "relu")),
        bad("negative", "eps", "-1", option("eps", -1.0)),
        bad("infinite", "weight_offset", "inf", option("weight_offset", math.inf)),
    ]


def attention_block_cases() -> list[Bad]:
    """Of packed int4 with zero points, biases and norms of heads: hidden 128, 4 / 2 heads of 64, 6 rows, bfloat16."""

    def bad(*args, **kwargs):
        return Bad("attention_block", *args, **kwargs)

    return [
        bad("rank-3", "x", "[1, 6, 128]", put("x", (1, 6, 128))),
        bad("float64", "x", "float64", put("x", dtype=np.float64), T),
        bad("too-short", "norm_weight", "[127]", put("norm_weight", (127,))),
        bad("other-k", "qkv_weight", "[512, 32]", put("qkv_weight", (512, 32))),
        bad("other-float", "qkv_weight", "float32", put("qkv_weight", (512, 128), np.float32), T),
        bad("missing", "qkv_scale", "None", drop("qkv_scale")),
        bad("transposed", "qkv_zero_point", "[1, 512]", put("qkv_zero_point", (1, 512))),
        bad("too-short", "qkv_bias", "[511]", put("qkv_bias", (511,))),
        bad("too-few", "positions", "[5]", put("positions", (5,))),
        bad("float64", "table", "float64", put("table", dtype=np.float64), T),
        bad("too-many-angles", "table", "[21, 33, 2]", put("table", (21, 33, 2))),
        bad("rank-3", "kv_cache", "[9, 8, 64]", put("kv_cache", (9, 8, 64))),
        bad("other-float", "kv_cache", "float32", put("kv_cache", dtype=np.float32), T),
        bad("float32", "slot_mapping", "float32", put("slot_mapping", dtype=np.float32), T),
        bad("too-many", "slot_mapping", "[7]", put("slot_mapping", (7,))),
        bad("int64", "context_lens", "int64", put("context_lens", dtype=np.int64), T),
        bad("rank-1", "block_tables", "[20]", put("block_tables", (20,))),
        bad("one-too-short", "query_start_loc", "[4]", put("query_start_loc", (4,))),
        bad("two", "num_seqs", "[2]", put("num_seqs", (2,))),
        bad("other-float", "q_norm_weight", "float32", put("q_norm_weight", dtype=np.float32), T),
        bad("too-short", "k_norm_weight", "[63]", put("k_norm_weight", (63,))),
        bad("without-float8", "k_scale", "float32[1]", put("k_scale", (1,), np.float32)),
        bad("one-per-kv-head", "sinks", "[2]", put("sinks", (2,), np.float32)),
        bad("other-inputs", "out_weight", "[128, 64]", put("out_weight", (128, 64))),
        bad("float32", "out_scale", "float32", put("out_scale", dtype=np.float32), T),
        bad("int32", "out_zero_point", "int32", put("out_zero_point", dtype=np.int32), T),
        bad("other-float", "out_bias", "float32", put("out_bias", dtype=np.float32), T),
        bad("other-rows", "residual", "[7, 128]", put("residual", (7, 128))),
        bad("nan", "scale", "nan", option("scale", math.nan)),
        bad("negative", "sliding_window", "-4", option("sliding_window", -4)),
        bad("infinite", "soft_cap", "inf", option("soft_cap", math.inf)),
        bad("negative", "eps", "-1", option("eps", -1.0)),
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
        bad("infinite", "eps", "inf", option("eps", math.inf)),
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


def bidirectional_cases() -> list[Bad]:
    """31 rows of 4 query and 2 KV heads of 16, float32; 5 sequences at most."""

    def bad(*args, **kwargs):
        return Bad("bidirectional_attention", *args, **kwargs)

    bfloat16 = cases.DTYPES["bfloat16"]
    return [
        bad("int32", "query", "int32", put("query", dtype=np.int32), T),
        bad("rank-4", "query", "[1, 31, 4, 16]", put("query", (1, 31, 4, 16))),
        bad("head-dim-12", "query", "[31, 4, 12]", put("query", (31, 4, 12))),
        bad("head-dim-264", "query", "[31, 4, 264]", put("query", (31, 4, 264))),
        bad("three-heads", "query", "[31, 3, 16]", put("query", (31, 3, 16))),
        bad("no-heads", "query", "[31, 0, 16]", put("query", (31, 0, 16))),
        bad("other-float", "key", "bfloat16", put("key", dtype=bfloat16), T),
        bad("rank-2", "key", "[31, 32]", put("key", (31, 32))),
        bad("other-tokens", "key", "[30, 2, 16]", put("key", (30, 2, 16))),
        bad("other-head-dim", "key", "[31, 2, 8]", put("key", (31, 2, 8))),
        bad("other-float", "value", "bfloat16", put("value", dtype=bfloat16), T),
        bad("other-heads", "value", "[31, 1, 16]", put("value", (31, 1, 16))),
        bad("int64", "query_start_loc", "int64", put("query_start_loc", dtype=np.int64), T),
        bad("rank-2", "query_start_loc", "[1, 6]", put("query_start_loc", (1, 6))),
        bad("no-entry", "query_start_loc", "[0]", put("query_start_loc", (0,))),
        bad("float32", "num_seqs", "float32", put("num_seqs", dtype=np.float32), T),
        bad("two", "num_seqs", "[2]", put("num_seqs", (2,))),
        bad("nan", "scale", "nan", option("scale", math.nan)),
        bad("zero", "sliding_window", "0", option("sliding_window", 0)),
        bad("negative", "sliding_window", "-4", option("sliding_window", -4)),
        bad("zero", "soft_cap", "0", option("soft_cap", 0.0)),
        bad("too-small", "soft_cap", "1e-31", option("soft_cap", 1e-31)),
    ]


def mla_cases(operator: str) -> list[Bad]:
    """7 rows of 4 heads of 40, in bfloat16 or, with the log-sum-exps, float32; values of 32, 4 sequences at most."""
    dtype, other = ("float32", "bfloat16") if operator.endswith("_with_lse") else ("bfloat16", "float32")

    def bad(*args, **kwargs):
        return Bad(operator, *args, **kwargs)

    return [
        bad("int32", "query", "int32", put("query", dtype=np.int32), T),
        bad("rank-2", "query", f"{dtype}[7, 160]", put("query", (7, 160))),
        bad("head-dim-12", "query", "[7, 4, 12]", put("query", (7, 4, 12))),
        bad("head-dim-584", "query", "[7, 4, 584]", put("query", (7, 4, 584))),
        bad("no-heads", "query", "[7, 0, 40]", put("query", (7, 0, 40))),
        bad("other-float", "kv_cache", other, put("kv_cache", dtype=cases.DTYPES[other]), T),
        bad("rank-4", "kv_cache", "[8, 8, 1, 40]", put("kv_cache", (8, 8, 1, 40))),
        bad("rank-2", "kv_cache", "[64, 40]", put("kv_cache", (64, 40))),
        bad("page-size-0", "kv_cache", "[8, 0, 40]", put("kv_cache", (8, 0, 40))),
        bad("head-dim", "kv_cache", "[8, 8, 32]", put("kv_cache", (8, 8, 32))),
        bad("rank-2", "context_lens", "[4, 1]", put("context_lens", (4, 1))),
        bad("int64", "context_lens", "int64", put("context_lens", dtype=np.int64), T),
        bad("rank-1", "block_tables", "[20]", put("block_tables", (20,))),
        bad("rows", "block_tables", "[3, 5]", put("block_tables", (3, 5))),
        bad("one-too-short", "query_start_loc", "[4]", put("query_start_loc", (4,))),
        bad("float32", "query_start_loc", "float32", put("query_start_loc", dtype=np.float32), T),
        bad("two", "num_seqs", "[2]", put("num_seqs", (2,))),
        bad("int64", "num_seqs", "int64", put("num_seqs", dtype=np.int64), T),
        bad("nan", "scale", "nan", option("scale", math.nan)),
        bad("past-float32", "scale", "1e+39", option("scale", 1e39)),
        bad("negative", "value_dim", "-8", option("value_dim", -8)),
        bad("none", "value_dim", "0", option("value_dim", 0)),
        bad("not-of-8", "value_dim", "12", option("value_dim", 12)),
        bad("wider-than-keys", "value_dim", "48", option("value_dim", 48)),
    ]


def latent_cases() -> list[Bad]:
    """12 tokens of 32 and 8 elements in bfloat16, 9 pages of 16."""

    def bad(*args, **kwargs):
        return Bad("concat_and_cache_mla", *args, **kwargs)

    return [
        bad("rank-3", "kv_c", "[12, 1, 32]", put("kv_c", (12, 1, 32))),
        bad("float64", "kv_c", "float64", put("kv_c", dtype=np.float64), T),
        bad("not-of-8", "kv_c", "[12, 30]", put("kv_c", (12, 30))),
        bad("nothing", "kv_c", "[12, 0]", put("kv_c", (12, 0))),
        bad("rank-3", "k_pe", "[12, 1, 8]", put("k_pe", (12, 1, 8))),
        bad("other-tokens", "k_pe", "[11, 8]", put("k_pe", (11, 8))),
        bad("not-of-8", "k_pe", "[12, 10]", put("k_pe", (12, 10))),
        bad("other-float", "k_pe", "float16", put("k_pe", dtype=np.float16), T),
        bad("rank-4", "kv_cache", "[9, 16, 1, 40]", put("kv_cache", (9, 16, 1, 40))),
        bad("other-width", "kv_cache", "[9, 16, 48]", put("kv_cache", (9, 16, 48))),
        bad("page-size-0", "kv_cache", "[9, 0, 40]", put("kv_cache", (9, 0, 40))),
        bad("other-float", "kv_cache", "float16", put("kv_cache", dtype=np.float16), T),
        bad("rank-2", "slot_mapping", "[12, 1]", put("slot_mapping", (12, 1))),
        bad("too-many", "slot_mapping", "[13]", put("slot_mapping", (13,))),
        bad("float32", "slot_mapping", "float32", put("slot_mapping", dtype=np.float32), T),
    ]


LAYER = [
    *linear_cases(),
    *grouped_linear_cases(),
    *gated_mlp_cases(),
    *attention_block_cases(),
    *rms_norm_cases(),
    *gated_cases("silu_and_mul"),
    *gated_cases("gelu_and_mul"),
    *sample_cases(),
    *rotary_cases(),
    *bidirectional_cases(),
    *mla_cases("mla_attention"),
    *mla_cases("mla_attention_with_lse"),
    *latent_cases(),
]
