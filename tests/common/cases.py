"""Inputs as data, named after real use; shared by the tests and by benchmarks/. A case is shapes and options alone;
`build` turns it into arrays, with poison wherever the operators promise not to look."""

from __future__ import annotations

import dataclasses
import math
import zlib

import ml_dtypes
import numpy as np

from tests.common import compare

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
FLOATS = ("float32", "float16", "bfloat16")
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")

# Page numbers that must never be used. They fill table entries that the operators promise not to read.
ABSURD_PAGES = (2147480000, -1, 2**31 - 1, -(2**31))


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    name: str
    sequences: tuple[tuple[int, int], ...]  # (query tokens, context length including them) of every live sequence
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: dtype
    layout: str = "combined"  # "combined": rank 4, torch_xla's; "split": rank 5, vLLM's
    sliding_window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None  # None: head_dim ** -0.5
    sinks: bool = False
    tree: int = 0  # words of tree_mask; 0: none
    scales: str | None = None  # fp8: "one" (one element) or "per_head"
    spread: float = 1.0  # standard deviation of q and k; large values make the softmax a single peak
    spare_seqs: int = 2  # dead entries of the metadata, filled with garbage
    spare_columns: int = 2  # block table columns that no sequence needs
    padding_tokens: int = 3  # query rows after the last sequence's
    shared_prefix: int = 0  # pages that all sequences have in common

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.sequences) + self.padding_tokens

    @property
    def max_seqs(self) -> int:
        return len(self.sequences) + self.spare_seqs

    @property
    def pages_per_seq(self) -> int:
        return max([math.ceil(c / self.page_size) for _, c in self.sequences], default=0) + self.spare_columns

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a decode step must read at least."""
        size = DTYPES[self.cache_dtype or self.dtype].itemsize
        return sum(c for _, c in self.sequences) * 2 * self.num_kv_heads * self.head_dim * size

    def options(self) -> dict:
        """The keyword arguments of the operators that are no arrays."""
        return {"scale": self.softmax_scale, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}

    def but(self, **changes) -> AttentionCase:
        """This case with some fields changed; the name says so."""
        text = ",".join(f"{k}={v}" for k, v in changes.items() if k != "sequences")
        return dataclasses.replace(self, **{"name": f"{self.name}[{text}]", **changes})


@dataclasses.dataclass
class AttentionInputs:
    query: np.ndarray
    kv_cache: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    query_start_loc: np.ndarray
    num_seqs: np.ndarray
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None
    sinks: np.ndarray | None = None
    tree_mask: np.ndarray | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """By the operators' argument names, absent ones left out."""
        return {k: v for k, v in vars(self).items() if v is not None}


def rng_for(name: str, seed: int = 0) -> np.random.Generator:
    """One stream of numbers per case, the same on every machine and in every order of tests."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


# The numbers of larger arrays repeat: drawing and converting each would take most of a test's time. It is a prime, so
# that no two rows, heads or pages have the same ones.
DRAWN = 1_048_573


def normal(rng: np.random.Generator, shape: tuple[int, ...], spread: float, dtype: np.dtype) -> np.ndarray:
    """Normally distributed numbers of mean 0 and standard deviation `spread`."""
    drawn = (rng.standard_normal(min(math.prod(shape), DRAWN)) * spread).astype(dtype)
    return np.resize(compare.bits(drawn), shape).view(dtype)  # as integers: NumPy copies ml_dtypes' one by one


def combine(k_pages: np.ndarray, v_pages: np.ndarray, layout: str) -> np.ndarray:
    """The cache, in the given layout, from K and V [num_pages, page_size, num_kv_heads, head_dim]."""
    both = [compare.bits(k_pages), compare.bits(v_pages)]
    if layout == "split":
        return np.stack(both).view(k_pages.dtype)
    pages, slots, heads, dim = k_pages.shape
    return np.stack(both, axis=3).reshape(pages, slots, 2 * heads, dim).view(k_pages.dtype)


def build(case: AttentionCase, seed: int = 0, poison: bool = True) -> AttentionInputs:
    """Arrays for a case. With poison: NaN in every cache slot and query row that must not be read, absurd numbers in
    every metadata entry that must not be read; without, zeros in their place."""
    rng = rng_for(case.name, seed)
    dtype, cache_dtype = DTYPES[case.dtype], DTYPES[case.cache_dtype or case.dtype]
    live = len(case.sequences)
    page_size, table_width = case.page_size, case.pages_per_seq

    # Pages in an order that shares nothing with the sequences', and a few that no sequence has.
    needed = [math.ceil(c / page_size) for _, c in case.sequences]
    num_pages = sum(needed) + 3
    free = list(rng.permutation(num_pages))
    shared = [free.pop() for _ in range(case.shared_prefix)]

    # The same numbers are drawn with and without poison, so that what is read is the same.
    junk = np.array(ABSURD_PAGES, np.int64) * poison
    block_tables = rng.choice(junk, (case.max_seqs, table_width)).astype(np.int32)
    written = np.zeros((num_pages, page_size), bool)
    for s, (_, context_len) in enumerate(case.sequences):
        pages = shared[: needed[s]] + [free.pop() for _ in range(needed[s] - len(shared))]
        block_tables[s, : needed[s]] = pages
        positions = np.arange(context_len)
        written[np.asarray(pages, int)[positions // page_size], positions % page_size] = True

    shape = (num_pages, page_size, case.num_kv_heads, case.head_dim)
    # A float8 cache holds numbers over much of its range; the scales bring them back to the size of the query's.
    stored = 40.0 if case.cache_dtype in FLOAT8S else 1.0
    k = normal(rng, shape, case.spread * stored, cache_dtype)
    v = normal(rng, shape, stored, cache_dtype)
    unread = cache_dtype.type(np.nan if poison else 0)
    k[~written], v[~written] = unread, unread

    query = normal(rng, (case.num_tokens, case.num_heads, case.head_dim), case.spread, dtype)
    if case.padding_tokens:
        query[-case.padding_tokens :] = dtype.type(np.nan if poison else 0)

    context_lens = rng.choice(np.array([2**31 - 1, -(2**31), -5], np.int64) * poison, case.max_seqs)
    context_lens[:live] = [c for _, c in case.sequences]
    query_start_loc = rng.choice(np.array([-7, 2**31 - 1], np.int64) * poison, case.max_seqs + 1)
    query_start_loc[: live + 1] = np.cumsum([0] + [q for q, _ in case.sequences])

    inputs = AttentionInputs(
        query=query,
        kv_cache=combine(k, v, case.layout),
        context_lens=context_lens.astype(np.int32),
        block_tables=block_tables,
        query_start_loc=query_start_loc.astype(np.int32),
        num_seqs=np.array([live], np.int32),
    )
    if case.scales is not None:
        count = case.num_kv_heads if case.scales == "per_head" else 1
        inputs.k_scale = (rng.uniform(0.5, 2.0, count) / stored).astype(np.float32)
        inputs.v_scale = (rng.uniform(0.5, 2.0, count) / stored).astype(np.float32)
    if case.sinks:
        inputs.sinks = rng.uniform(-2.0, 4.0, case.num_heads).astype(np.float32)
    if case.tree:
        # A row sees itself and some of the others; bits past the sequence's new tokens are set, and mean nothing.
        inputs.tree_mask = rng.integers(0, 2**32, (case.num_tokens, case.tree), np.uint32)
        for q_len, begin in zip((q for q, _ in case.sequences), query_start_loc, strict=False):
            i = np.arange(min(q_len, 32 * case.tree))
            inputs.tree_mask[begin + i, i // 32] |= np.uint32(1) << (i % 32).astype(np.uint32)
    return inputs


def _case(name: str, sequences, **fields) -> AttentionCase:
    return AttentionCase(name, tuple(sequences), **fields)


# The covering subset: every front end runs these. Small, and each for a reason that its name gives.
COMMON = (
    _case("llama3-8b-decode", [(1, 37), (1, 128), (1, 1), (1, 16)], num_heads=32, num_kv_heads=8, head_dim=128),
    _case("llama3-8b-mixed-bf16", [(1, 70), (19, 19), (1, 33), (8, 40)], num_heads=8, head_dim=128, dtype="bfloat16"),
    _case(
        "mistral-7b-window",
        [(1, 100), (20, 61), (1, 15)],
        head_dim=128,
        sliding_window=24,
        dtype="float16",
        layout="split",
    ),
    _case("gemma2-9b-soft-cap", [(1, 50), (7, 30)], num_heads=4, head_dim=256, soft_cap=50.0, sliding_window=40),
    _case("mixtral-8x7b-chunked-prefill", [(24, 24), (24, 88), (1, 90)], num_heads=8, head_dim=128, page_size=7),
    _case(
        "speculative-4-rows", [(4, 60), (4, 4), (4, 129)], num_heads=6, num_kv_heads=2, page_size=1, dtype="bfloat16"
    ),
    _case("empty-sequences-in-the-middle", [(3, 20), (0, 31), (0, 0), (1, 9), (0, 5)], page_size=3),
    _case("more-queries-than-context", [(9, 4), (1, 0), (2, 33)]),
    _case(
        "gpt-oss-sinks",
        [(1, 64), (5, 41)],
        num_heads=8,
        num_kv_heads=1,
        sinks=True,
        sliding_window=32,
        dtype="bfloat16",
    ),
    _case(
        "fp8-cache-per-head",
        [(1, 45), (6, 30)],
        cache_dtype="float8_e4m3fn",
        scales="per_head",
        dtype="bfloat16",
        head_dim=80,
    ),
    _case("tree-of-tokens", [(7, 50), (1, 20), (12, 12), (0, 3), (33, 90)], num_heads=8, tree=2, dtype="bfloat16"),
    _case("fp8-e5m2-one-scale", [(1, 45), (6, 30)], cache_dtype="float8_e5m2", scales="one", layout="split"),
)

# More real loads, and the edges of what is specified. The eager front ends run these as well.
MORE = (
    _case("phi-3-mini-head-96", [(1, 65), (12, 40)], num_heads=8, num_kv_heads=8, head_dim=96, dtype="float16"),
    _case("phi-2-head-80", [(1, 65), (12, 40)], num_heads=4, num_kv_heads=4, head_dim=80, dtype="bfloat16"),
    _case("llama3-70b-group-8", [(1, 300), (3, 17)], num_heads=16, num_kv_heads=2, head_dim=128, dtype="bfloat16"),
    _case("qwen2-7b-group-7", [(1, 99), (10, 10)], num_heads=14, num_kv_heads=2, head_dim=128, dtype="float16"),
    _case("falcon-7b-multi-query", [(1, 80), (5, 33)], num_heads=16, num_kv_heads=1, head_dim=64),
    _case("gemma-2b-head-256", [(1, 40), (9, 20)], num_heads=8, num_kv_heads=1, head_dim=256, dtype="bfloat16"),
    _case("head-192", [(1, 40), (9, 20)], num_heads=4, num_kv_heads=4, head_dim=192),
    _case("shared-system-prompt", [(1, 70), (1, 64), (5, 90)], shared_prefix=4),
    _case("long-tail-of-lengths", [(1, c) for c in (2, 3, 5, 8, 13, 21, 34, 55, 610, 1200)], num_heads=4),
    _case("one-token-one-key", [(1, 1)], num_heads=1, num_kv_heads=1, head_dim=8, page_size=1),
    _case("prefill-whole-prompt", [(200, 200)], num_heads=4, num_kv_heads=2),
    _case("prefill-behind-long-context", [(33, 700)], num_heads=4, num_kv_heads=2, dtype="bfloat16"),
    _case("no-live-sequence", [], padding_tokens=5),
    _case("only-empty-sequences", [(0, 0), (0, 12)], padding_tokens=2),
    _case("no-padding-at-all", [(1, 32), (4, 16)], spare_seqs=0, spare_columns=0, padding_tokens=0),
    _case("much-padding", [(1, 20)], spare_seqs=40, spare_columns=30, padding_tokens=100),
    _case("window-of-one", [(1, 50), (9, 30)], sliding_window=1),
    _case("window-wider-than-context", [(1, 50), (9, 30)], sliding_window=10**6),
    _case("window-larger-than-32-bits", [(1, 50)], sliding_window=2**40),
    _case("window-across-pages", [(1, 50), (9, 30)], sliding_window=17, page_size=16),
    _case("peaked-softmax", [(1, 120), (10, 60)], spread=8.0, dtype="float16"),
    _case("soft-cap-saturated", [(1, 120), (10, 60)], spread=8.0, soft_cap=5.0, dtype="bfloat16"),
    _case("negative-scale", [(1, 50), (9, 30)], scale=-0.3),
    _case("scale-zero-is-the-mean", [(1, 50), (9, 30)], scale=0.0),
    _case("speculative-group-8", [(5, 700), (8, 300), (1, 40), (6, 64), (3, 3), (8, 1)], num_heads=16, num_kv_heads=2,
          head_dim=128, dtype="bfloat16"),
    _case("speculative-group-7-window", [(4, 900), (7, 130), (2, 9)], num_heads=14, num_kv_heads=2, head_dim=64,
          page_size=7, sliding_window=100, sinks=True, dtype="float16"),
    _case("speculative-group-4-fp8", [(8, 1300), (5, 60), (0, 4), (8, 8)], num_heads=8, num_kv_heads=2, head_dim=128,
          cache_dtype="float8_e4m3fn", scales="per_head", soft_cap=20.0, dtype="bfloat16", layout="split"),
    _case("prefill-fp8-head-128", [(200, 200), (130, 1900), (1, 300), (40, 33), (3, 90)], num_heads=8, num_kv_heads=2,
          head_dim=128, cache_dtype="float8_e4m3fn", scales="per_head", dtype="bfloat16", page_size=32),
    _case("prefill-fp8-e5m2-head-128", [(70, 700), (12, 4600), (9, 9)], num_heads=6, num_kv_heads=2, head_dim=128,
          cache_dtype="float8_e5m2", scales="per_head", sinks=True, dtype="bfloat16", layout="split", page_size=8),
    _case("prefill-fp8-sinks-head-64", [(150, 300), (30, 4600), (1, 40)], num_heads=16, num_kv_heads=2, head_dim=64,
          cache_dtype="float8_e4m3fn", scales="per_head", sinks=True, dtype="bfloat16"),
    _case("prefill-fp8-window-head-128", [(300, 700), (65, 300)], num_heads=4, num_kv_heads=2, head_dim=128,
          cache_dtype="float8_e4m3fn", scales="one", sliding_window=150, soft_cap=30.0, dtype="bfloat16"),
    _case("prefill-fp8-pages-of-1", [(70, 300), (1, 500), (4, 600), (9, 9)], num_heads=8, num_kv_heads=2, head_dim=128,
          cache_dtype="float8_e4m3fn", scales="per_head", dtype="bfloat16", page_size=1),
    _case("prefill-fp8-pages-of-5-head-64", [(33, 200), (5, 400), (1, 90)], num_heads=14, num_kv_heads=2, head_dim=64,
          cache_dtype="float8_e5m2", scales="one", dtype="bfloat16", layout="split", page_size=5),
    _case("speculative-group-20-head-48", [(8, 70), (3, 600)], num_heads=20, num_kv_heads=1, head_dim=48, page_size=1,
          spare_seqs=0, padding_tokens=0, dtype="bfloat16"),
    _case("tree-one-word", [(8, 400), (32, 32), (5, 3), (1, 1)], num_heads=14, num_kv_heads=2, head_dim=128, tree=1,
          dtype="float16", page_size=7),
    _case("tree-of-64", [(64, 500), (64, 64), (3, 1000)], num_heads=4, num_kv_heads=1, head_dim=128, tree=2,
          cache_dtype="float8_e4m3fn", scales="one", sinks=True, dtype="bfloat16", layout="split"),
    _case("tree-window-soft-cap-head-256", [(20, 70), (9, 30)], num_heads=4, head_dim=256, tree=1, sliding_window=25,
          soft_cap=20.0, dtype="bfloat16"),
    _case("tree-fp8-e5m2-float32", [(20, 70), (9, 30)], tree=2, cache_dtype="float8_e5m2", scales="per_head"),
    _case("tree-fp8-head-72", [(11, 70), (9, 300)], tree=2, head_dim=72, cache_dtype="float8_e4m3fn", scales="one",
          dtype="float16"),
    _case("everything-at-once", [(1, 50), (9, 30), (2, 1)], sliding_window=20, soft_cap=10.0, sinks=True, num_heads=6,
          cache_dtype="float8_e4m3fn", scales="per_head", dtype="float16", layout="split", page_size=7),
    _case("sinks-on-rows-without-keys", [(9, 4), (1, 0)], sinks=True),
)  # fmt: skip

# Room for 32768 keys, and not all split accumulators fit CUDA's scratch. The reference takes its time.
LONGEST_FIRST = _case(
    "longest-first", [(30, 5200), (30, 9000), (9, 2000), (1, 300), (30, 5210), (30, 5300)], num_heads=16,
    num_kv_heads=1, head_dim=256, spare_columns=1500, dtype="bfloat16",
)  # fmt: skip


def grid() -> list[AttentionCase]:
    """Every value of every dimension with every dtype, instead of the full product: for each (dtype, axis, value) one
    case, in which the other axes take values drawn by the case's own generator, the same on every run."""
    axes = {
        "head_dim": (8, 24, 64, 80, 96, 112, 128, 192, 256),
        "page_size": (1, 2, 3, 7, 16, 64, 256),
        "group": (1, 2, 3, 4, 5, 7, 8, 16),
        "num_kv_heads": (1, 2, 3),
        "sliding_window": (None, 1, 5, 33),
        "soft_cap": (None, 2.5),
        "sinks": (False, True),
        "cache": (None, *FLOAT8S),
        "layout": ("combined", "split"),
    }
    loads = (((1, 23), (1, 70)), ((13, 13), (1, 40)), ((5, 66), (0, 7), (2, 9)), ((1, 1), (17, 90)))
    cases = []
    for dtype in FLOATS:
        for axis, values in axes.items():
            for value in values:
                name = f"grid-{dtype}-{axis}={value}"
                rng = rng_for(name)
                pick = {a: v[rng.integers(len(v))] for a, v in axes.items()} | {axis: value}
                cache, group = pick.pop("cache"), pick.pop("group")
                fields = dict(pick, num_heads=group * pick["num_kv_heads"], dtype=dtype, cache_dtype=cache)
                if cache is not None:
                    fields["scales"] = ("one", "per_head")[rng.integers(2)]
                cases.append(_case(name, loads[rng.integers(len(loads))], **fields))
    return cases


# ---- linear ----------------------------------------------------------------------------------------------------------

# Formats of linear's weight, by what its scales belong to.
WEIGHT_FORMATS = (
    "plain",
    "float8-tensor",
    "float8-channel",
    "float8-block",
    "int8",
    "int4",
    "int4-zero-point",
)


def linear_inputs(
    weight_format: str, rows: int, n: int, k: int, dtype: str = "bfloat16", *, bias=False, residual=0
) -> dict[str, np.ndarray]:
    """linear's operands by name: results of order 1. residual: its features, 0 for none."""
    rng = rng_for(f"linear {weight_format} {rows} {n} {k} {dtype}")
    kind = DTYPES[dtype]
    arrays = {"x": normal(rng, (rows, k), 1.0, kind)}
    spread = k**-0.5
    groups, blocks = -(-k // 128), -(-n // 128)

    def scales(*shape):
        return (spread * rng.uniform(0.5, 1.5, shape)).astype(np.float32)

    if weight_format == "plain":
        arrays["weight"] = normal(rng, (n, k), spread, kind)
    elif weight_format.startswith("float8"):
        arrays["weight"] = normal(rng, (n, k), 1.0, DTYPES["float8_e4m3fn"])
        shape = {"float8-tensor": (1,), "float8-channel": (n,), "float8-block": (blocks, groups)}[weight_format]
        arrays["weight_scale"] = scales(*shape)
    elif weight_format == "int8":
        arrays["weight"] = rng.integers(-128, 128, (n, k), dtype=np.int8)
        arrays["weight_scale"] = scales(n) / np.float32(64)
    else:
        arrays["weight"] = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        arrays["weight_scale"] = (scales(n, groups) / 4).astype(kind)
        if weight_format == "int4-zero-point":
            arrays["weight_zero_point"] = rng.integers(0, 17, (n, groups), dtype=np.uint8)
    if bias:
        arrays["bias"] = rng.standard_normal(n).astype(kind)
    if residual:
        arrays["residual"] = rng.standard_normal((rows, residual)).astype(kind)
    return arrays
