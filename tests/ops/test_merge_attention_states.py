"""merge_attention_states: attention over a union of keys from the attention over its parts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import baseline, cases, compare, reference


def states(dtype: str, num_tokens=37, num_heads=6, head_dim=80):
    rng = cases.rng_for(f"merge {dtype}")
    out_a, out_b = (
        rng.standard_normal((num_tokens, num_heads, head_dim)).astype(cases.DTYPES[dtype]) for _ in range(2)
    )
    lse_a, lse_b = (rng.uniform(-10, 10, (num_tokens, num_heads)).astype(np.float32) for _ in range(2))
    # What empty parts look like: in one, the other, both.
    for lse, out, rows in ((lse_a, out_a, (3, 5)), (lse_b, out_b, (4, 5))):
        for row in rows:
            lse[row], out[row] = -np.inf, 0
    lse_a[7], lse_b[7] = 500.0, -500.0  # no overflow from exp
    lse_a[8], lse_b[8] = 3000.0, 3000.5
    return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_values(frontend, dtype):
    arrays = states(dtype)
    want, want_lse = reference.merge_attention_states(**arrays)
    out, lse = frontend.call("merge_attention_states", arrays)
    assert out.dtype == arrays["out_a"].dtype and lse.dtype == np.float32
    base, base_lse = baseline.merge_attention_states(**arrays)
    compare.assert_close(out, want, base, f"{frontend.name}: out")
    compare.assert_close(lse, want_lse, np.where(np.isnan(base_lse), -np.inf, base_lse), f"{frontend.name}: lse")


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_beside_a_state_without_keys_the_other_stays_as_it_is(frontend, dtype):
    """Whatever it is: its lse may be infinite or NaN, its values -0, infinite or NaN."""
    values = np.array([1, -0.0, np.inf, np.nan, -3, 0, 2, 5], np.float32).astype(cases.DTYPES[dtype])
    lses = np.array([[np.inf, np.nan, 0.5, 3e38]], np.float32)
    some = {"out": np.broadcast_to(values, (1, 4, 8)).copy(), "lse": lses}
    none = {"out": np.full((1, 4, 8), np.nan, values.dtype), "lse": np.full((1, 4), -np.inf, np.float32)}
    for first, second in ((some, none), (none, some)):
        arrays = {f"{n}_{side}": x for side, state in zip("ab", (first, second), strict=True) for n, x in state.items()}
        out, lse = frontend.call("merge_attention_states", arrays)
        np.testing.assert_array_equal(np.asarray(lse), lses)
        np.testing.assert_array_equal(out.astype(np.float32), some["out"].astype(np.float32))
        assert np.signbit(out[0, :, 1].astype(np.float32)).all()


@pytest.mark.frontends("eager", "eager-cuda")
def test_parts_of_a_context_give_the_whole(frontend):
    """A shared prefix attended once, the rest attended separately, merged: the attention over the whole context."""
    whole = cases.AttentionCase("merge-whole", ((1, 96), (5, 80)), page_size=16, head_dim=64)
    inputs = cases.build(whole)
    arrays = inputs.arrays()
    prefix_pages = 3
    # The prefix is 48 keys that every query sees: one "sequence" per query row, of one row each.
    rows = whole.num_tokens - whole.padding_tokens
    owner = np.repeat([0, 1], [1, 5])
    prefix = dict(
        arrays,
        context_lens=np.full(rows, 48, np.int32),
        block_tables=inputs.block_tables[owner][:, :prefix_pages].copy(),
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        num_seqs=np.array([rows], np.int32),
    )
    suffix = dict(
        arrays,
        context_lens=np.maximum(inputs.context_lens, 48) - 48,
        block_tables=inputs.block_tables[:, prefix_pages:].copy(),
    )
    out_a, lse_a = frontend.call("paged_attention_with_lse", prefix, **whole.options())
    out_b, lse_b = frontend.call("paged_attention_with_lse", suffix, **whole.options())
    merged = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    out, lse = frontend.call("merge_attention_states", merged)
    want, want_lse = reference.paged_attention(**arrays, **whole.options())
    np.testing.assert_allclose(out, want, atol=1e-5)
    compare.assert_same_special(lse, want_lse, frontend.name)
    np.testing.assert_allclose(lse[:rows], want_lse[:rows], atol=1e-5)
