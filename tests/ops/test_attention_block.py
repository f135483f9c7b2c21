"""attention_block: the bits of the operators that it is made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.common import cases, compare, layer_cases, reference
from tests.common.cases import AttentionCase

CACHE = ("k_scale", "v_scale")


def by_parts(frontend, arrays, *, scale, sliding_window=None, soft_cap=None, eps, interleaved=False, **norm):
    norm = {name: value for name, value in norm.items() if value is not None}  # not the products that are left out

    def some(*names):
        return {name: arrays[name] for name in names if name in arrays}

    def product(h, prefix):
        if f"{prefix}_weight" not in arrays:
            return h
        names = {"weight": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point", "bias": "bias"}
        given = {of: arrays[f"{prefix}_{its}"] for its, of in names.items() if f"{prefix}_{its}" in arrays}
        return frontend.call("linear", {"x": h, **given, **(some("residual") if prefix == "out" else {})})[0]

    h = arrays["x"]
    if "norm_weight" in arrays:
        (h,) = frontend.call("rms_norm", {"x": h, "weight": arrays["norm_weight"]}, eps=eps, **norm)
    stored = {"qkv": product(h, "qkv"), **some("positions", "table", "kv_cache", "slot_mapping", *CACHE)}
    stored |= some("q_norm_weight", "k_norm_weight")
    query, cache = frontend.call("rotary_and_cache", stored, norm_eps=eps, interleaved=interleaved, **norm)
    metadata = some("context_lens", "block_tables", "query_start_loc", "num_seqs", *CACHE, "sinks")
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    (attended,) = frontend.call("paged_attention", {"query": query, "kv_cache": cache, **metadata}, **options)
    return product(attended.reshape(attended.shape[0], -1), "out"), cache


def check(frontend, arrays, options):
    got = frontend.call("attention_block", arrays, **options)
    for name, g, w in zip(("out", "kv_cache"), got, by_parts(frontend, arrays, **options), strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {name}")
    return got


DECODE = AttentionCase("block", ((1, 20), (1, 1), (1, 130)), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16")
MIXED = DECODE.but(sequences=((1, 20), (9, 40), (3, 3)))
LONG = DECODE.but(sequences=((70, 90), (1, 50)))


@pytest.mark.parametrize("case", [DECODE, MIXED, LONG], ids=["decode", "mixed", "more-than-64-rows"])
def test_values(frontend, case):
    check(frontend, *layer_cases.attention_block(case))


@pytest.mark.parametrize("weight_format", cases.WEIGHT_FORMATS)
@pytest.mark.frontends("eager", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_formats(frontend, weight_format):
    check(frontend, *layer_cases.attention_block(MIXED, weight_format, 256, bias=True))


@pytest.mark.parametrize("rows", [1, 2, 9, 33, 64, 65])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")
def test_rows(frontend, rows, dtype):
    sequences = tuple((1, 1 + 37 * i % 200) for i in range(rows))
    check(frontend, *layer_cases.attention_block(DECODE.but(sequences=sequences, dtype=dtype, padding_tokens=0)))


@pytest.mark.parametrize("case", [MIXED, LONG], ids=["few", "many"])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
@pytest.mark.frontends("eager", "jax", "torch_xla", "eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_every_option(frontend, cache_dtype, case):
    case = case.but(
        dtype="float16", cache_dtype=cache_dtype, scales="per_head" if cache_dtype else None, layout="split",
        sliding_window=30, soft_cap=15.0, sinks=True,
    )  # fmt: skip
    arrays, options = layer_cases.attention_block(case, "float8-channel", norm=True, bias=True, head_norms=True)
    check(frontend, arrays, {**options, "interleaved": True, "weight_offset": 1.0, "round_once": True})


@pytest.mark.parametrize("case", [DECODE, LONG], ids=["few", "many"])
@pytest.mark.frontends("eager", "jax", "eager-cuda", "jax-cuda")
def test_parts_that_are_left_out(frontend, case):
    check(frontend, *layer_cases.attention_block(case, norm=False, residual=False))


@pytest.mark.parametrize("case", [DECODE, MIXED, LONG], ids=["decode", "mixed", "more-than-64-rows"])
@pytest.mark.parametrize("products", [(), ("qkv",), ("out",)], ids=["none", "qkv", "out"])
def test_products_that_are_left_out(frontend, case, products):
    check(frontend, *layer_cases.attention_block(case, products=products))


@pytest.mark.parametrize("products", [(), ("qkv",), ("out",)], ids=["none", "qkv", "out"])
@pytest.mark.frontends("eager", "jax")
def test_what_belongs_to_a_product_that_is_left_out(frontend, products):
    whole, _ = layer_cases.attention_block(DECODE, "int4-zero-point", bias=True)
    arrays, options = layer_cases.attention_block(DECODE, "int4-zero-point", bias=True, products=products)
    for prefix in {"qkv", "out"}.difference(products):
        for name in ("norm_weight" if prefix == "qkv" else "residual", f"{prefix}_scale", f"{prefix}_bias"):
            with pytest.raises(ValueError, match=f"attention_block: {name}: expected None without {prefix}_weight"):
                frontend.call("attention_block", {**arrays, name: whole[name]}, **options)


@pytest.mark.parametrize("products", [("qkv", "out"), ("out",)], ids=["both", "out"])
@pytest.mark.frontends("eager", "jax")
def test_what_the_second_product_takes_its_size_from(frontend, products):
    case = dataclasses.replace(DECODE, num_heads=1, num_kv_heads=1, head_dim=64)
    arrays, options = layer_cases.attention_block(case, products=products)
    arrays["out_weight"] = np.zeros((128, 32), np.uint8)
    argument = "qkv_weight" if "qkv" in products else "x"
    with pytest.raises(ValueError, match=f"attention_block: {argument}: expected k a multiple of 128"):
        frontend.call("attention_block", arrays, **options)


@pytest.mark.parametrize("case", [DECODE, LONG], ids=["few", "many"])
@pytest.mark.frontends("eager", "torch_xla", "eager-cuda", "torch_xla-cuda")
def test_in_place(frontend, case):
    """attention_block_( updates the cache and returns the rows."""
    arrays, options = layer_cases.attention_block(case)
    want = frontend.call("attention_block", arrays, **options)

    def body(ops, **tensors):
        out = ops.attention_block_(**tensors, **options)
        return out, tensors["kv_cache"]

    for name, g, w in zip(("out", "kv_cache"), frontend.run(body, arrays), want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {name}")


def test_no_rows(frontend):
    arrays, options = layer_cases.attention_block(DECODE.but(sequences=(), padding_tokens=0))
    out, cache = frontend.call("attention_block", arrays, **options)
    assert out.shape == (0, 128)
    compare.assert_bitwise_equal(cache, arrays["kv_cache"], "the cache")


WRONG_VALUES = pytest.mark.parametrize(
    ("name", "index", "value", "text"),
    [
        ("positions", 1, 1000, r"positions\[1\]"),
        ("slot_mapping", 0, 10**6, "slot_mapping"),
        ("context_lens", 0, -3, "context_len"),
        ("block_tables", (0, 0), 10**6, "block_tables"),
        ("out_zero_point", (5, 0), 200, "out_zero_point: expected values of 0 to 127, got 200 for row 5"),
    ],
)


@pytest.mark.frontends(platform="host")
@pytest.mark.parametrize("case", [DECODE, LONG], ids=["few", "many"])
@WRONG_VALUES
def test_wrong_values_are_errors(frontend, case, name, index, value, text):
    arrays, options = layer_cases.attention_block(case, "int4-zero-point")
    arrays[name][index] = value
    if case is LONG and name == "out_zero_point":  # the front end's own product
        out, _ = frontend.call("attention_block", arrays, **options)
        assert np.isnan(out[:, 5].astype(np.float32)).all()
        return
    with pytest.raises(Exception, match=f"attention_block: .*{text}|attention_block: {text}"):
        frontend.call("attention_block", arrays, **options)


@pytest.mark.parametrize("case", [DECODE, LONG], ids=["few", "many"])
@WRONG_VALUES
@pytest.mark.frontends("eager")
def test_a_call_that_fails_leaves_the_cache(frontend, case, name, index, value, text):
    arrays, options = layer_cases.attention_block(case, "int4-zero-point")
    arrays[name][index] = value
    after = []

    def body(ops, **tensors):
        after.append(tensors["kv_cache"])
        return ops.attention_block_(**tensors, **options)

    if case is LONG and name == "out_zero_point":
        pytest.skip("no error above 64 rows")
    with pytest.raises(ValueError, match=text):
        frontend.run(body, arrays)
    np.testing.assert_array_equal(after[0].float().numpy(), arrays["kv_cache"].astype(np.float32))


@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("products", [(), ("qkv", "out")], ids=["none", "both"])
@pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")
def test_pages_that_another_sequence_writes(frontend, products, rows):
    """The new token of each sequence but the last is among the first keys of the next one: attention's kernel looks at
    its pages before the kernel that stores the token has ended."""
    case = DECODE.but(sequences=((1, 512),) * rows, num_heads=32, num_kv_heads=8, head_dim=128, padding_tokens=0)
    arrays, options = layer_cases.attention_block(case, products=products)
    tables = arrays["block_tables"]
    tables[1:, 0] = tables[:-1, 31]
    for _ in range(3):
        got = check(frontend, arrays, options)
    assert np.isfinite(got[0].astype(np.float32)).all()


# A call of one token, whose key is turned and stored by the kernel in front of attention.
ONE_TOKEN = {
    "llama": dict(sequences=((1, 1100),), num_heads=32, num_kv_heads=8),
    "first": dict(sequences=((1, 1),), num_heads=32, num_kv_heads=8),
    "last-of-a-block": dict(sequences=((1, 128),), num_heads=12, num_kv_heads=2, spare_seqs=0, spare_columns=200),
    "pages-of-1": dict(sequences=((1, 130),), num_heads=7, num_kv_heads=1, dtype="float16", page_size=1),
    "no-groups": dict(sequences=((1, 65),), num_heads=32, num_kv_heads=32, sliding_window=40, sinks=True),
    "long": dict(
        sequences=((1, 5000),), num_heads=8, num_kv_heads=2, dtype="float16", sliding_window=4500, soft_cap=30.0
    ),
    "no-sequence": dict(sequences=((0, 20),), num_heads=8, num_kv_heads=2, padding_tokens=1),
}


@pytest.mark.parametrize("slot", ["own", "earlier", "none"])
@pytest.mark.parametrize("products", [(), ("qkv", "out")], ids=["none", "both"])
@pytest.mark.parametrize("name", ONE_TOKEN)
@pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")
def test_one_token(frontend, name, products, slot):
    """What the token's slot held before is not seen, whichever of the sequence's slots it is."""
    case = DECODE.but(**{"head_dim": 128, "padding_tokens": 0, **ONE_TOKEN[name]})
    arrays, options = layer_cases.attention_block(case, products=products)
    context_len = case.sequences[0][1]
    position = context_len - 1 if slot == "own" else context_len // 2
    place = arrays["block_tables"][0, position // case.page_size], position % case.page_size
    for half in reference.split_cache(arrays["kv_cache"]):
        half[place] = np.nan
    index = place[0] * case.page_size + place[1] if slot != "none" else -1
    arrays["slot_mapping"] = np.array([index], np.int64 if name == "llama" else np.int32)
    out, _ = check(frontend, arrays, options)
    seen = slot != "none" or name == "no-sequence" or (case.sliding_window or context_len) < context_len // 2
    assert np.isfinite(out.astype(np.float32)).all() == seen


@pytest.mark.gpu
@pytest.mark.frontends("eager-cuda")
def test_one_token_past_the_table(frontend):
    arrays, options = layer_cases.attention_block(DECODE.but(head_dim=128, padding_tokens=0, **ONE_TOKEN["llama"]))
    arrays["positions"] = np.array([arrays["table"].shape[0]], np.int32)
    out, _ = check(frontend, arrays, options)
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "int4"])
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.frontends("eager-cuda")
def test_chained_kernels(frontend, rows, weight_format):
    """Kernels of Llama 3 8B's sizes, of which each starts before the one in front has ended: every run has the bits."""
    sequences = tuple((1, 500 + 13 * i) for i in range(rows))
    case = DECODE.but(sequences=sequences, num_heads=32, num_kv_heads=8, head_dim=128, padding_tokens=0)
    arrays, options = layer_cases.attention_block(case, weight_format, 4096)
    got = check(frontend, arrays, options)
    assert np.isfinite(got[0].astype(np.float32)).all()
    for _ in range(5):
        for g, w in zip(frontend.call("attention_block", arrays, **options), got, strict=True):
            compare.assert_bitwise_equal(g, w, "the same call again")
