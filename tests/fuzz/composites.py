"""Inputs of bidirectional_attention and of operators that are made of others, as inputs.py has those of the rest, and
what must hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import ml_dtypes
import numpy as np

from tests.common import bidirectional_cases, cases, compare, experts_cases
from tests.common.frontends import Frontend
from tests.fuzz.inputs import put_specials, text
from tests.fuzz.latents import HostileLatents

Arrays = dict[str, np.ndarray]


# ---- bidirectional_attention -----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, repr=False)
class Bidirectional:
    """One program, and the lengths of several batches that fit into it."""

    program: bidirectional_cases.Case  # its `lengths` are empty
    batches: tuple[tuple[int, ...], ...]
    seed: int = 0

    operator = "bidirectional_attention"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return self.program.options()

    def built(self) -> list[Arrays]:
        """Every batch, padded to the shapes that all of them share."""
        program = self.program
        tokens, live = max(sum(batch) for batch in self.batches), max(len(batch) for batch in self.batches)
        before, behind = program.padding
        made = []
        for batch in self.batches:
            case = program.but(
                lengths=batch,
                spare_seqs=program.spare_seqs + live - len(batch),
                padding=(before, behind + tokens - sum(batch)),
            )
            made.append(bidirectional_cases.build(case, self.seed))
        return made

    def check(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        (out,) = got
        want = bidirectional_cases.expected(arrays, **self.options())
        base = bidirectional_cases.rounded(arrays, **self.options())
        # By one rounding of the largest logit all weights of its row are off. On CUDA weights round to T, too.
        units = 2 * float(ml_dtypes.finfo(out.dtype).eps) + largest_logit(arrays, self.options()["scale"]) * 2.0**-23
        compare.assert_close(out, want, base, name, floor=1e-5 + units * np.abs(want).max(initial=0))
        is_padding = np.ones(len(out), bool)
        is_padding[arrays["query_start_loc"][0] : arrays["query_start_loc"][arrays["num_seqs"][0]]] = False
        if not arrays["num_seqs"][0]:
            is_padding[:] = True
        padding = out[is_padding]
        compare.assert_bitwise_equal(padding, np.zeros_like(padding), f"{name}: padding rows")


def largest_logit(arrays: Arrays, scale: float) -> float:
    """Of the scores before a soft cap, by the rows of each sequence."""
    largest = 0.0
    query, key = (arrays[name].astype(np.float32).transpose(1, 0, 2) for name in ("query", "key"))
    key = key.repeat(len(query) // len(key), 0).transpose(0, 2, 1)
    for first, last in itertools.pairwise(arrays["query_start_loc"][: arrays["num_seqs"][0] + 1]):
        scores = query[:, first:last] @ key[:, :, first:last]
        largest = max(largest, float(np.abs(scores).max(initial=0)))
    return largest * abs(scale)


@dataclasses.dataclass(frozen=True, repr=False)
class HostileBidirectional:
    """A sound batch, and numbers written over entries of its metadata: (argument, index modulo its size, number)."""

    attention: Bidirectional
    damage: tuple[tuple[str, int, int], ...]

    operator = "bidirectional_attention"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return self.attention.options()

    def arrays(self) -> Arrays:
        arrays = self.attention.built()[0]
        for name in ("query", "key", "value"):  # wrong numbers may be sound, and name rows of padding
            arrays[name] = compare.without_nan(arrays[name], 1)
        for argument, index, number in self.damage:
            arrays[argument][index % arrays[argument].size] = number
        return arrays

    def error(self, arrays: Arrays) -> str | None:
        """What the host's error must name; None where nothing is wrong."""
        starts, live = arrays["query_start_loc"].tolist(), int(arrays["num_seqs"][0])
        num_tokens = len(arrays["query"])
        inner = "bidirectional_attention: "
        if not 0 <= live < len(starts):
            return f"{inner}num_seqs: expected"
        if live and not 0 <= starts[0] <= num_tokens:
            return rf"{inner}query_start_loc\[0\] \(sequence 0\): expected"
        for s, (first, last) in enumerate(itertools.pairwise(starts[: live + 1])):
            if not first <= last <= num_tokens:
                return rf"{inner}query_start_loc\[{s + 1}\] \(sequence {s}\): expected"
        return None

    def check_others(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        """What holds where no error is raised."""
        if self.error(arrays):
            assert np.isnan(got[0].astype(np.float32)).all(), f"{name}: a row that is not NaN, of wrong metadata"
        else:
            self.attention.check(name, arrays, got)


# ---- experts_mlp -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, repr=False)
class ExpertsMlp:
    weight_format: str
    rows: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: str = "bfloat16"
    weights: str = "float32"  # the dtype of topk_weights: that, or x's
    ids: str = "int32"
    bias: bool = False
    activation: str = "silu_and_mul"
    elsewhere: float = 0.0  # how many of the ids are no expert's
    specials: bool = False  # in x: NaN, infinities, the largest and smallest numbers
    infinities: bool = False  # in topk_weights, and in biases: experts' results that are infinite; zeros that meet them
    seed: int = 0

    operator = "experts_mlp"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {"activation": self.activation}

    def arrays(self) -> Arrays:
        sizes = self.rows, self.num_experts, min(self.top_k, self.num_experts), self.hidden, self.intermediate
        arrays = experts_cases.inputs(self.weight_format, *sizes, self.dtype, bias=self.bias)
        rng = cases.rng_for("fuzz-experts", self.seed)
        shape = (self.rows, self.top_k)
        # An expert may be chosen twice.
        ids = rng.integers(0, self.num_experts, shape)
        none = np.array([-(2**31), -1, self.num_experts, 2**31 - 1] + [-(2**63), 2**63 - 1] * (self.ids == "int64"))
        ids = np.where(rng.random(shape) < self.elsewhere, rng.choice(none, shape), ids)
        arrays["topk_ids"] = ids.astype(self.ids)
        weights = rng.random(shape) + 0.1
        if self.infinities:
            weights = np.where(rng.random(shape) < 0.2, rng.choice([np.inf, -np.inf, np.nan, 0.0, 1.0], shape), weights)
            if self.bias:
                bias = arrays["down_bias"]
                places = rng.random(bias.shape) < 0.1
                arrays["down_bias"] = np.where(places, rng.choice([np.inf, -np.inf, np.nan], bias.shape), bias).astype(
                    bias.dtype
                )
        arrays["topk_weights"] = weights.astype(cases.DTYPES[self.weights])
        if self.specials:
            put_specials(arrays["x"], rng)
        return arrays

    def check(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        (out,) = got
        assert out.dtype == arrays["x"].dtype
        with np.errstate(invalid="ignore"):  # as of Linear
            finite = (np.abs(arrays["x"].astype(np.float32)) < 100).all(-1)
        arrays = {n: a[finite] if n in ("x", "topk_weights", "topk_ids") else a for n, a in arrays.items()}
        with np.errstate(all="ignore"):
            want = experts_cases.expected(arrays, self.activation)
            base = experts_cases.rounded(arrays, self.activation)
        unknown = self.of_unknown_sign(arrays)
        parts = [np.where(unknown, x.dtype.type(0), x) for x in (out[finite], want, base)]
        # An element of the hidden layer may be rounded to the other side, and so may each expert's result.
        size = np.abs(want[np.isfinite(want)]).max(initial=1)
        floor = 4 * float(ml_dtypes.finfo(out.dtype).eps) * size
        compare.assert_close(*parts, name, floor=floor)

    def of_unknown_sign(self, arrays: Arrays) -> np.ndarray:
        """bool[rows, out_features]: an infinite weight multiplies what is nearly 0, on either side of it."""
        shape = len(arrays["x"]), arrays["down_weight"].shape[1]
        unknown = np.zeros(shape, bool)
        for j in range(self.top_k * self.infinities):
            column = {name: arrays[name][:, j : j + 1] for name in ("topk_weights", "topk_ids")}
            infinite = np.isinf(column["topk_weights"].astype(np.float32))
            column["topk_weights"] = np.ones_like(infinite, np.float32)
            with np.errstate(all="ignore"):
                value = experts_cases.expected({**arrays, **column}, self.activation)
            unknown |= infinite & (np.abs(value) < 0.05 * np.abs(value[np.isfinite(value)]).max(initial=1))
        return unknown


@dataclasses.dataclass(frozen=True, repr=False)
class HostileExperts:
    """Sound operands, and zero points past 127: (argument, index modulo its size, number)."""

    experts: ExpertsMlp
    damage: tuple[tuple[str, int, int], ...]

    operator = "experts_mlp"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return self.experts.options()

    def arrays(self) -> Arrays:
        arrays = self.experts.arrays()
        for argument, index, number in self.damage:
            flat = arrays[argument].reshape(-1)
            flat[index % flat.size] = number
        return arrays

    def error(self, arrays: Arrays) -> str | None:
        """As of HostileBidirectional: the first number that is wrong, in the first product that has one."""
        if not arrays["topk_ids"].size:  # nothing is multiplied
            return None
        for prefix in ("gate_up", "down"):
            points = arrays[f"{prefix}_zero_point"]
            if (points > 127).any():
                at = tuple(np.argwhere(points > 127)[0].tolist())
                place = ", ".join(map(str, at))
                return (
                    "grouped_linear: weight_zero_point: expected values of 0 to 127, got "
                    rf"{int(points[at])} at \[{place}\]"
                )
        return None

    def check_others(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        """What holds where no error is raised: features that use a wrong zero point are NaN, and what is made of them.
        Weights of experts that no row has are not read."""
        if not self.error(arrays):
            self.experts.check(name, arrays, got)
            return
        out = got[0].astype(np.float64)
        wrong = {prefix: arrays[f"{prefix}_zero_point"] > 127 for prefix in ("gate_up", "down")}
        arrays = {
            n: np.where(a > 127, 8, a).astype(a.dtype) if n.endswith("zero_point") else a for n, a in arrays.items()
        }
        nan = np.zeros(out.shape, bool)
        for row, ids in enumerate(arrays["topk_ids"].tolist()):
            for expert in ids:
                if 0 <= expert < self.experts.num_experts:
                    nan[row] |= wrong["down"][expert].any(-1) | wrong["gate_up"][expert].any()
        assert np.isnan(out[nan]).all(), f"{name}: a number made of a wrong zero point"
        want = experts_cases.expected(arrays, self.experts.activation)
        sound = ~nan
        size = np.abs(want).max(initial=1)
        error = np.abs(np.where(sound, out - want, 0)).max(initial=0)
        assert error <= 0.1 * size, f"{name}: {error} where no zero point is wrong"


# ---- Wrong values ----------------------------------------------------------------------------------------------------
Wrong = HostileBidirectional | HostileExperts
ERRORS = (ValueError, RuntimeError)


def check_wrong(x: Wrong | HostileLatents, frontend: Frontend) -> None:
    """The host's error names what is wrong first; on CUDA nothing is raised, and NaN says where it matters."""
    arrays = x.arrays()
    pattern = x.error(arrays)
    if frontend.platform == "host" and pattern is not None:
        try:
            frontend.call(x.operator, arrays, **x.options())
        except ERRORS as e:
            assert re.search(pattern, str(e)), f"{frontend.name}: {pattern!r} not in {e}"
            return
        # XLA runs no call whose results have no elements.
        if math.prod(arrays["query" if "query" in arrays else "x"].shape) == 0:
            return
        raise AssertionError(f"{frontend.name}: no error, where one must name {pattern!r}")
    x.check_others(frontend.name, arrays, frontend.call(x.operator, arrays, **x.options()))
