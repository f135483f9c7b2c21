"""Inputs of the operators around attention and matrix products, as inputs.py has the others', and what must hold."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from tests.common import baseline, cases, compare, grouped_cases, layer_cases, parts, reference
from tests.common.cache_cases import CacheCase
from tests.common.cases import AttentionCase
from tests.fuzz.inputs import put_specials, text


@dataclasses.dataclass(frozen=True, repr=False)
class Linear:
    weight_format: str
    rows: int
    n: int
    k: int
    dtype: str = "float32"
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    specials: bool = False

    operator = "linear"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"activation": self.activation}

    def arrays(self) -> dict[str, np.ndarray]:
        features = self.n // 2 if self.activation else self.n
        arrays = cases.linear_inputs(
            self.weight_format, self.rows, self.n, self.k, self.dtype, bias=self.bias, residual=features * self.residual
        )
        if self.specials:
            put_specials(arrays["x"], np.random.default_rng(self.n))
        return arrays

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        with np.errstate(invalid="ignore"):  # specials stay in their rows; the largest numbers overflow there
            finite = (np.abs(arrays["x"].astype(np.float32)) < 100).all(-1)
        arrays = {n: a[finite] if n in ("x", "residual") else a for n, a in arrays.items()}
        (want,), base = reference.linear(**arrays, **self.options()), baseline.linear(**arrays, **self.options())
        # Of few results the worst is chance: each of up to four roundings may go either way.
        floor = 2 * float(ml_dtypes.finfo(arrays["x"].dtype).eps) * np.abs(want).max(initial=1)
        compare.assert_close(got[0][finite], want, base, name, floor=floor)


@dataclasses.dataclass(frozen=True, repr=False)
class GroupedLinear:
    weight_format: str
    sizes: tuple[int, ...]  # of groups; any number
    rows: int
    n: int
    k: int
    dtype: str = "bfloat16"
    bias: bool = False
    specials: bool = False

    operator = "grouped_linear"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = grouped_cases.inputs(
            self.weight_format, self.sizes, self.n, self.k, self.dtype, bias=self.bias, rows=self.rows
        )
        if self.specials:
            put_specials(arrays["x"], np.random.default_rng(self.n))
        return arrays

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        with np.errstate(invalid="ignore"):  # as above
            finite = (np.abs(arrays["x"].astype(np.float32)) < 100).all(-1)
        arrays = {**arrays, "x": np.where(finite[:, None], arrays["x"], np.zeros_like(arrays["x"]))}
        want, base = grouped_cases.expected(arrays)[finite], grouped_cases.rounded(arrays)[finite]
        floor = 2 * float(ml_dtypes.finfo(arrays["x"].dtype).eps) * np.abs(want).max(initial=1)
        compare.assert_close(got[0][finite], want, base, name, floor=floor)
        used = min(sum(max(size, 0) for size in self.sizes), self.rows)
        compare.assert_bitwise_equal(got[0][used:], np.zeros_like(got[0][used:]), f"{name}: rows of no group")


@dataclasses.dataclass(frozen=True, repr=False)
class GatedMlp:
    weight_format: str
    rows: int
    hidden: int
    intermediate: int
    dtype: str = "float32"
    norm: bool = True
    residual: bool = True
    bias: bool = False
    activation: str = "silu_and_mul"

    operator = "gated_mlp"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"activation": self.activation, "eps": 1e-5}

    def arrays(self) -> dict[str, np.ndarray]:
        given = {"norm": self.norm, "residual": self.residual, "bias": self.bias}
        return layer_cases.gated_mlp(self.weight_format, self.rows, self.hidden, self.intermediate, self.dtype, **given)

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        (want,) = reference.gated_mlp(**arrays, **self.options())
        # An element of the hidden layer may be rounded to the other side, and moves each result by so much of its size.
        assert got[0].dtype == arrays["x"].dtype
        allowed = 4 * float(ml_dtypes.finfo(arrays["x"].dtype).eps) * np.abs(want).max(initial=1) + 1e-5
        error = np.abs(got[0].astype(np.float64) - want).max(initial=0)
        assert error <= allowed, f"{name}: {error} is more than {allowed}"


@dataclasses.dataclass(frozen=True, repr=False)
class AttentionBlock:
    case: AttentionCase
    weight_format: str
    hidden: int
    norm: bool = True
    residual: bool = True
    bias: bool = False
    head_norms: bool = False
    interleaved: bool = False
    products: tuple[str, ...] = ("qkv", "out")

    operator = "attention_block"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        none = {f"{name}_weight": None for name in ("qkv", "out") if name not in self.products}
        return {**self.case.options(), "eps": 1e-5, "interleaved": self.interleaved, **none}

    def arrays(self) -> dict[str, np.ndarray]:
        given = {n: getattr(self, n) for n in ("norm", "residual", "bias", "head_norms", "products")}
        return layer_cases.attention_block(self.case, self.weight_format, self.hidden, **given)[0]

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        with np.errstate(invalid="ignore"):
            want, _ = reference.attention_block(**arrays, **self.options())
        parts, before = (
            [x.reshape(-1, *x.shape[2:]) for x in reference.split_cache(y)] for y in (got[1], arrays["kv_cache"])
        )
        others = np.ones(len(parts[0]), bool)
        others[arrays["slot_mapping"]] = False
        for part, was in zip(parts, before, strict=True):
            compare.assert_bitwise_equal(part[others], was[others], f"{name}: slots that are not named")
        # Each of the parts may round to the other side. tests/ops compares their bits one by one.
        eps = float(ml_dtypes.finfo(arrays["x"].dtype).eps)
        eps = max(eps, float(ml_dtypes.finfo(arrays["kv_cache"].dtype).eps) / 4)
        allowed = 8 * eps * np.abs(want).max(initial=1) + 1e-4
        error = np.abs(got[0].astype(np.float64) - want).max(initial=0)
        assert error <= allowed, f"{name}: {error} is more than {allowed}"


@dataclasses.dataclass(frozen=True, repr=False)
class RmsNorm:
    shape: tuple[int, ...]
    dtype: str = "float32"
    with_residual: bool = False
    weight_offset: float = 0.0
    round_once: bool = False
    specials: bool = False
    seed: int = 0

    operator = "rms_norm"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"eps": 1e-5, "weight_offset": self.weight_offset, "round_once": self.round_once}

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = layer_cases.rms_norm(self.dtype, self.shape, self.with_residual, self.seed)
        if self.specials:
            put_specials(arrays["x"], np.random.default_rng(self.seed))
        return arrays

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        with np.errstate(all="ignore"):
            want = reference.rms_norm(**arrays, **self.options())
        row = (want[1] if self.with_residual else arrays["x"]).astype(np.float32)
        finite = np.isfinite(row).all(-1)  # the others hold nothing but NaN and zeros
        if self.with_residual:
            compare.assert_bitwise_equal(got[1][finite], want[1][finite], f"{name}: sum")
        # The float64 reference does not overflow where a float32 sum of squares does.
        with np.errstate(over="ignore"):
            small = (row**2).sum(-1) < 1e38
        rows = finite & small
        compare.assert_norm(got[0][rows], want[0][rows], name)


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce:
    """Over gathered parts; tests/distributed/ generates calls over devices."""

    ranks: int
    rows: int
    hidden: int
    dtype: str = "float32"
    norm: bool = False
    specials: bool = False
    seed: int = 0

    @property
    def operator(self) -> str:
        return "all_reduce_add_rms_norm" if self.norm else "all_reduce"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"eps": 1e-5} if self.norm else {}

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = parts.norm_arrays(self.ranks, self.rows, self.hidden, self.dtype, self.seed)
        if self.specials:
            put_specials(arrays["x"], np.random.default_rng(self.seed))
        return arrays if self.norm else {"x": arrays["x"]}

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        with np.errstate(all="ignore"):
            want = getattr(reference, self.operator)(*arrays.values(), **self.options())
        if not self.norm:
            compare.assert_same_special(got[0], want, name)
            finite = np.isfinite(want.astype(np.float32))
            compare.assert_bitwise_equal(got[0][finite], want[finite], name)
            return
        finite = np.isfinite(want[1].astype(np.float32)).all(-1)  # the others hold nothing but NaN and zeros
        compare.assert_bitwise_equal(got[1][finite], want[1][finite], f"{name}: sum")
        with np.errstate(over="ignore"):
            rows = finite & ((want[1].astype(np.float32) ** 2).sum(-1) < 1e38)
        compare.assert_norm(got[0][rows], want[0][rows], name)


@dataclasses.dataclass(frozen=True, repr=False)
class Gated:
    operator: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    seed: int = 0

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        return layer_cases.gated(self.dtype, self.shape, self.seed)

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        compare.assert_norm(got[0], getattr(reference, self.operator)(**arrays)[0], name, floor=1e-5)


@dataclasses.dataclass(frozen=True, repr=False)
class Sample:
    rows: int
    vocab: int
    dtype: str = "float32"
    spread: float = 1.0  # of the logits, beside those of a language model
    coarse: bool = False  # few values: many equal logits
    hidden: float = 0.0  # how many logits are -inf
    seed: int = 0

    operator = "sample"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = layer_cases.sampling(self.dtype, self.rows, self.vocab, self.seed)
        rng = np.random.default_rng(self.seed)
        logits = arrays["logits"].astype(np.float32) * self.spread
        logits = np.round(logits) if self.coarse else logits
        logits[rng.random(logits.shape) < self.hidden] = -np.inf
        arrays["logits"] = logits.astype(arrays["logits"].dtype)
        arrays["temperature"] *= rng.choice([0.1, 1, 30], self.rows).astype(np.float32)
        arrays["top_k"] = rng.integers(-1, self.vocab + 2, self.rows).astype(np.int32)
        return arrays

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        with np.errstate(all="ignore"):
            alive = (arrays["logits"].astype(np.float32) > -np.inf).any(-1)
            assert (got[0][~alive] == -1).all() and np.isnan(got[1][~alive]).all()
            rows = {n: x[alive] for n, x in arrays.items()}
            layer_cases.assert_sampled(rows, got[0][alive], got[1][alive], name)


@dataclasses.dataclass(frozen=True, repr=False)
class RotaryEmbedding:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: str = "float32"
    interleaved: bool = False
    seed: int = 0

    operator = "rotary_embedding"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"interleaved": self.interleaved}

    def arrays(self) -> dict[str, np.ndarray]:
        sizes = self.num_tokens, self.num_heads, self.num_kv_heads, self.head_dim, min(self.rotary_dim, self.head_dim)
        return layer_cases.rotary(self.dtype, *sizes, seed=self.seed)

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        for g, w in zip(got, reference.rotary_embedding(**arrays, **self.options()), strict=True):
            compare.assert_norm(g, w, name, floor=1e-6)


@dataclasses.dataclass(frozen=True, repr=False)
class RotaryAndCache:
    case: CacheCase
    num_heads: int = 1
    rotary_dim: int = 0
    norms: bool = False
    bias: bool = False
    interleaved: bool = False
    duplicates: int = 0
    seed: int = 0

    operator = "rotary_and_cache"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"interleaved": self.interleaved, "norm_eps": 1e-5}

    def arrays(self) -> dict[str, np.ndarray]:
        given = {"norms": self.norms, "bias": self.bias, "rotary_dim": min(self.rotary_dim, self.case.head_dim)}
        arrays = layer_cases.rotary_and_cache(self.case, self.num_heads, **given, seed=self.seed)
        rng = np.random.default_rng(self.seed)
        slots = arrays["slot_mapping"]
        for _ in range(self.duplicates if slots.size else 0):
            slots[rng.integers(slots.size)] = slots[rng.integers(slots.size)]
        return arrays

    def check(self, name: str, arrays: dict[str, np.ndarray], got: tuple[np.ndarray, ...]) -> None:
        layer_cases.assert_rotated(arrays, self.options(), got, name)
