"""What must hold for an input, whatever it is: each function runs it through doors and raises AssertionError where it
does not hold. Doors of one platform must also agree bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tests import cases, compare, plain, reference
from tests.doors import Door
from tests.fuzz import hostile
from tests.fuzz.inputs import Add, Attention, Hostile, Merge, Update
from tests.fuzz.programs import program

# Calls that were compared, by door: what a run reports.
calls: Counter[str] = Counter()
# Inputs that were compared with the reference, by kind.
inputs_seen: Counter[str] = Counter()


def ulp(dtype: np.dtype, size: float) -> float:
    """The distance between numbers of the type near `size`."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) * size


def largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def rounding(got: np.ndarray, want: np.ndarray, logits: np.ndarray | None = None) -> float:
    """What every computation may be off by: one rounding of the result, and one of the largest logit to float32, by
    which all weights of its row are off; under a soft cap, of the largest before it. It is added to the rule of
    compare.py, whose yardstick is the error of plain PyTorch: among few numbers that may happen to be nearly 0."""
    weights = 0.0 if logits is None else ulp(np.dtype(np.float32), largest(logits))
    return ulp(got.dtype, largest(want)) + weights * largest(want)


def attention(x: Attention, doors: Sequence[Door]) -> None:
    operator = "paged_attention_with_lse" if x.with_lse else "paged_attention"
    made = x.built()
    steps = {door.name: program(door, operator, x.program.options()) for door in doors}
    for case, inputs in made:
        inputs_seen["attention"] += 1
        arrays = inputs.arrays()
        want = reference.paged_attention(**arrays, **case.options())
        yardstick = plain.paged_attention(inputs, **case.options())
        owned = sum(q for q, _ in case.sequences)
        logits = want[1]
        if case.soft_cap:
            logits = reference.paged_attention(**arrays, **{**case.options(), "soft_cap": None})[1]

        def check(door, got, want=want, yardstick=yardstick, owned=owned, logits=logits):
            for name, g, w, y in zip(("out", "lse"), got, want, yardstick, strict=False):
                floor = 1e-5 + rounding(g, w, logits=logits if name == "out" else None)
                compare.assert_close(g, w, y, f"{door.name}: {name}", floor=floor)
            compare.assert_bitwise_equal(got[0][owned:], np.zeros_like(got[0][owned:]), f"{door.name}: padding rows")

        _through(doors, steps, arrays, check)


def _through(doors, steps, arrays, check) -> None:
    first: dict[str, tuple[Door, tuple]] = {}
    for door in doors:
        got = steps[door.name](arrays)
        calls[door.name] += 1
        check(door, got)
        other, theirs = first.setdefault(door.platform, (door, got))
        for i, (mine, their) in enumerate(zip(got, theirs, strict=True)):
            compare.assert_bitwise_equal(mine, their, f"result {i}: {door.name} and {other.name}")


def update(x: Update, doors: Sequence[Door]) -> None:
    inputs_seen["update"] += 1
    arrays = x.arrays()
    want = reference.reshape_and_cache(**arrays)
    untouched = compare.bits(want) == compare.bits(arrays["kv_cache"])

    def check(door, got):
        (cache,) = got
        if x.case.cache_dtype is None:
            compare.assert_bitwise_equal(cache, want, door.name)
            return
        # Which of a float8's NaN patterns a NaN becomes is nobody's business; those in the cache stay.
        compare.assert_same_special(cache.astype(np.float32), want.astype(np.float32), door.name)
        keep = untouched | ~np.isnan(want.astype(np.float32))
        written = np.where(keep, compare.bits(cache), 0)
        compare.assert_bitwise_equal(written, np.where(keep, compare.bits(want), 0), door.name)

    _through(doors, {door.name: program(door, "reshape_and_cache") for door in doors}, arrays, check)


def merge(x: Merge, doors: Sequence[Door]) -> None:
    inputs_seen["merge"] += 1
    arrays = x.arrays()
    want = reference.merge_attention_states(**arrays)
    # The yardstick's product of weight 0 and a NaN that has no part would be NaN.
    yardstick = plain.merge_attention_states(**{k: np.nan_to_num(v, neginf=-np.inf) for k, v in arrays.items()})
    yardstick = (yardstick[0], np.where(np.isnan(yardstick[1]), -np.inf, yardstick[1]))

    def check(door, got):
        for name, g, w, y in zip(("out", "lse"), got, want, yardstick, strict=True):
            compare.assert_close(g, w, y, f"{door.name}: {name}", floor=1e-5 + rounding(g, w))

    _through(doors, {door.name: program(door, "merge_attention_states") for door in doors}, arrays, check)


def add(x: Add, doors: Sequence[Door]) -> None:
    inputs_seen["add"] += 1
    arrays = x.arrays()
    dtype = cases.DTYPES[x.dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        want = (arrays["a"].astype(np.float64) + arrays["b"].astype(np.float64)).astype(np.float32).astype(dtype)

    def check(door, got):
        (out,) = got
        number = ~np.isnan(want)
        compare.assert_same_special(out, want, door.name)
        compare.assert_bitwise_equal(
            np.where(number, compare.bits(out), 0), np.where(number, compare.bits(want), 0), door.name
        )

    # NaN patterns are nobody's business here, so doors are not compared with each other.
    for door in doors:
        got = program(door, "simple_add")(arrays)
        calls[door.name] += 1
        check(door, got)


def wrong_metadata(x: Hostile, doors: Sequence[Door]) -> None:
    inputs_seen["hostile"] += 1
    for door in doors:
        hostile.check(x, door)
        calls[door.name] += 1


CHECKS = {Attention: attention, Update: update, Merge: merge, Add: add, Hostile: wrong_metadata}


def check(x, doors: Sequence[Door]) -> None:
    CHECKS[type(x)](x, doors)
