"""What the fuzzer draws, as plain data: a failing input prints as a Python expression, which regressions.py keeps.

One attention input is one program (shapes, dtypes, attributes) and several batches that fit into it, so that front
ends that compile run each compiled program many times."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tests.common import cache_cases, cases, reference
from tests.common.cache_cases import CacheCase
from tests.common.cases import AttentionCase, AttentionInputs

Batch = tuple[tuple[int, int], ...]  # (query tokens, context length) of every sequence


def text(x) -> str:
    """A dataclass as an expression, fields at their defaults left out."""
    if not dataclasses.is_dataclass(x):
        return repr(x)
    fields = [
        f"{f.name}={text(getattr(x, f.name))}"
        for f in dataclasses.fields(x)
        if f.default is dataclasses.MISSING or getattr(x, f.name) != f.default
    ]
    return f"{type(x).__name__}({', '.join(fields)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Attention:
    program: AttentionCase  # its `sequences` are empty
    batches: tuple[Batch, ...]
    seed: int = 0
    with_lse: bool = True

    def __repr__(self) -> str:
        return text(self)

    def built(self) -> list[tuple[AttentionCase, AttentionInputs]]:
        """Every batch, padded to the shapes that all of them share."""
        program = self.program
        tokens = max(sum(q for q, _ in batch) for batch in self.batches)
        live = max(len(batch) for batch in self.batches)
        columns = max(_columns(program, batch) for batch in self.batches)
        made = []
        for batch in self.batches:
            case = dataclasses.replace(
                program,
                sequences=batch,
                padding_tokens=program.padding_tokens + tokens - sum(q for q, _ in batch),
                spare_seqs=program.spare_seqs + live - len(batch),
                spare_columns=program.spare_columns + columns - _columns(program, batch),
            )
            made.append((case, cases.build(case, self.seed)))
        pages = max(reference.split_cache(inputs.kv_cache)[0].shape[0] for _, inputs in made)
        for case, inputs in made:
            inputs.kv_cache = _with_pages(inputs.kv_cache, pages, case.layout)
        return made


def _columns(case: AttentionCase, batch: Batch) -> int:
    return max([math.ceil(context / case.page_size) for _, context in batch], default=0)


def _with_pages(kv_cache: np.ndarray, pages: int, layout: str) -> np.ndarray:
    """The cache with pages of NaN behind it."""
    axis = 1 if layout == "split" else 0
    shape = list(kv_cache.shape)
    shape[axis] = pages - shape[axis]
    return np.concatenate([kv_cache, np.full(shape, np.nan).astype(kv_cache.dtype)], axis=axis)


@dataclasses.dataclass(frozen=True, repr=False)
class Update:
    """reshape_and_cache, with `duplicates` slots that name a slot of an earlier token, and special values."""

    case: CacheCase
    seed: int = 0
    duplicates: int = 0
    specials: bool = False  # NaN, infinities, the largest and smallest numbers among key and value

    def __repr__(self) -> str:
        return text(self)

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = cache_cases.build_cache(self.case, self.seed)
        rng = cases.rng_for("fuzz-update", self.seed)
        slots = arrays["slot_mapping"]
        for _ in range(self.duplicates if slots.size else 0):
            slots[rng.integers(slots.size)] = slots[rng.integers(slots.size)]
        if self.specials:
            for name in ("key", "value"):
                put_specials(arrays[name], rng)
        return arrays


@dataclasses.dataclass(frozen=True, repr=False)
class Merge:
    """merge_attention_states: states of which some have seen nothing, and then may hold anything."""

    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: str = "float32"
    spread: float = 10.0  # of the log-sum-exps
    empty: float = 0.1  # how many of the rows have seen nothing
    seed: int = 0

    def __repr__(self) -> str:
        return text(self)

    def arrays(self) -> dict[str, np.ndarray]:
        rng = cases.rng_for("fuzz-merge", self.seed)
        arrays = {}
        for side in "ab":
            out = rng.standard_normal((self.num_tokens, self.num_heads, self.head_dim)).astype(cases.DTYPES[self.dtype])
            lse = (rng.standard_normal((self.num_tokens, self.num_heads)) * self.spread).astype(np.float32)
            nothing = rng.random(lse.shape) < self.empty
            lse[nothing], out[nothing] = -np.inf, np.nan
            arrays[f"out_{side}"], arrays[f"lse_{side}"] = out, lse
        return arrays


@dataclasses.dataclass(frozen=True, repr=False)
class Add:
    shape: tuple[int, ...]
    dtype: str = "float32"
    seed: int = 0

    def __repr__(self) -> str:
        return text(self)

    def arrays(self) -> dict[str, np.ndarray]:
        rng = cases.rng_for("fuzz-add", self.seed)
        arrays = {}
        for name in "ab":
            x = (rng.standard_normal(self.shape) * 10.0 ** rng.integers(-6, 5)).astype(cases.DTYPES[self.dtype])
            put_specials(x, rng)
            arrays[name] = x
        return arrays


def put_specials(x: np.ndarray, rng: np.random.Generator) -> None:
    """Some of x becomes NaN, an infinity, a zero, the largest or the smallest number of its type."""
    import ml_dtypes

    info = ml_dtypes.finfo(x.dtype)
    values = np.array(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, info.max, info.min, info.smallest_normal, info.smallest_subnormal],
        np.float64,
    ).astype(x.dtype)
    flat = x.reshape(-1)
    places = rng.integers(flat.size, size=flat.size // 8 + 1) if flat.size else np.zeros(0, int)
    flat[places] = rng.choice(values, places.size)


# ---- Wrong numbers in the metadata -----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, repr=False)
class Hostile:
    """A sound batch, and numbers written over entries of its metadata: (argument, index modulo its size, number)."""

    attention: Attention
    damage: tuple[tuple[str, int, int], ...]

    def __repr__(self) -> str:
        return text(self)

    def built(self) -> tuple[AttentionCase, AttentionInputs]:
        case, inputs = self.attention.built()[0]
        for argument, index, number in self.damage:
            array = getattr(inputs, argument).reshape(-1)
            if array.size:
                array[index % array.size] = number
        return case, inputs
