"""rotary_and_cache, and rotary_and_cache_( in place: beside the operators that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cache_cases, compare, layer_cases, reference

EAGER = pytest.mark.frontends("eager", "eager-cuda")

CACHES = [
    cache_cases.CacheCase("rotary-f32"),
    cache_cases.CacheCase("rotary-bf16-split", dtype="bfloat16", layout="split", slot_dtype="int64", num_slots=9),
    cache_cases.CacheCase("rotary-e4m3", dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="per_head"),
    cache_cases.CacheCase("rotary-e5m2", dtype="float16", cache_dtype="float8_e5m2", scales="one", head_dim=40),
]
VARIANTS = {
    "plain": ({}, {}),
    "qwen3": ({"norms": True}, {}),
    "gemma3": ({"norms": True}, {"weight_offset": 1.0, "round_once": True}),
    "qwen2": ({"bias": True}, {}),
    "all": ({"norms": True, "bias": True, "rotary_dim": 16}, {"interleaved": True, "norm_eps": 1e-4}),
}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "all"])
@pytest.mark.parametrize("case", CACHES[1:], ids=lambda case: case.name)
@EAGER
def test_every_variant_with_every_cache(frontend, case, variant):
    check_with_cache(frontend, case, variant)


@pytest.mark.parametrize(
    ("case", "variant"),
    [*((CACHES[0], variant) for variant in VARIANTS), *((case, "all") for case in CACHES[1:])],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_with_cache(frontend, case, variant):
    check_with_cache(frontend, case, variant)


def check_with_cache(frontend, case, variant):
    given, options = VARIANTS[variant]
    arrays = layer_cases.rotary_and_cache(case, **given)
    layer_cases.assert_rotated(arrays, options, frontend.call("rotary_and_cache", arrays, **options), frontend.name)


@pytest.mark.parametrize("case", CACHES, ids=lambda case: case.name)
@EAGER
def test_bits_are_those_of_the_parts(frontend, case):
    """bias by addition, rms_norm, rotary_embedding, reshape_and_cache: one after the other."""
    arrays = layer_cases.rotary_and_cache(case, norms=True, bias=True)
    query, cache = frontend.call("rotary_and_cache", arrays)
    qkv = (arrays["qkv"].astype(np.float32) + arrays["bias"].astype(np.float32)).astype(arrays["qkv"].dtype)
    heads = qkv.reshape(qkv.shape[0], -1, case.head_dim)
    q, k, v = np.split(heads, [6, 6 + case.num_kv_heads], axis=1)
    q, k = (
        frontend.call("rms_norm", {"x": np.ascontiguousarray(x), "weight": arrays[f"{n}_norm_weight"]}, eps=1e-6)[0]
        for x, n in ((q, "q"), (k, "k"))
    )
    q, k = frontend.call(
        "rotary_embedding", {"query": q, "key": k, "positions": arrays["positions"], "table": arrays["table"]}
    )
    rest = {n: arrays[n] for n in ("kv_cache", "slot_mapping", "k_scale", "v_scale") if n in arrays}
    (stored,) = frontend.call("reshape_and_cache", {"key": k, "value": np.ascontiguousarray(v), **rest})
    # The norm's sum has another order in a warp of its own.
    compare.assert_norm(query, q, f"{frontend.name}: query", floor=1e-6)
    same = compare.bits(cache) == compare.bits(stored)
    assert same.mean() > (0.9 if case.dtype == "float32" else 0.99)
    plain = layer_cases.rotary_and_cache(case)
    query, cache = frontend.call("rotary_and_cache", plain)
    heads = plain["qkv"].reshape(qkv.shape[0], -1, case.head_dim)
    q, k, v = (np.ascontiguousarray(x) for x in np.split(heads, [6, 6 + case.num_kv_heads], axis=1))
    q, k = frontend.call(
        "rotary_embedding", {"query": q, "key": k, "positions": plain["positions"], "table": plain["table"]}
    )
    compare.assert_bitwise_equal(query, q, f"{frontend.name}: query")
    (stored,) = frontend.call("reshape_and_cache", {"key": k, "value": v, **rest})
    compare.assert_bitwise_equal(cache, stored, f"{frontend.name}: cache")


@pytest.mark.frontends("eager", "torch_xla", "torch_xla-compiled", "eager-cuda", "torch_xla-cuda")
def test_in_place_returns_the_query(frontend):
    arrays = layer_cases.rotary_and_cache(CACHES[0])
    want = reference.rotary_and_cache(**arrays)

    def body(ops, **tensors):
        query = ops.rotary_and_cache_(**tensors)
        return query, tensors["kv_cache"]

    query, cache = frontend.run(body, arrays)
    compare.assert_norm(query, want[0], f"{frontend.name}: query", floor=1e-6)
    np.testing.assert_allclose(cache, want[1], atol=1e-5)


@EAGER
def test_duplicate_slots_hold_one_token(frontend):
    """K and V of the last of the tokens that name a slot, on every run."""
    arrays = layer_cases.rotary_and_cache(cache_cases.CacheCase("rotary-duplicates", num_tokens=64, skipped=0))
    arrays["slot_mapping"][:] = np.resize([3, 5, 11, 8], 64)
    layer_cases.assert_rotated(arrays, {}, frontend.call("rotary_and_cache", arrays), frontend.name)


@EAGER
def test_bits_of_a_token_are_its_own(frontend):
    case = cache_cases.CacheCase("rotary-rows", num_tokens=90, dtype="bfloat16", num_pages=12, skipped=0)
    arrays = layer_cases.rotary_and_cache(case, norms=True)
    query, _ = frontend.call("rotary_and_cache", arrays)
    for rows in ([5], [89, 3, 44], list(range(40))):
        part = arrays | {n: arrays[n][rows] for n in ("qkv", "positions", "slot_mapping")}
        compare.assert_bitwise_equal(frontend.call("rotary_and_cache", part)[0], query[rows], frontend.name)


# Of a prompt's tokens a CTA takes several. Head sizes of 16-byte vectors, of few lanes and many, and one without.
LONG = [
    ("f32-128", {"head_dim": 128}, {}),
    ("bf16-64", {"head_dim": 64, "dtype": "bfloat16"}, {"interleaved": True}),
    ("bf16-128", {"head_dim": 128, "dtype": "bfloat16", "slot_dtype": "int64", "num_slots": 1000}, {}),
    ("bf16-256", {"head_dim": 256, "dtype": "bfloat16", "layout": "split"}, {"weight_offset": 1.0, "round_once": True}),
    ("f16-80", {"head_dim": 80, "dtype": "float16"}, {}),
    ("bf16-20", {"head_dim": 20, "dtype": "bfloat16"}, {"interleaved": True}),
    ("e4m3-128", {"head_dim": 128, "dtype": "bfloat16", "cache_dtype": "float8_e4m3fn", "scales": "per_head"}, {}),
    ("e5m2-256", {"head_dim": 256, "dtype": "float16", "cache_dtype": "float8_e5m2", "scales": "one"}, {}),
]


@pytest.mark.parametrize("given, options", [case[1:] for case in LONG], ids=[case[0] for case in LONG])
@EAGER
def test_prompts(frontend, given, options):
    case = cache_cases.CacheCase(f"rotary-long-{given}", num_tokens=1300, num_pages=90, skipped=30, **given)
    rotary_dim = {80: 32, 20: 12}.get(case.head_dim)
    arrays = layer_cases.rotary_and_cache(case, norms=True, bias=True, rotary_dim=rotary_dim)
    whole = frontend.call("rotary_and_cache", arrays, **options)
    if case.dtype == "float32":  # else some of so many normed elements are rounded to the other side
        layer_cases.assert_rotated(arrays, options, whole, frontend.name)
    plain = layer_cases.rotary_and_cache(case, rotary_dim=rotary_dim)
    layer_cases.assert_rotated(plain, options, frontend.call("rotary_and_cache", plain, **options), frontend.name)
    # A token alone, as a decode step has it, and behind other tokens.
    for rows in ([700], list(range(900, 1000)), list(range(650, 0, -1))):
        part = arrays | {n: arrays[n][rows] for n in ("qkv", "positions")}
        part["slot_mapping"] = arrays["slot_mapping"][[row for row in rows if row < len(arrays["slot_mapping"])]]
        compare.assert_bitwise_equal(
            frontend.call("rotary_and_cache", part, **options)[0], whole[0][rows], f"{frontend.name}: {rows[0]}"
        )


@pytest.mark.parametrize("named", [3, 700, 1400])
@EAGER
def test_duplicate_slots_of_prompts(frontend, named):
    """Tokens of the same CTA name a slot, and tokens of others."""
    case = cache_cases.CacheCase(f"rotary-duplicates-{named}", num_tokens=1500, num_pages=94, skipped=0, head_dim=16)
    arrays = layer_cases.rotary_and_cache(case)
    arrays["slot_mapping"][:] = np.resize(np.random.default_rng(named).permutation(1500)[:named], 1500)
    layer_cases.assert_rotated(arrays, {}, frontend.call("rotary_and_cache", arrays), frontend.name)
