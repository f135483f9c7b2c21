"""On one platform all doors give the same bits: it is the same handler, reached by different ways."""

from __future__ import annotations

import functools

import pytest

from tests import cases, compare, doors

CASES = [
    c
    for c in cases.COMMON
    if c.name in ("llama3-8b-mixed-bf16", "mistral-7b-window", "gpt-oss-sinks", "fp8-cache-per-head")
]
OTHERS = [name for name in doors.ALL if not name.startswith("eager")]


@functools.cache
def attention(door: str, case: cases.AttentionCase):
    return doors.ALL[door].call("paged_attention_with_lse", cases.build(case).arrays(), **case.options())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.doors(*OTHERS)
def test_attention_bit_for_bit(door, case):
    other = doors.beside(door)
    if other is None:
        pytest.skip("the only door of its platform in this process")
    for what, got, want in zip(("out", "lse"), attention(door.name, case), attention(other.name, case), strict=True):
        compare.assert_bitwise_equal(got, want, f"{door.name} against {other.name}, {case.name}: {what}")


@pytest.mark.doors(*OTHERS)
def test_int64_slots_and_float8_bit_for_bit(door):
    other = doors.beside(door)
    if other is None:
        pytest.skip("the only door of its platform in this process")
    arrays = cases.build_cache(next(c for c in cases.CACHE_CASES if c.name == "fp8-e5m2-per-head"))
    (got,), (want,) = door.call("reshape_and_cache", arrays), other.call("reshape_and_cache", arrays)
    compare.assert_bitwise_equal(got, want, f"{door.name} against {other.name}")
