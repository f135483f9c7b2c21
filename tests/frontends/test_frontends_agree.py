"""On one platform all front ends give the same bits: it is the same handler, reached by different ways."""

from __future__ import annotations

import functools

import pytest

from tests.common import cache_cases, cases, compare, frontends

CASES = [
    c
    for c in cases.COMMON
    if c.name in ("llama3-8b-mixed-bf16", "mistral-7b-window", "gpt-oss-sinks", "fp8-cache-per-head")
]
OTHERS = [name for name in frontends.ALL if not name.startswith("eager")]


@functools.cache
def attention(frontend: str, case: cases.AttentionCase):
    return frontends.ALL[frontend].call("paged_attention_with_lse", cases.build(case).arrays(), **case.options())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.frontends(*OTHERS)
def test_attention_bit_for_bit(frontend, case):
    other = frontends.beside(frontend)
    if other is None:
        pytest.skip("the only frontend of its platform in this process")
    for what, got, want in zip(
        ("out", "lse"), attention(frontend.name, case), attention(other.name, case), strict=True
    ):
        compare.assert_bitwise_equal(got, want, f"{frontend.name} against {other.name}, {case.name}: {what}")


@pytest.mark.frontends(*OTHERS)
def test_int64_slots_and_float8_bit_for_bit(frontend):
    other = frontends.beside(frontend)
    if other is None:
        pytest.skip("the only frontend of its platform in this process")
    arrays = cache_cases.build_cache(next(c for c in cache_cases.CACHE_CASES if c.name == "fp8-e5m2-per-head"))
    (got,), (want,) = frontend.call("reshape_and_cache", arrays), other.call("reshape_and_cache", arrays)
    compare.assert_bitwise_equal(got, want, f"{frontend.name} against {other.name}")
