"""Wrong numbers in the metadata, and the specified outcome, written a second time: on the host the error
that names the argument and the sequence, or a right result; on CUDA the rows that become NaN, and right ones elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from tests.common import reference
from tests.common.cases import AttentionCase, AttentionInputs
from tests.common.frontends import Frontend
from tests.fuzz.inputs import Hostile

ERRORS = (ValueError, RuntimeError)
# Largest error of a result of size 1, by dtype: this is about whose rows are whose, not about the last bit.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}


def most_tokens(inputs: AttentionInputs) -> float:
    """New tokens that a sequence may have."""
    return math.inf if inputs.tree_mask is None else 32 * inputs.tree_mask.shape[1]


def error_pattern(inputs: AttentionInputs) -> str | None:
    """What the host's error must name; None where nothing is wrong."""
    max_seqs, columns = inputs.block_tables.shape
    num_tokens = inputs.query.shape[0]
    num_pages, page_size = reference.split_cache(inputs.kv_cache)[0].shape[:2]
    live = int(inputs.num_seqs[0])
    if not 0 <= live <= max_seqs:
        return "num_seqs: expected"
    starts, contexts = inputs.query_start_loc.tolist(), inputs.context_lens.tolist()
    if live and not 0 <= starts[0] <= num_tokens:
        return r"query_start_loc\[0\] \(sequence 0\): expected"
    for s in range(live):
        if not starts[s] <= starts[s + 1] <= num_tokens:
            return rf"query_start_loc\[{s + 1}\] \(sequence {s}\): expected"
        if starts[s + 1] - starts[s] > most_tokens(inputs):
            return rf"query_start_loc\[{s + 1}\] \(sequence {s}\): expected at most"
        if not 0 <= contexts[s] <= columns * page_size:
            return rf"context_lens\[{s}\] \(sequence {s}\): expected"
        for i in range(math.ceil(contexts[s] / page_size)):
            if not 0 <= inputs.block_tables[s, i] < num_pages:
                return rf"block_tables\[{s}, {i}\] \(sequence {s}\): expected"
    return None


@dataclasses.dataclass
class Rows:
    """What CUDA's results must be, row by row."""

    out: np.ndarray  # float64; NaN where the row must be NaN
    lse: np.ndarray
    free: np.ndarray  # rows that may be NaN too: a page that no query of theirs sees is wrong, or holds NaN


def expected_rows(case: AttentionCase, inputs: AttentionInputs) -> Rows:
    num_tokens, num_heads, _ = inputs.query.shape
    max_seqs, columns = inputs.block_tables.shape
    num_pages, page_size = reference.split_cache(inputs.kv_cache)[0].shape[:2]
    rows = Rows(
        np.full(inputs.query.shape, np.nan), np.full((num_tokens, num_heads), np.nan), np.zeros(num_tokens, bool)
    )

    def fill(begin, end, out, lse):
        rows.out[begin:end], rows.lse[begin:end] = out, lse

    live = int(inputs.num_seqs[0])
    if not 0 <= live <= max_seqs:
        return rows
    starts = [int(n) for n in inputs.query_start_loc]
    in_order = all(0 <= starts[s] <= starts[s + 1] <= num_tokens for s in range(live))
    if in_order:
        fill(0, num_tokens, 0.0, -np.inf)  # rows before the first sequence and behind the last
    elif 0 <= starts[live] <= num_tokens:
        fill(starts[live], num_tokens, 0.0, -np.inf)
    latest = 0
    for s in range(live):
        begin, end = starts[s], starts[s + 1]
        owns = latest <= begin <= end <= num_tokens
        if 0 <= begin <= num_tokens:
            latest = max(latest, begin)
        if not owns or begin == end:
            continue
        context = int(inputs.context_lens[s])
        fill(begin, end, np.nan, np.nan)
        if not 0 <= context <= columns * page_size or end - begin > most_tokens(inputs):
            continue
        pages = inputs.block_tables[s, : math.ceil(context / page_size)]
        wrong = (pages < 0) | (pages >= num_pages)
        first_seen = context - (end - begin) - (case.sliding_window or 2**62) + 1
        if wrong[max(first_seen, 0) // page_size :].any():
            continue
        values = reference.split_cache(inputs.kv_cache)[1][np.where(wrong, 0, pages)]
        values = values.reshape(-1, *values.shape[2:])[:context]
        # A value that one row sees is multiplied by 0 in the sequence's others.
        rows.free[begin:end] = wrong.any() or np.isnan(values.astype(np.float32)).any()
        one = dataclasses.replace(
            inputs,
            context_lens=np.array([context]),
            block_tables=np.where(wrong, 0, pages)[None],
            query_start_loc=np.array([begin, end]),
            num_seqs=np.array([1]),
        )
        out, lse = reference.paged_attention(**one.arrays(), **case.options())
        fill(begin, end, out[begin:end], lse[begin:end])
    return rows


def assert_rows(name: str, got: np.ndarray, want: np.ndarray, free: np.ndarray, tolerance: float, what: str) -> None:
    got = got.astype(np.float64)
    shape = (len(free),) + (1,) * (got.ndim - 1)
    allowed = np.isnan(got) & free.reshape(shape)
    with np.errstate(invalid="ignore"):
        same = np.isclose(got, want, rtol=tolerance, atol=tolerance * 4, equal_nan=True) | allowed
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(f"{name}: {what} at {at}: {got[at]} instead of {want[at]}")


def check(x: Hostile, frontend: Frontend) -> None:
    case, inputs = x.built()
    pattern = error_pattern(inputs)
    if frontend.platform == "host" and pattern is not None:
        try:
            frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
        except ERRORS as e:
            assert re.search(f"paged_attention_with_lse: {pattern}", str(e)), f"{frontend.name}: {pattern!r} not in {e}"
            return
        # XLA runs no call whose results have no elements.
        if inputs.query.size == 0 and not frontend.name.startswith("eager"):
            return
        raise AssertionError(f"{frontend.name}: no error, where one must name {pattern!r}")
    rows = expected_rows(case, inputs)
    if frontend.platform == "host":
        rows.free[:] = False
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    # Sound numbers may still name slots of the cache that hold NaN, as other sequences' ends do.
    tolerance = TOLERANCES[case.dtype]
    assert_rows(frontend.name, out, rows.out, rows.free, tolerance * _largest_value(inputs), "out")
    assert_rows(frontend.name, lse, rows.lse, rows.free, tolerance * 4, "lse")


def _largest_value(inputs: AttentionInputs) -> float:
    values = np.abs(reference.split_cache(inputs.kv_cache)[1].astype(np.float32))
    scale = 1.0 if inputs.v_scale is None else float(inputs.v_scale.max())
    return max(1.0, float(np.nanmax(values, initial=0.0)) * scale)
