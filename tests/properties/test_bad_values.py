"""Values on the device that are excluded: on the host the error that names the sequence; on CUDA, where a
handler may not look, NaN in that sequence's rows and nothing else; with XLA_GPU_CHECK_INPUTS=1 the error there too."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare
from tests.fuzz import hostile

# The sequence in the middle is the one to go wrong: a few rows, which the kernels for decoding take, or many.
CASE = cases.AttentionCase(
    "bad-values", ((2, 40), (3, 33), (1, 17)), num_heads=4, num_kv_heads=2, page_size=8, spare_columns=0
)
SEVERAL = dataclasses.replace(CASE, sequences=((2, 40), (7, 33), (1, 17)))
CASES = {
    "decode": CASE,
    "prefill": dataclasses.replace(CASE, sequences=((2, 40), (30, 33), (1, 17))),
    "several-tokens": dataclasses.replace(SEVERAL, num_heads=8, dtype="bfloat16"),
    "tree": dataclasses.replace(SEVERAL, tree=1, dtype="bfloat16"),
    "tree-float32": dataclasses.replace(SEVERAL, tree=2),
}
BAD_SEQUENCE = 1
CAPACITY = CASE.pages_per_seq * CASE.page_size


def page(value):
    def change(inputs):
        inputs.block_tables[BAD_SEQUENCE, 2] = value

    return change


def context(value):
    def change(inputs):
        inputs.context_lens[BAD_SEQUENCE] = value

    return change


NUM_PAGES = cases.build(CASE).kv_cache.shape[0]
SEQUENCE_VALUES = {
    "page-is-num_pages": page(NUM_PAGES),
    "page-minus-1": page(-1),
    "page-2147483647": page(2**31 - 1),
    "page-minus-2147483648": page(-(2**31)),
    "context-negative": context(-1),
    "context-most-negative": context(-(2**31)),
    "context-over-capacity": context(CAPACITY + 1),
    "context-2147483647": context(2**31 - 1),
}


def start(*values):
    def change(inputs):
        inputs.query_start_loc[: len(values)] = values

    return change


def seqs(value):
    def change(inputs):
        inputs.num_seqs[0] = value

    return change


# What the error must name, besides the operator.
BATCH_VALUES = {
    "starts-fall": (start(0, 4, 2, 6), "sequence 1"),
    "starts-negative": (start(-1, 2, 5, 6), "sequence 0"),
    "starts-most-negative": (start(0, -(2**31), 5, 6), "sequence [01]"),
    "starts-past-num_tokens": (start(0, 2, CASE.num_tokens + 1, CASE.num_tokens + 1), "sequence 1"),
    "starts-2147483647": (start(0, 2, 5, 2**31 - 1), "sequence 2"),
    "num_seqs-negative": (seqs(-1), "num_seqs"),
    "num_seqs-over-max_seqs": (seqs(CASE.max_seqs + 1), "num_seqs"),
    "num_seqs-2147483647": (seqs(2**31 - 1), "num_seqs"),
}

# torch_xla and JAX raise what their runtime makes of InvalidArgument; the eager front end raises ValueError itself.
ERRORS = (ValueError, RuntimeError)


def good(frontend, case=CASE):
    return frontend.call("paged_attention", cases.build(case).arrays(), **case.options())[0]


def assert_error(frontend, inputs, pattern):
    with pytest.raises(ERRORS, match=f"(?s)paged_attention.*{pattern}"):
        frontend.call("paged_attention", inputs.arrays(), **CASE.options())
    # A failing call leaves the next one healthy.
    out = good(frontend)
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("name", SEQUENCE_VALUES)
@pytest.mark.frontends(platform="host")
def test_host_names_the_sequence(frontend, name):
    inputs = cases.build(CASE)
    SEQUENCE_VALUES[name](inputs)
    assert_error(frontend, inputs, f"sequence {BAD_SEQUENCE}")


@pytest.mark.parametrize("name", BATCH_VALUES)
@pytest.mark.frontends(platform="host")
def test_host_names_what_is_wrong_with_the_batch(frontend, name):
    change, pattern = BATCH_VALUES[name]
    inputs = cases.build(CASE)
    change(inputs)
    assert_error(frontend, inputs, pattern)


@pytest.mark.frontends(platform="host")
def test_host_names_a_cache_without_pages(frontend):
    inputs = cases.build(CASE)
    inputs.kv_cache = inputs.kv_cache[:0]
    assert_error(frontend, inputs, r"context_lens\[0\] \(sequence 0\): expected 0, since kv_cache has no pages, got 40")


# 40 new tokens, for which a row of tree_mask with one word has no bits.
LONG_TREE = dataclasses.replace(CASE, sequences=((2, 20), (40, 40), (1, 17)), tree=1)


@pytest.mark.frontends(platform="host")
def test_host_names_the_sequence_that_is_too_long_for_a_tree(frontend):
    with pytest.raises(ERRORS, match=r"(?s)paged_attention: query_start_loc.*sequence 1.*at most 32 new.*got 40"):
        good(frontend, LONG_TREE)


@pytest.mark.frontends(platform="cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_rows_of_a_sequence_that_is_too_long_for_a_tree_are_nan(frontend, dtype):
    case = dataclasses.replace(LONG_TREE, dtype=dtype)
    out, lse = frontend.call("paged_attention_with_lse", cases.build(case).arrays(), **case.options())
    assert np.isnan(out[2:42].astype(np.float32)).all() and np.isnan(lse[2:42]).all()
    assert np.isfinite(out[:2].astype(np.float32)).all() and np.isfinite(out[42].astype(np.float32)).all()
    assert (out[43:].astype(np.float32) == 0).all()


@pytest.mark.frontends("torch_xla")
def test_torch_xla_reports_an_error_twice_and_is_healthy_then(frontend):
    """What users see: the error where the result is waited for, once more when the next program starts, and no more."""
    import torch

    inputs = cases.build(CASE)
    context(-1)(inputs)

    def failing():
        return frontend.module().paged_attention(**frontend.tensors(inputs.arrays()), **CASE.options()).cpu()

    with pytest.raises(RuntimeError, match="sequence 1"):
        failing()
    ones = torch.ones(3, device=frontend.device())
    with pytest.raises(RuntimeError, match="sequence 1"):
        (ones + 1).cpu()
    for i in range(3):
        assert (ones + i).cpu().tolist() == [1.0 + i] * 3


@pytest.mark.parametrize("name", [*SEQUENCE_VALUES, *BATCH_VALUES])
@pytest.mark.frontends(platform="cuda")
def test_cuda_error_where_asked_for(frontend, name, monkeypatch):
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    inputs = cases.build(CASE)
    if name in SEQUENCE_VALUES:
        SEQUENCE_VALUES[name](inputs)
        assert_error(frontend, inputs, f"sequence {BAD_SEQUENCE}")
    else:
        change, pattern = BATCH_VALUES[name]
        change(inputs)
        assert_error(frontend, inputs, pattern)


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("name", SEQUENCE_VALUES)
@pytest.mark.frontends(platform="cuda")
def test_cuda_rows_of_that_sequence_are_nan(frontend, name, path):
    case = CASES[path]
    want = good(frontend, case)
    inputs = cases.build(case)
    SEQUENCE_VALUES[name](inputs)
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    rows = slice(*inputs.query_start_loc[BAD_SEQUENCE : BAD_SEQUENCE + 2])
    assert np.isnan(out[rows]).all() and np.isnan(lse[rows]).all()
    out = np.array(out)  # JAX's results are read-only
    out[rows] = want[rows]
    compare.assert_bitwise_equal(out, want, f"{frontend.name}: the other sequences")


@pytest.mark.parametrize("path", CASES)
@pytest.mark.frontends(platform="cuda")
def test_cuda_rows_of_a_cache_without_pages_are_nan(frontend, path):
    case = CASES[path]
    inputs = cases.build(case)
    inputs.kv_cache = inputs.kv_cache[:0]
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    rows = inputs.query_start_loc[len(case.sequences)]
    assert np.isnan(out[:rows]).all() and np.isnan(lse[:rows]).all()
    good(frontend, case)


# Rows by what they hold. CASE has sequences in rows 0-1, 2-4 and 5, and padding in rows 6-8: as without the bad entry
# ("good"), NaN, or 0. Rows in none of them belong to a sequence that the bad entry gave other, sound bounds.
CUDA_ROWS = {
    "starts-fall": {"nan": [4, 5], "zero": [6, 7, 8]},
    "starts-negative": {"nan": [0, 1], "good": [2, 3, 4, 5], "zero": [6, 7, 8]},
    "starts-most-negative": {"nan": [0, 1, 2, 3, 4], "good": [5], "zero": [6, 7, 8]},
    "starts-past-num_tokens": {"good": [0, 1], "nan": [2, 3, 4, 5, 6, 7, 8]},
    "starts-2147483647": {"good": [0, 1, 2, 3, 4], "nan": [5, 6, 7, 8]},
    "num_seqs-negative": {"nan": list(range(9))},
    "num_seqs-over-max_seqs": {"nan": list(range(9))},
    "num_seqs-2147483647": {"nan": list(range(9))},
}


@pytest.mark.parametrize("name", BATCH_VALUES)
@pytest.mark.frontends(platform="cuda")
def test_cuda_rows_after_a_bad_batch(frontend, name):
    """A wrong bound spoils the sequences that it bounds, and no others."""
    want = good(frontend)
    inputs = cases.build(CASE)
    BATCH_VALUES[name][0](inputs)
    (out,) = frontend.call("paged_attention", inputs.arrays(), **CASE.options())
    rows = {"good": [], "nan": [], "zero": []} | CUDA_ROWS[name]
    compare.assert_bitwise_equal(out[rows["good"]], want[rows["good"]], f"{frontend.name}: sound sequences")
    assert np.isnan(out[rows["nan"]]).all()
    assert (out[rows["zero"]] == 0).all()
    compare.assert_bitwise_equal(good(frontend), want, f"{frontend.name}: the next call")


@pytest.mark.parametrize("sequences", [3, 40])  # the decode path plans up to 32 in another way than more
@pytest.mark.parametrize("name", BATCH_VALUES)
@pytest.mark.frontends(platform="cuda")
def test_cuda_rows_of_16_bits_after_a_bad_batch(frontend, name, sequences):
    more = ((1, 9),) * (sequences - len(CASE.sequences))
    case = dataclasses.replace(CASE, sequences=CASE.sequences + more, dtype="bfloat16")
    inputs = cases.build(case)
    BATCH_VALUES[name][0](inputs)
    (out,) = frontend.call("paged_attention", inputs.arrays(), **case.options())
    tolerance = hostile.TOLERANCES[case.dtype]
    want = hostile.expected_rows(case, inputs).out
    np.testing.assert_allclose(out.astype(np.float64), want, tolerance, 4 * tolerance)


CACHE_CASE = cache_cases.CacheCase("bad-slots", skipped=0)
SLOTS = CACHE_CASE.num_pages * CACHE_CASE.page_size
BAD_SLOTS = {"just-past": (SLOTS, "int32"), "2147483647": (2**31 - 1, "int32"), "2**40+17": (2**40 + 17, "int64")}


def bad_slot(name):
    slot, dtype = BAD_SLOTS[name]
    arrays = cache_cases.build_cache(CACHE_CASE)
    skipped = dict(arrays, slot_mapping=arrays["slot_mapping"].astype(dtype))
    skipped["slot_mapping"][4] = -1
    arrays = dict(skipped, slot_mapping=skipped["slot_mapping"].copy())
    arrays["slot_mapping"][4] = slot
    return arrays, skipped


def assert_slot_error(frontend, name):
    arrays, skipped = bad_slot(name)
    with pytest.raises(ERRORS, match=rf"(?s)reshape_and_cache.*slot_mapping.*(token 4|\[4\]).*{BAD_SLOTS[name][0]}"):
        frontend.call("reshape_and_cache", arrays)
    frontend.call("reshape_and_cache", skipped)


@pytest.mark.parametrize("name", BAD_SLOTS)
@pytest.mark.frontends(platform="host")
def test_host_names_the_token_of_a_slot_past_the_cache(frontend, name):
    assert_slot_error(frontend, name)


@pytest.mark.parametrize("name", BAD_SLOTS)
@pytest.mark.frontends(platform="cuda")
def test_cuda_slot_past_the_cache(frontend, name, monkeypatch):
    from tests.common import reference

    arrays, skipped = bad_slot(name)
    (cache,) = frontend.call("reshape_and_cache", arrays)
    compare.assert_bitwise_equal(cache, reference.reshape_and_cache(**skipped), f"{frontend.name}: skipped")
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    assert_slot_error(frontend, name)


@pytest.mark.frontends("eager")
def test_a_failing_in_place_update_changes_nothing(frontend):
    """The slots are checked before the first is written."""
    from tests.common.arrays import to_numpy

    arrays, _ = bad_slot("just-past")
    tensors = frontend.tensors(arrays)
    with pytest.raises(ERRORS):
        frontend.module().reshape_and_cache_(**tensors)
    compare.assert_bitwise_equal(to_numpy(tensors["kv_cache"]), arrays["kv_cache"], "the cache after an error")
