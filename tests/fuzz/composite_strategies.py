"""What hypothesis draws for the operators that are made of others; strategies.py has those with handlers."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from tests.common import bidirectional_cases, cases, experts_cases, grouped_cases
from tests.fuzz.composites import Bidirectional, ExpertsMlp, HostileBidirectional, HostileExperts
from tests.fuzz.strategies import HEAD_DIMS, INT32, SEEDS

# About those of pages, of a kernel's tiles, and any other.
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 128]), st.integers(0, 150))
MAX_TOKENS = 200  # of a batch: the reference has all scores


@st.composite
def programs(draw) -> bidirectional_cases.Case:
    num_kv_heads = draw(st.integers(1, 4))
    return bidirectional_cases.Case(
        "fuzz",
        (),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(HEAD_DIMS),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        scale=draw(st.one_of(st.none(), st.floats(-1, 1, width=32))),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 100), st.sampled_from([1, 2, 10**6, 2**31, 2**40]))),
        soft_cap=draw(st.one_of(st.none(), st.floats(0.5, 100, width=32))),
        spread=draw(st.sampled_from([1.0, 1.0, 0.1, 4.0])),
        spare_seqs=draw(st.one_of(st.integers(0, 4), st.sampled_from([0, 300]))),
        padding=(draw(st.integers(0, 5)), draw(st.integers(0, 12))),
    )


@st.composite
def lengths(draw) -> tuple[int, ...]:
    kept: list[int] = []
    for length in draw(st.lists(LENGTHS, max_size=9)):
        if sum(kept) + length <= MAX_TOKENS:
            kept.append(length)
    return tuple(kept)


@st.composite
def bidirectionals(draw, max_batches: int = 3) -> Bidirectional:
    batches = draw(st.lists(lengths(), min_size=1, max_size=max_batches))
    return Bidirectional(draw(programs()), tuple(batches), seed=draw(SEEDS))


@st.composite
def hostile_bidirectionals(draw) -> HostileBidirectional:
    attention = draw(bidirectionals(max_batches=1))
    (arrays,) = attention.built()
    edge = st.sampled_from([-1, 0, 1, 2**31 - 1, -(2**31)])
    numbers = {
        "query_start_loc": st.one_of(edge, st.integers(-2, len(arrays["query"]) + 2), INT32),
        "num_seqs": st.one_of(edge, st.integers(-1, len(arrays["query_start_loc"]) + 1)),
    }
    damage = []
    for argument in draw(st.lists(st.sampled_from(sorted(numbers)), min_size=1, max_size=3)):
        damage.append((argument, draw(st.integers(0, 12)), draw(numbers[argument])))
    return HostileBidirectional(attention, tuple(damage))


@st.composite
def experts(draw, weight_format: str | None = None) -> ExpertsMlp:
    chosen = draw(st.sampled_from(grouped_cases.FORMATS)) if weight_format is None else weight_format
    unit = 128 if chosen.startswith("int4") else 32 if chosen == "mxfp4" else 16
    dtype = draw(st.sampled_from(["bfloat16", "float16"]))
    rows, top_k = draw(st.one_of(st.integers(0, 8), st.integers(0, 60))), draw(st.integers(0, 6))
    if draw(st.sampled_from([False, False, False, False, True])):  # more pairs than are compared with each other
        rows, top_k = draw(st.integers(257, 400)), 4
    return ExpertsMlp(
        chosen,
        rows=rows,
        num_experts=draw(st.one_of(st.integers(1, 6), st.integers(1, 20))),
        top_k=top_k,
        hidden=unit * draw(st.integers(1, 256 // unit)),
        intermediate=unit * draw(st.integers(1, 256 // unit)),
        dtype=dtype,
        weights=draw(st.sampled_from(["float32", dtype])),
        ids=draw(st.sampled_from(["int32", "int64"])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(experts_cases.ACTIVATIONS)),
        elsewhere=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        specials=draw(st.booleans()),
        infinities=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@st.composite
def hostile_experts(draw) -> HostileExperts:
    made = dataclasses.replace(draw(experts("int4-zero-point")), specials=False, infinities=False)
    names = st.sampled_from(["gate_up_zero_point", "down_zero_point"])
    place = st.tuples(names, st.integers(0, 10_000), st.integers(100, 255))
    return HostileExperts(made, tuple(draw(st.lists(place, min_size=1, max_size=3))))
