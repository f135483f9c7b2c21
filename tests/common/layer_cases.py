"""Inputs of the operators around attention and matrix products: norms, rotary embeddings, activations, sampling."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.common import bidirectional_cases, cache_cases, cases, compare, grouped_cases, mla_cases, reference


def rms_norm(dtype: str, shape: tuple[int, ...], with_residual: bool, seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"rms_norm {dtype} {shape}", seed)
    arrays = {"x": rng.standard_normal(shape) * 3, "weight": rng.uniform(0.2, 1.8, shape[-1:])}
    if with_residual:
        arrays["residual"] = rng.standard_normal(shape)
    return {name: x.astype(cases.DTYPES[dtype]) for name, x in arrays.items()}


def gated(dtype: str, shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"gated {dtype} {shape}", seed)
    return {"x": (rng.standard_normal(shape) * 3).astype(cases.DTYPES[dtype])}


def rotation(num_tokens: int, rotary_dim: int, rng: np.random.Generator, max_positions: int = 50) -> dict:
    angles = np.arange(max_positions)[:, None] * 10000.0 ** (-np.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    return {
        "positions": rng.integers(0, max_positions, num_tokens).astype(np.int32),
        "table": np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32),
    }


def rotary(dtype: str, num_tokens=7, num_heads=6, num_kv_heads=2, head_dim=24, rotary_dim=None, seed=0) -> dict:
    rng = cases.rng_for(f"rotary {dtype} {num_tokens} {num_heads} {head_dim}", seed)
    heads = {"query": num_heads, "key": num_kv_heads}
    arrays = {n: rng.standard_normal((num_tokens, h, head_dim)).astype(cases.DTYPES[dtype]) for n, h in heads.items()}
    return arrays | rotation(num_tokens, head_dim if rotary_dim is None else rotary_dim, rng)


def rotary_and_cache(
    case: cache_cases.CacheCase, num_heads: int = 6, *, norms=False, bias=False, rotary_dim=None, seed=0
) -> dict:
    """The cache, slots and scales of a case of reshape_and_cache, whose keys and values are now parts of qkv."""
    arrays = cache_cases.build_cache(case, seed)
    rng = cases.rng_for(f"rotary_and_cache {case.name} {num_heads}", seed)
    key, value = arrays.pop("key"), arrays.pop("value")
    query = rng.standard_normal((key.shape[0], num_heads, case.head_dim)).astype(key.dtype)
    qkv = np.concatenate([query, key, value], 1)
    qkv = qkv.reshape(qkv.shape[0], qkv.shape[1] * qkv.shape[2])
    made = {"qkv": qkv, **rotation(key.shape[0], case.head_dim if rotary_dim is None else rotary_dim, rng), **arrays}
    if norms:
        made |= {f"{n}_norm_weight": rng.uniform(0.3, 1.7, case.head_dim).astype(key.dtype) for n in "qk"}
    if bias:
        made["bias"] = rng.standard_normal(qkv.shape[1]).astype(key.dtype)
    return made


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


def assert_rotated(arrays: dict, options: dict, got: tuple[np.ndarray, np.ndarray], what: str) -> None:
    """rotary_and_cache's results: values within rounding, and every slot that no token names with its own bits."""
    with np.errstate(all="ignore"):
        query, cache = reference.rotary_and_cache(**arrays, **options)
    largest = np.abs(query.astype(np.float64)).max(initial=1)
    # Of what is normalised, a rounding before the rotation may fall to the other side too, of either element of a pair.
    before_rotation = 2 * float(ml_dtypes.finfo(query.dtype).eps)
    floor = 2.0**-20 * largest
    if arrays.get("q_norm_weight") is not None:
        floor = floor + before_rotation * _largest_of_head(query)
    compare.assert_norm(got[0], query, f"{what}: query", floor=floor)
    touched = compare.bits(cache) != compare.bits(arrays["kv_cache"])
    slots = arrays["slot_mapping"][arrays["slot_mapping"] >= 0]
    parts = [x.reshape(-1, *x.shape[2:]) for x in reference.split_cache(touched)]
    named = np.zeros(parts[0].shape[0], bool)
    named[slots] = True
    normed = [arrays.get("k_norm_weight") is not None, False]  # of keys and values
    for is_normed, got_part, want_part, before in zip(
        normed, *(reference.split_cache(x) for x in (got[1], cache, arrays["kv_cache"])), strict=True
    ):
        flat = [x.reshape(-1, *x.shape[2:]) for x in (got_part, want_part, before)]
        compare.assert_bitwise_equal(flat[0][~named], flat[2][~named], f"{what}: slots that are not named")
        g, w = (x[named].astype(np.float64) for x in flat[:2])
        # One rounding to the cache's type may fall to the other side.
        eps = float(ml_dtypes.finfo(cache.dtype).eps)
        size = np.abs(w[np.isfinite(w)]).max(initial=1)
        compare.assert_same_special(g, w, what)
        finite = np.isfinite(w)
        error = np.abs(g - w)[finite]
        allowed = eps * np.abs(w[finite]) + 2.0**-19 * size + float(ml_dtypes.finfo(cache.dtype).smallest_subnormal)
        if is_normed:
            allowed += before_rotation * np.broadcast_to(_largest_of_head(w), w.shape)[finite]
        assert (error <= allowed).all(), f"{what}: {float(error.max())} in the cache"


def _largest_of_head(x: np.ndarray) -> np.ndarray:
    """Of the finite numbers of each head; x is [..., head_dim]."""
    wide = np.abs(x.astype(np.float64))
    return np.where(np.isfinite(wide), wide, 0).max(-1, keepdims=True, initial=0)


def gated_mlp(
    weight_format: str,
    rows: int,
    hidden: int,
    intermediate: int,
    dtype: str = "bfloat16",
    *,
    norm=True,
    residual=True,
    bias=False,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    made = {
        "gate_up": cases.linear_inputs(weight_format, rows, 2 * intermediate, hidden, dtype, bias=bias),
        "down": cases.linear_inputs(weight_format, rows, hidden, intermediate, dtype, bias=bias, residual=hidden),
    }
    arrays = {"x": made["gate_up"]["x"]}
    for prefix, of_linear in made.items():
        for name in ("weight", "weight_scale", "weight_zero_point", "bias"):
            if name in of_linear:
                arrays[f"{prefix}_{name if name == 'weight' else name.removeprefix('weight_')}"] = of_linear[name]
    if norm:
        rng = cases.rng_for(f"gated_mlp {hidden}", seed)
        arrays["norm_weight"] = rng.uniform(0.5, 1.5, hidden).astype(cases.DTYPES[dtype])
    if residual:
        arrays["residual"] = made["down"]["residual"]
    return arrays


def attention_block(
    case: cases.AttentionCase,
    weight_format: str = "plain",
    hidden: int = 128,
    *,
    norm=True,
    residual=True,
    bias=False,
    head_norms=False,
    products: tuple[str, ...] = ("qkv", "out"),
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], dict]:
    """A case of paged_attention whose query, and the new tokens' keys and values, are now made of x. Its rows past the
    last sequence have no slot. Without the product "qkv" x is its result, without a norm; without "out" there is no
    residual. Returns (arrays, options)."""
    rng = cases.rng_for(f"attention_block {case.name} {hidden}", seed)
    inputs = cases.build(case, seed).arrays()
    rows, width = inputs.pop("query").shape[0], (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    slots, positions = [], np.zeros(rows, np.int32)
    for i, (q_len, context_len) in enumerate(case.sequences):
        new = np.arange(context_len - q_len, context_len)
        positions[len(slots) : len(slots) + q_len] = new
        slots += list(inputs["block_tables"][i, new // case.page_size] * case.page_size + new % case.page_size)
    longest = max((c for _, c in case.sequences), default=1)
    table = rotation(rows, case.head_dim, rng, max_positions=longest + 1)["table"]
    inner = case.num_heads * case.head_dim
    made = {
        "qkv": cases.linear_inputs(weight_format, rows, width, hidden, case.dtype, bias=bias),
        "out": cases.linear_inputs(weight_format, rows, hidden, inner, case.dtype, bias=bias, residual=hidden),
    }
    arrays = {"x": made["qkv"]["x"], "positions": positions, "table": table, **inputs}
    arrays["slot_mapping"] = np.array(slots, np.int32)
    if "qkv" not in products:
        arrays["x"] = rng.standard_normal((rows, width)).astype(cases.DTYPES[case.dtype])
    for prefix in products:
        for name in ("weight", "weight_scale", "weight_zero_point", "bias"):
            if name in made[prefix]:
                arrays[f"{prefix}_{name if name == 'weight' else name.removeprefix('weight_')}"] = made[prefix][name]
    vectors = {"norm_weight": hidden} if norm and "qkv" in products else {}
    vectors |= {f"{n}_norm_weight": case.head_dim for n in "qk"} if head_norms else {}
    arrays |= {n: rng.uniform(0.5, 1.5, size).astype(cases.DTYPES[case.dtype]) for n, size in vectors.items()}
    if residual and "out" in products:
        arrays["residual"] = made["out"]["residual"]
    none = {f"{prefix}_weight": None for prefix in made if prefix not in products}
    return arrays, {**case.options(), "eps": 1e-5, **none}


# The operators of samples(); each folder's name stands in the tests that list them.
NAMES = (
    *("linear", "grouped_linear", "gated_mlp", "attention_block", "rms_norm", "silu_and_mul", "gelu_and_mul"),
    *("sample", "rotary_embedding", "rotary_and_cache", "bidirectional_attention"),
    *("mla_attention", "mla_attention_with_lse", "concat_and_cache_mla"),
)


def samples() -> dict[str, tuple[dict[str, np.ndarray], dict]]:
    """Small sound arguments of each operator: (arrays, options)."""
    return {
        "linear": (cases.linear_inputs("int4-zero-point", 3, 32, 256, "float16", bias=True, residual=32), {}),
        "grouped_linear": (
            grouped_cases.inputs("int4-zero-point", [2, 0, 1], 32, 256, "float16", bias=True, rows=4),
            {},
        ),
        "gated_mlp": (gated_mlp("int4-zero-point", 3, 128, 128, "float16", bias=True), {"eps": 1e-5}),
        "attention_block": attention_block(
            cases.AttentionCase(
                "layer",
                ((1, 20), (2, 9)),
                num_heads=4,
                num_kv_heads=2,
                head_dim=64,
                page_size=8,
                dtype="bfloat16",
                sinks=True,
            ),
            "int4-zero-point",
            bias=True,
            head_norms=True,
        ),
        "rms_norm": (rms_norm("float16", (5, 24), with_residual=True), {"eps": 1e-5, "weight_offset": 0.5}),
        "silu_and_mul": (gated("bfloat16", (5, 48)), {}),
        "gelu_and_mul": (gated("float32", (3, 2, 22)), {}),
        "sample": (sampling("bfloat16", 7, 101), {}),
        "rotary_embedding": (rotary("float16"), {"interleaved": True}),
        "rotary_and_cache": (
            rotary_and_cache(cache_cases.CacheCase("layer", dtype="bfloat16", num_tokens=9), norms=True, bias=True),
            {"norm_eps": 1e-5},
        ),
        "bidirectional_attention": bidirectional("layer", (5, 1, 20), sliding_window=7, soft_cap=4.0),
        "mla_attention": latent_attention("layer", ((1, 20), (3, 9)), dtype="bfloat16"),
        "mla_attention_with_lse": latent_attention("layer", ((1, 20), (3, 9))),
        "concat_and_cache_mla": (mla_cases.build_latents(mla_cases.LatentCase("layer", dtype="bfloat16")), {}),
    }


def bidirectional(name: str, lengths: tuple[int, ...], **fields) -> tuple[dict[str, np.ndarray], dict]:
    """Of 4 query and 2 KV heads of 16, in float32; 2 padding rows in front, 3 behind, 2 spare sequences."""
    case = bidirectional_cases.Case(name, lengths, **fields)
    return bidirectional_cases.build(case), case.options()


def latent_attention(name: str, sequences: tuple[tuple[int, int], ...], **fields) -> tuple[dict[str, np.ndarray], dict]:
    """Of 4 heads of 40, whose values have 32; 3 padding rows, 2 spare sequences."""
    case = mla_cases.Case(name, sequences, **fields)
    return mla_cases.build(case), case.options()


def grid() -> list[tuple[str, tuple[dict[str, np.ndarray], dict]]]:
    """What the sanitizers run: each operator in each dtype, with sizes that vectors divide and that they do not."""
    made = []
    for dtype in ("float16", "bfloat16"):
        for weight_format in grouped_cases.FORMATS:
            for sizes, n, k in (([1, 0, 2], 16, 128), ([20, 3], 208, 640), ([0, 70, 5], 144, 1280)):
                arrays = grouped_cases.inputs(weight_format, sizes, n, k, dtype, bias=n > 16, rows=sum(sizes) + n % 3)
                made.append(("grouped_linear", (arrays, {})))
    for dtype in cases.FLOATS:
        for i, weight_format in enumerate(cases.WEIGHT_FORMATS):
            for rows, n, k in ((1, 16, 128), (5, 208, 640), (17, 144, 1280), (64, 272, 256), (67, 32, 128)):
                residual = (n // 2 if i % 2 else n) if rows % 3 else 0
                arrays = cases.linear_inputs(weight_format, rows, n, k, dtype, bias=rows % 2 == 0, residual=residual)
                made.append(("linear", (arrays, {"activation": "silu_and_mul" if i % 2 else None})))
            for rows, hidden, intermediate in ((1, 128, 256), (33, 256, 128), (64, 256, 640)):
                arrays = gated_mlp(weight_format, rows, hidden, intermediate, dtype, norm=rows > 1, residual=rows != 33)
                made.append(("gated_mlp", (arrays, {"eps": 1e-5})))
        for i, cache_dtype in enumerate((None, *cases.FLOAT8S)):
            case = cases.AttentionCase(
                "layer-grid", ((1, 40), (3, 9), (1, 300)) + ((1, 5),) * 9 * i, num_heads=8, num_kv_heads=2, dtype=dtype,
                cache_dtype=cache_dtype, scales="per_head" if cache_dtype else None,
            )  # fmt: skip
            for weight_format in ("plain", "float8-block", "int4"):
                made.append(("attention_block", attention_block(case, weight_format, 256, norm=i != 1)))
        for size in (8, 33, 1000, 4099):
            made.append(("rms_norm", (rms_norm(dtype, (3, size), size % 2 == 0), {"eps": 1e-5})))
            if size % 2 == 0:
                made += [
                    ("silu_and_mul", (gated(dtype, (3, size)), {})),
                    ("gelu_and_mul", (gated(dtype, (3, size)), {})),
                ]
        for head_dim, rotary_dim in ((64, 64), (40, 10), (129, 128)):
            arrays = rotary(dtype, head_dim=head_dim, rotary_dim=rotary_dim)
            made.append(("rotary_embedding", (arrays, {"interleaved": rotary_dim == 10})))
        for cache_dtype in (None, *cases.FLOAT8S):
            case = cache_cases.CacheCase(
                "layer-grid", dtype=dtype, cache_dtype=cache_dtype, scales="per_head" if cache_dtype else None,
                slot_dtype="int64" if cache_dtype else "int32", layout="split" if dtype == "float16" else "combined",
            )  # fmt: skip
            for full in (False, True):
                arrays = rotary_and_cache(case, norms=full, bias=full, rotary_dim=case.head_dim // 2 if full else None)
                made.append(("rotary_and_cache", (arrays, {})))
        # A CTA has several tokens.
        case = cache_cases.CacheCase("layer-prompt", num_tokens=600, num_pages=40, dtype=dtype, head_dim=128, skipped=9)
        made.append(("rotary_and_cache", (rotary_and_cache(case, norms=dtype != "float16"), {})))
        made += [("sample", (sampling(dtype, rows, vocab), {})) for rows, vocab in ((1, 7), (9, 1000), (2, 9001))]
        for lengths, head_dim, window in (
            ((5, 0, 70), 64, None),
            ((130, 1), 80, 1),
            ((200,), 128, 65),
            ((9,) * 20, 64, 3),
            ((33, 64, 65), 256, None),
            ((), 64, None),
            ((400, 3), 72, 100),
        ):
            fields = dict(head_dim=head_dim, dtype=dtype, sliding_window=window, soft_cap=5.0 if window == 3 else None)
            made.append(("bidirectional_attention", bidirectional("layer-grid", lengths, **fields)))
        for sequences, heads, head_dim, value_dim in (
            (((1, 70), (1, 300), (0, 4)), 16, 576, 512),
            (((1, 70), (3, 9)), 128, 576, 512),
            (((40, 90), (7, 3)), 20, 192, 128),
            (((1, 33),), 1, 8, 8),
        ):
            fields = dict(num_heads=heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
            name = "mla_attention" if heads == 128 else "mla_attention_with_lse"
            made.append((name, latent_attention("layer-grid", sequences, **fields)))
    for case in (*mla_cases.LATENT_CASES, *mla_cases.latent_grid()):
        made.append(("concat_and_cache_mla", (mla_cases.build_latents(case), {})))
    return made
