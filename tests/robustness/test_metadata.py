"""Batches at the edge of what is specified: no sequence in use, padding rows, pages that several sequences share."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.common import baseline, cases, compare, reference
from tests.common.cases import AttentionCase

LOADS = {"few-rows": ((2, 40), (0, 12), (1, 17)), "many-rows": ((30, 40), (0, 12), (17, 17))}
FLOATS = pytest.mark.parametrize("dtype", cases.FLOATS)
ROWS = pytest.mark.parametrize("load", LOADS)
EAGER = pytest.mark.frontends("eager", "eager-cuda")


def attend(frontend, case, inputs):
    return frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())


def check(frontend, case, inputs):
    out, lse = attend(frontend, case, inputs)
    want, want_lse = reference.paged_attention(**inputs.arrays(), **case.options())
    base, base_lse = baseline.paged_attention(inputs, **case.options())
    compare.assert_close(out, want, base, f"{frontend.name}: out")
    compare.assert_close(lse, want_lse, base_lse, f"{frontend.name}: lse")
    return out, lse


STARTS = [0, 1, 5, -7, 2**31 - 1, -(2**31)]


@EAGER
@ROWS
@FLOATS
@pytest.mark.parametrize("start", STARTS)
def test_no_live_sequence(frontend, start, dtype, load):
    check_no_live_sequence(frontend, start, dtype, load)


@pytest.mark.parametrize("start", [0, 5])
def test_no_live_sequence_through_all_frontends(frontend, start):
    check_no_live_sequence(frontend, start, "bfloat16", "few-rows")


def check_no_live_sequence(frontend, start, dtype, load):
    """num_seqs is 0: every row is 0, whatever the rest of the metadata holds, with NaN in query and cache."""
    case = AttentionCase("no-live", LOADS[load], num_heads=4, num_kv_heads=2, page_size=8, dtype=dtype)
    inputs = cases.build(case)
    inputs.query[:], inputs.kv_cache[:] = np.nan, np.nan
    inputs.context_lens[:], inputs.block_tables[:] = 2**31 - 1, -1
    inputs.num_seqs[0], inputs.query_start_loc[:] = 0, start
    out, lse = attend(frontend, case, inputs)
    compare.assert_bitwise_equal(out, np.zeros_like(out), frontend.name)
    assert np.isneginf(lse).all()


@EAGER
@ROWS
@FLOATS
def test_rows_before_the_first_sequence_are_zero(frontend, dtype, load):
    case = AttentionCase("rows-before", LOADS[load], num_heads=4, num_kv_heads=2, page_size=8, dtype=dtype)
    inputs = cases.build(case)
    before = 3
    inputs.query_start_loc[: len(case.sequences) + 1] += before  # into the padding
    inputs.query = np.concatenate([inputs.query[-before:], inputs.query[:-before]])  # whose rows are NaN
    shifted = dataclasses.replace(inputs, query=np.concatenate([inputs.query, inputs.query[:before]]))
    out, lse = check(frontend, case, shifted)
    compare.assert_bitwise_equal(out[:before], np.zeros_like(out[:before]), frontend.name)
    assert np.isneginf(lse[:before]).all()


@EAGER
@ROWS
@FLOATS
def test_live_sequences_all_empty(frontend, dtype, load):
    """No keys at all, with rows; no rows at all, with keys; tables without a column."""
    del load
    case = AttentionCase("empty", ((3, 0), (20, 0), (0, 0)), page_size=8, dtype=dtype, spare_columns=0)
    out, lse = check(frontend, case, cases.build(case))
    assert not out.any() and np.isneginf(lse).all()
    case = AttentionCase("no-rows", ((0, 30), (0, 8)), page_size=8, dtype=dtype, padding_tokens=12)
    out, lse = check(frontend, case, cases.build(case))
    assert not out.any() and np.isneginf(lse).all()


@EAGER
def test_nothing_at_all(frontend):
    """Arrays without elements: no rows, no sequences, no pages, one after the other and together."""
    case = AttentionCase("nothing", ((1, 4),), page_size=4, num_heads=4, num_kv_heads=2)
    base = cases.build(case)
    no_rows = dataclasses.replace(base, query=base.query[:0], num_seqs=np.zeros(1, np.int32))
    no_seqs = dataclasses.replace(
        base,
        context_lens=base.context_lens[:0],
        block_tables=base.block_tables[:0],
        query_start_loc=np.zeros(1, np.int32),
        num_seqs=np.zeros(1, np.int32),
    )
    no_pages = dataclasses.replace(base, kv_cache=base.kv_cache[:0], context_lens=np.zeros_like(base.context_lens))
    for inputs in (no_rows, no_seqs, no_pages, dataclasses.replace(no_seqs, query=base.query[:0])):
        out, lse = attend(frontend, case, inputs)
        assert out.shape == inputs.query.shape and not out.any() and np.isneginf(lse).all()


@EAGER
@ROWS
@FLOATS
def test_pages_of_many_sequences(frontend, dtype, load):
    """All sequences on one set of pages; and one page all over a table."""
    sequences = tuple((q, 40) for q, _ in LOADS[load])
    case = AttentionCase("shared", sequences, num_heads=4, num_kv_heads=2, page_size=8, dtype=dtype, spread=0.5)
    inputs = cases.build(case)
    inputs.block_tables[: len(sequences)] = inputs.block_tables[0]
    check(frontend, case, inputs)
    inputs.block_tables[: len(sequences)] = inputs.block_tables[0, 1]
    check(frontend, case, inputs)


@EAGER
@ROWS
@FLOATS
def test_a_context_that_fills_its_table(frontend, dtype, load):
    case = AttentionCase(
        "full", tuple((q, 48) for q, _ in LOADS[load]), page_size=16, dtype=dtype, spare_columns=0, spare_seqs=0
    )
    inputs = cases.build(case)
    assert (inputs.context_lens == inputs.block_tables.shape[1] * case.page_size).all()
    check(frontend, case, inputs)
    inputs.context_lens[1] += 1
    if frontend.platform == "host":
        with pytest.raises(ValueError, match=r"context_lens\[1\] \(sequence 1\).* = 48, got 49"):
            attend(frontend, case, inputs)
