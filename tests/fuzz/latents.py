"""Inputs of mla_attention and concat_and_cache_mla, as inputs.py has those of the operators over other caches, and what
must hold."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.common import cases, compare, mla_cases
from tests.common.cases import AttentionInputs
from tests.fuzz import hostile
from tests.fuzz.inputs import Attention, Batch, Hostile, put_specials, text

Arrays = dict[str, np.ndarray]


def arrays_of(inputs: AttentionInputs) -> Arrays:
    """Of a cache in vLLM's layout with one head, its keys."""
    return inputs.arrays() | {"kv_cache": np.ascontiguousarray(inputs.kv_cache[0, :, :, 0])}


@dataclasses.dataclass(frozen=True, repr=False)
class Latents:
    """mla_attention: one program, and several batches that fit into it."""

    program: mla_cases.Case  # its `sequences` are empty
    batches: tuple[Batch, ...]
    seed: int = 0
    with_lse: bool = True

    def __repr__(self) -> str:
        return text(self)

    @property
    def operator(self) -> str:
        return "mla_attention_with_lse" if self.with_lse else "mla_attention"

    def options(self) -> dict:
        return self.program.options()

    def paged(self) -> Attention:
        return Attention(self.program.of_paged_attention(), self.batches, self.seed)

    def built(self) -> list[Arrays]:
        """Every batch, padded to the shapes that all of them share."""
        return [arrays_of(inputs) for _, inputs in self.paged().built()]

    def check(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        want = mla_cases.expected(arrays, **self.options())
        base = mla_cases.rounded(arrays, **self.options())
        eps = {x.dtype: float(np.finfo(x.dtype).eps) if x.dtype != cases.DTYPES["bfloat16"] else 2.0**-7 for x in got}
        # As in checks.py: one rounding of the result, and one of the largest logit, by which a row's weights are off.
        logits = np.abs(want[1][np.isfinite(want[1])]).max(initial=0) * 2.0**-23
        for part, g, w, y in zip(("out", "lse"), got, want, base, strict=False):
            units = eps[g.dtype] + (logits if part == "out" else 0)
            size = np.abs(w[np.isfinite(w)]).max(initial=0)
            compare.assert_close(g, w, y, f"{name}: {part}", floor=1e-5 + units * size)
        live = int(arrays["num_seqs"][0])
        padding = got[0][arrays["query_start_loc"][live] :]
        compare.assert_bitwise_equal(padding, np.zeros_like(padding), f"{name}: padding rows")


@dataclasses.dataclass(frozen=True, repr=False)
class HostileLatents:
    """A sound batch, and numbers written over entries of its metadata: (argument, index modulo its size, number)."""

    attention: Latents
    damage: tuple[tuple[str, int, int], ...]

    operator = "mla_attention_with_lse"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return self.attention.options()

    def _inputs(self) -> AttentionInputs:
        """Of paged_attention, with keys for values."""
        _, inputs = Hostile(self.attention.paged(), self.damage).built()
        inputs.kv_cache[1] = inputs.kv_cache[0]
        return inputs

    def arrays(self) -> Arrays:
        return arrays_of(self._inputs())

    def error(self, arrays: Arrays) -> str | None:
        """What the host's error must name; None where nothing is wrong."""
        pattern = hostile.error_pattern(self._inputs())
        return pattern and f"{self.operator}: {pattern}"

    def check_others(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        """What holds where no error is raised: on CUDA the rows that paged_attention makes NaN are NaN."""
        inputs = self._inputs()
        rows = hostile.expected_rows(self.attention.program.of_paged_attention(), inputs)
        if self.error(arrays) is None:
            rows.free[:] = False
        tolerance = hostile.TOLERANCES[self.attention.program.dtype]
        size = max(1.0, float(np.nanmax(np.abs(arrays["kv_cache"].astype(np.float32)), initial=0.0)))
        value_dim = self.attention.program.value_dim
        hostile.assert_rows(name, got[0], rows.out[..., :value_dim], rows.free, tolerance * size, "out")
        hostile.assert_rows(name, got[1], rows.lse, rows.free, tolerance * 4, "lse")


@dataclasses.dataclass(frozen=True, repr=False)
class LatentUpdate:
    """concat_and_cache_mla, with `duplicates` slots that name a slot of an earlier token, and special values."""

    case: mla_cases.LatentCase
    seed: int = 0
    duplicates: int = 0
    specials: bool = False

    operator = "concat_and_cache_mla"

    def __repr__(self) -> str:
        return text(self)

    def options(self) -> dict:
        return {}

    def arrays(self) -> Arrays:
        arrays = mla_cases.build_latents(self.case, self.seed)
        rng = cases.rng_for("fuzz-latents", self.seed)
        slots = arrays["slot_mapping"]
        for _ in range(self.duplicates if slots.size else 0):
            slots[rng.integers(slots.size)] = slots[rng.integers(slots.size)]
        if self.specials:
            put_specials(arrays["kv_c"], rng)
            put_specials(arrays["k_pe"], rng)
        return arrays

    def check(self, name: str, arrays: Arrays, got: tuple[np.ndarray, ...]) -> None:
        compare.assert_bitwise_equal(got[0], mla_cases.stored(**arrays), name)
