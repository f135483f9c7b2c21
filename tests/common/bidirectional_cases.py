"""bidirectional_attention: inputs with poison where nothing may be read, the float64 reference, and the same with
roundings."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from tests.common import cases

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    scale: float | None = None  # None: head_dim ** -0.5
    sliding_window: int | None = None
    soft_cap: float | None = None
    spread: float = 1.0
    spare_seqs: int = 2
    padding: tuple[int, int] = (2, 3)  # rows before the first sequence, and behind the last

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) + sum(self.padding)

    def options(self) -> dict:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}

    def but(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)


CASES = (
    Case("bert-base-bf16", (37, 5, 128, 1), num_heads=12, num_kv_heads=12, head_dim=64, dtype="bfloat16"),
    Case("modernbert-local-f16", (200, 64, 65), num_heads=6, num_kv_heads=6, head_dim=64, dtype="float16",
         sliding_window=65),
    Case("grouped-queries-and-empty-sequences", (3, 0, 20, 0, 0, 1, 33)),
    Case("soft-cap-head-256", (40, 3), num_kv_heads=1, head_dim=256, soft_cap=20.0, spread=3.0),
    Case("window-of-one", (9, 1, 30), sliding_window=1),
    Case("window-of-two", (9, 1, 30), sliding_window=2, dtype="bfloat16"),
    Case("no-live-sequence", (), padding=(0, 5)),
    Case("no-padding", (16, 32), spare_seqs=0, padding=(0, 0)),
    Case("no-tokens", (0, 0), padding=(0, 0)),
    Case("no-room-for-a-sequence", (), spare_seqs=0, padding=(0, 4)),
)  # fmt: skip

MORE = (
    Case("many-sequences", tuple(1 + i % 40 for i in range(150))),
    Case("much-room", (20,), spare_seqs=300, padding=(0, 100)),
    Case("one-long", (1500,), num_heads=2, num_kv_heads=1, dtype="bfloat16"),
    Case("one-long-window", (1500,), num_heads=2, num_kv_heads=1, sliding_window=100),
    Case("window-wider-than-all", (50, 9), sliding_window=10**6),
    Case("window-larger-than-32-bits", (50,), sliding_window=2**40),
    Case("page-sizes-exactly", (16, 17, 15, 32, 31, 33, 64)),
    Case("peaked-softmax", (120, 60), spread=8.0, dtype="float16"),
    Case("negative-scale", (50, 30), scale=-0.3),
    Case("scale-zero-is-the-mean", (50, 30), scale=0.0),
)


def build(case: Case, seed: int = 0) -> Arrays:
    """Operands by name. NaN in padding rows, absurd numbers in what query_start_loc has past num_seqs."""
    rng = cases.rng_for(case.name, seed)
    dtype = cases.DTYPES[case.dtype]
    sizes = {"query": case.num_heads, "key": case.num_kv_heads, "value": case.num_kv_heads}
    arrays = {}
    for name, heads in sizes.items():
        spread = 1.0 if name == "value" else case.spread
        arrays[name] = cases.normal(rng, (case.num_tokens, heads, case.head_dim), spread, dtype)
        arrays[name][: case.padding[0]] = np.nan
        arrays[name][case.num_tokens - case.padding[1] :] = np.nan
    starts = rng.choice([-7, 2**31 - 1, -(2**31)], len(case.lengths) + case.spare_seqs + 1)
    starts[: len(case.lengths) + 1] = case.padding[0] + np.cumsum([0, *case.lengths])
    arrays["query_start_loc"] = starts.astype(np.int32)
    arrays["num_seqs"] = np.array([len(case.lengths)], np.int32)
    return arrays


def expected(arrays: Arrays, **options) -> np.ndarray:
    """float64[num_tokens, num_heads, head_dim]."""
    return _by_sequence(arrays, np.dtype(np.float64), **options)


def rounded(arrays: Arrays, **options) -> np.ndarray:
    """T[num_tokens, num_heads, head_dim], each step rounded to T as plain PyTorch's are."""
    return _by_sequence(arrays, arrays["query"].dtype, **options)


def _by_sequence(arrays: Arrays, dtype, *, scale, sliding_window=None, soft_cap=None) -> np.ndarray:
    wide = np.float64 if dtype == np.float64 else np.float32
    query, key, value = (arrays[name].astype(wide) for name in ("query", "key", "value"))

    def step(x):
        return x.astype(dtype).astype(wide)

    out = np.zeros(query.shape, dtype)
    starts = arrays["query_start_loc"]
    for first, last in itertools.pairwise(starts[: arrays["num_seqs"][0] + 1]):
        if first == last:
            continue
        group = query.shape[1] // key.shape[1]
        q, k, v = (x[first:last].transpose(1, 0, 2) for x in (query, key, value))
        k, v = k.repeat(group, 0), v.repeat(group, 0)
        scores = step(step(q @ k.transpose(0, 2, 1)) * wide(scale))
        if soft_cap is not None:
            scores = step(step(np.tanh(step(scores / wide(soft_cap)))) * wide(soft_cap))
        if sliding_window is not None:
            position = np.arange(last - first)
            scores = np.where(np.abs(position[:, None] - position) < sliding_window, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        rows = step(weights / weights.sum(-1, keepdims=True)) @ v
        out[first:last] = rows.transpose(1, 0, 2).astype(dtype)
    return out
