"""mla_attention and concat_and_cache_mla: inputs with poison where nothing may be read, meaning in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tests.common import cases, reference

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    sequences: tuple[tuple[int, int], ...]  # (query tokens, context length including them) of every live sequence
    num_heads: int = 4
    head_dim: int = 40
    value_dim: int = 32
    page_size: int = 8
    dtype: str = "float32"
    scale: float | None = None  # None: head_dim ** -0.5
    spread: float = 1.0
    spare_seqs: int = 2
    spare_columns: int = 2
    padding_tokens: int = 3
    shared_prefix: int = 0

    def options(self) -> dict:
        return {"scale": self.head_dim**-0.5 if self.scale is None else self.scale, "value_dim": self.value_dim}

    def but(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)

    def of_paged_attention(self) -> cases.AttentionCase:
        """Its batch, whose keys are the latents."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "value_dim"}
        return cases.AttentionCase(**fields, num_kv_heads=1, layout="split")


CASES = (
    Case("deepseek-v2-lite-decode", ((1, 37), (1, 128), (1, 1), (1, 16)), num_heads=16, head_dim=576, value_dim=512),
    Case("deepseek-v3-decode-bf16", ((1, 70), (1, 200)), num_heads=128, head_dim=576, value_dim=512, page_size=64,
         dtype="bfloat16"),
    Case("kimi-k2-mixed-f16", ((1, 40), (19, 19), (6, 90)), num_heads=64, head_dim=576, value_dim=512, dtype="float16"),
    Case("16-rows-bf16", ((1, 37), (1, 128), (1, 1), (1, 333)), num_heads=16, head_dim=576, value_dim=512, page_size=16,
         dtype="bfloat16", padding_tokens=1),
    Case("32-rows-f16", ((1, 170), (2, 90), (1, 700)), num_heads=20, head_dim=576, value_dim=512, dtype="float16",
         padding_tokens=1),
    Case("speculative-2-rows-bf16", ((2, 60), (2, 2), (2, 129)), num_heads=8, head_dim=192, value_dim=128, page_size=1,
         dtype="bfloat16"),
    Case("empty-sequences-in-the-middle", ((3, 20), (0, 31), (0, 0), (1, 9), (0, 5)), page_size=3),
    Case("more-queries-than-context", ((9, 4), (1, 0), (2, 33))),
    Case("values-are-whole-keys", ((5, 30), (1, 12)), head_dim=64, value_dim=64),
    Case("no-live-sequence", (), padding_tokens=5),
)  # fmt: skip

MORE = (
    Case("prefill-whole-prompt-bf16", ((200, 200),), num_heads=16, head_dim=576, value_dim=512, dtype="bfloat16"),
    # Hopper's kernels divide a row's keys among CTAs.
    Case("long-contexts-bf16", ((1, 5000), (1, 64), (2, 2900)), num_heads=16, head_dim=576, value_dim=512, page_size=16,
         dtype="bfloat16"),
    Case("long-contexts-of-many-heads-f16", ((1, 40), (1, 3300)), num_heads=128, head_dim=576, value_dim=512,
         page_size=64, dtype="float16"),
    Case("chunk-behind-long-context-bf16", ((90, 2300), (1, 700)), num_heads=16, head_dim=576, value_dim=512,
         page_size=16, dtype="bfloat16"),
    Case("prefill-behind-long-context", ((33, 700), (1, 1500)), num_heads=8, dtype="bfloat16"),
    Case("long-tail-of-lengths", tuple((1, c) for c in (2, 3, 5, 8, 13, 21, 34, 55, 610, 1200)), num_heads=16),
    Case("one-head", ((1, 70), (5, 9)), num_heads=1),
    Case("heads-that-16-does-not-divide", ((1, 70), (5, 9)), num_heads=18, dtype="float16"),
    Case("heads-of-a-prime", ((1, 70), (5, 9)), num_heads=17),
    Case("smallest", ((1, 1),), num_heads=1, head_dim=8, value_dim=8, page_size=1),
    Case("values-smaller-than-half", ((3, 50),), head_dim=96, value_dim=8, dtype="bfloat16"),
    Case("value-dim-24", ((3, 50), (1, 9)), head_dim=72, value_dim=24),
    Case("only-empty-sequences", ((0, 0), (0, 12)), padding_tokens=2),
    Case("no-padding-at-all", ((1, 32), (4, 16)), spare_seqs=0, spare_columns=0, padding_tokens=0),
    Case("much-padding", ((1, 20),), spare_seqs=40, spare_columns=30, padding_tokens=100),
    Case("shared-system-prompt", ((1, 70), (1, 64), (5, 90)), shared_prefix=4),
    Case("peaked-softmax", ((1, 120), (10, 60)), spread=8.0, dtype="float16"),
    Case("negative-scale", ((1, 50), (9, 30)), scale=-0.3),
    Case("scale-zero-is-the-mean", ((1, 50), (9, 30)), scale=0.0),
)  # fmt: skip


def build(case: Case, seed: int = 0, poison: bool = True) -> Arrays:
    """Arrays by argument name."""
    arrays = cases.build(case.of_paged_attention(), seed, poison).arrays()
    arrays["kv_cache"] = np.ascontiguousarray(arrays["kv_cache"][0, :, :, 0])
    return arrays


def expected(arrays: Arrays, *, scale: float, value_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 (out [num_tokens, num_heads, value_dim], lse [num_tokens, num_heads])."""
    query, kv_cache = (arrays[name].astype(np.float64) for name in ("query", "kv_cache"))
    num_tokens, num_heads, head_dim = query.shape
    page_size = kv_cache.shape[1]
    out = np.zeros((num_tokens, num_heads, value_dim))
    lse = np.full((num_tokens, num_heads), -np.inf)
    for s in range(int(arrays["num_seqs"].reshape(()))):
        context = int(arrays["context_lens"][s])
        keys = kv_cache[arrays["block_tables"][s, : math.ceil(context / page_size)]].reshape(-1, head_dim)[:context]
        first, last = arrays["query_start_loc"][s : s + 2].tolist()
        for row in range(first, last):
            seen = keys[: max(0, context - (last - 1 - row))]
            if len(seen):
                scores = query[row] @ seen.T * scale
                top = scores.max(-1, keepdims=True)
                weights = np.exp(scores - top)
                total = weights.sum(-1, keepdims=True)
                out[row] = weights / total @ seen[:, :value_dim]
                lse[row] = (top + np.log(total))[:, 0]
    return out, lse


def rounded(arrays: Arrays, *, scale: float, value_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(out in T, lse float32), each step rounded to T as plain PyTorch's are."""
    query, kv_cache = (arrays[name] for name in ("query", "kv_cache"))
    num_tokens, num_heads, head_dim = query.shape

    def step(x):
        return x.astype(query.dtype).astype(np.float32)

    out = np.zeros((num_tokens, num_heads, value_dim), query.dtype)
    lse = np.full((num_tokens, num_heads), -np.inf, np.float32)
    for s in range(int(arrays["num_seqs"].reshape(()))):
        context = int(arrays["context_lens"][s])
        first, last = arrays["query_start_loc"][s : s + 2].tolist()
        first = max(first, last - context)  # rows in front of it see no key
        if first == last:
            continue
        keys = kv_cache[arrays["block_tables"][s, : math.ceil(context / kv_cache.shape[1])]]
        keys = keys.reshape(-1, head_dim)[:context].astype(np.float32)
        scores = query[first:last].astype(np.float32).reshape(-1, head_dim) @ keys.T
        scores = step(step(scores) * np.float32(scale)).reshape(last - first, num_heads, context)
        hidden = reference.hidden_keys(last - first, context, None, None)
        scores = np.where(hidden[:, None], np.float32(-np.inf), scores)
        largest = scores.max(-1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        rows = step(weights / total).reshape(-1, context) @ keys[:, :value_dim]
        out[first:last] = rows.reshape(last - first, num_heads, value_dim).astype(query.dtype)
        lse[first:last] = (largest + np.log(total))[..., 0]
    return out, lse


# ---- concat_and_cache_mla ----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class LatentCase:
    name: str
    num_tokens: int = 12
    kv_lora_rank: int = 32
    rope_dim: int = 8
    page_size: int = 16
    num_pages: int = 9
    dtype: str = "float32"
    slot_dtype: str = "int32"
    num_slots: int | None = None  # None: num_tokens; fewer: the tokens beyond have no slot
    skipped: int = 2  # how many of the slots are negative

    def but(self, **changes) -> LatentCase:
        return dataclasses.replace(self, **changes)


LATENT_CASES = (
    LatentCase("deepseek-decode-bf16", num_tokens=8, kv_lora_rank=512, rope_dim=64, page_size=64, dtype="bfloat16"),
    LatentCase("prefill-chunk-f16", num_tokens=130, kv_lora_rank=512, rope_dim=64, dtype="float16"),
    LatentCase("slots-int64", slot_dtype="int64"),
    LatentCase("fewer-slots-than-tokens", num_slots=7),
    LatentCase("all-skipped", skipped=12),
    LatentCase("no-slots", num_slots=0, skipped=0),
    LatentCase("no-tokens", num_tokens=0, skipped=0),
    LatentCase("odd-sizes", kv_lora_rank=24, rope_dim=40, page_size=7, num_pages=5, dtype="bfloat16"),
    LatentCase("page-of-one", page_size=1, num_pages=40, kv_lora_rank=8),
)


def latent_grid() -> list[LatentCase]:
    """Every dtype, by sizes at which a thread has several tokens, parts of one, and a CTA several."""
    return [
        LatentCase(f"grid-{dtype}-{slots}-{tokens}-{rank}-{rope}", tokens, rank, rope, page_size=3 + rank % 5,
                   num_pages=tokens, dtype=dtype, slot_dtype=slots, skipped=tokens // 5)
        for dtype in cases.FLOATS
        for slots in ("int32", "int64")
        for tokens, rank, rope in ((1, 8, 8), (33, 512, 64), (300, 16, 24), (1100, 128, 8))
    ]  # fmt: skip


def build_latents(case: LatentCase, seed: int = 0) -> Arrays:
    """Arrays by argument name. Half of the cache's slots hold NaN, which must survive bit for bit."""
    rng = cases.rng_for(case.name, seed)
    dtype = cases.DTYPES[case.dtype]
    width = case.kv_lora_rank + case.rope_dim
    cache = cases.normal(rng, (case.num_pages, case.page_size, width), 1.0, dtype)
    cache[rng.random(cache.shape[:2]) < 0.5] = dtype.type(np.nan)
    num_slots = case.num_tokens if case.num_slots is None else case.num_slots
    slots = rng.permutation(case.num_pages * case.page_size)[:num_slots].astype(cases.DTYPES[case.slot_dtype])
    lowest = np.iinfo(slots.dtype).min
    places = rng.permutation(num_slots)[: case.skipped]
    slots[places] = rng.choice(np.array([-1, -7, lowest], slots.dtype), case.skipped)
    return {
        "kv_c": cases.normal(rng, (case.num_tokens, case.kv_lora_rank), 1.0, dtype),
        "k_pe": cases.normal(rng, (case.num_tokens, case.rope_dim), 1.0, dtype),
        "kv_cache": cache,
        "slot_mapping": slots,
    }


def stored(kv_c: np.ndarray, k_pe: np.ndarray, kv_cache: np.ndarray, slot_mapping: np.ndarray) -> np.ndarray:
    """The cache after the new tokens; negative slots are skipped, of duplicate slots the last token wins."""
    kv_cache = kv_cache.copy()
    flat = kv_cache.reshape(-1, kv_cache.shape[-1])
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            flat[slot] = np.concatenate([kv_c[token], k_pe[token]])
    return kv_cache
