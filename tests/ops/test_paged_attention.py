"""paged_attention and paged_attention_with_lse against the float64 reference, through every front end."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.common import baseline, cases, compare, reference
from tests.common.cases import AttentionCase

NAMES = {c.name: c for c in (*cases.COMMON, *cases.MORE)}


@functools.cache
def expected(case: AttentionCase):
    """(inputs, (out, lse) in float64, (out, lse) by plain PyTorch)."""
    inputs = cases.build(case)
    return (
        inputs,
        reference.paged_attention(**inputs.arrays(), **case.options()),
        baseline.paged_attention(inputs, **case.options()),
    )


def check(frontend, case: AttentionCase) -> None:
    inputs, want, base = expected(case)
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    assert out.dtype == inputs.query.dtype and lse.dtype == np.float32
    compare.assert_close(out, want[0], base[0], f"{frontend.name} {case.name}: out")
    compare.assert_close(lse, want[1], base[1], f"{frontend.name} {case.name}: lse")
    owned = sum(q for q, _ in case.sequences)
    compare.assert_bitwise_equal(out[owned:], np.zeros_like(out[owned:]), f"{frontend.name} {case.name}: padding rows")


@pytest.mark.parametrize("case", cases.COMMON, ids=lambda c: c.name)
def test_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("case", cases.MORE, ids=lambda c: c.name)
@pytest.mark.frontends("eager", "eager-cuda")
def test_more_values(frontend, case):
    check(frontend, case)


@pytest.mark.frontends("eager-cuda")
def test_the_longest_contexts_first(frontend):
    """Splits of the longest contexts are shared by all CTAs, those of others belong to one each."""
    check(frontend, cases.LONGEST_FIRST)


@pytest.mark.parametrize("case", cases.grid(), ids=lambda c: c.name)
@pytest.mark.frontends("eager", "eager-cuda")
def test_grid(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("case", [NAMES["llama3-8b-decode"], NAMES["gpt-oss-sinks"]], ids=lambda c: c.name)
def test_without_lse_the_same_bits(frontend, case):
    inputs, *_ = expected(case)
    (out,) = frontend.call("paged_attention", inputs.arrays(), **case.options())
    with_lse, _ = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    compare.assert_bitwise_equal(out, with_lse, frontend.name)


@pytest.mark.frontends("eager")
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_scratch_of_64_sequences_of_32k_keys_is_bounded(frontend, head_dim):
    """32 MiB, for whatever those sequences do."""
    from xla_gpu._core.operator import ArraySpec
    from xla_gpu._runtime.scratch import scratch_bytes
    from xla_gpu.ops.paged_attention import OPERATOR

    most = 0
    heads = ((1, 1), (32, 1), (8, 4), (1, 8), (4, 8), (7, 8), (5, 16), (1, 64))
    for group, kv_heads in heads:
        for max_seqs in (0, 1, 3, 8, 9, 31, 33, 64):
            for tokens in (0, 1, 4, 8, 9, 17, 64, 65, 129, 255, 256, 300, 512, 520, 4096):
                for max_context in (4096, 32768):
                    for tree in (0, 2):
                        query = ArraySpec((tokens, group * kv_heads, head_dim), "bfloat16")
                        arrays = {
                            "query": query,
                            "kv_cache": ArraySpec((2, 4096, 16, kv_heads, head_dim), "bfloat16"),
                            "context_lens": ArraySpec((max_seqs,), "int32"),
                            "block_tables": ArraySpec((max_seqs, max_context // 16), "int32"),
                            "query_start_loc": ArraySpec((max_seqs + 1,), "int32"),
                            "num_seqs": ArraySpec((1,), "int32"),
                        }
                        if tree:
                            arrays["tree_mask"] = ArraySpec((tokens, tree), "uint32")
                        size = scratch_bytes(OPERATOR.bind(**arrays, scale=1.0))
                        assert size <= 32 << 20, (size, tree, {k: v.shape for k, v in arrays.items()})
                        most = max(most, size)
    assert most > 1 << 20, "no case takes scratch memory"


def test_num_seqs_may_be_an_int(frontend):
    """Or an array without axes, which jax.jit makes of an int that it is given."""
    case = NAMES["empty-sequences-in-the-middle"]
    inputs, *_ = expected(case)
    arrays = inputs.arrays()
    (want,) = frontend.call("paged_attention", arrays, **case.options())
    (out,) = frontend.call("paged_attention", arrays | {"num_seqs": arrays["num_seqs"].reshape(())}, **case.options())
    compare.assert_bitwise_equal(out, want, frontend.name)
    del arrays["num_seqs"]
    (out,) = frontend.call("paged_attention", arrays, num_seqs=len(case.sequences), **case.options())
    compare.assert_bitwise_equal(out, want, frontend.name)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_large_logits_do_not_overflow(frontend, dtype):
    """Scores of about ±6e4: past float16's range, and past exp's in float32."""
    case = AttentionCase("large-logits", ((4, 40), (1, 33)), head_dim=64, dtype=dtype, scale=1.0)
    inputs = cases.build(case)
    signs = np.where(cases.rng_for("signs").random(inputs.query.shape) < 0.5, -1, 1)
    inputs.query = (signs * 30).astype(inputs.query.dtype)
    inputs.kv_cache = (np.sign(inputs.kv_cache) * 30).astype(inputs.query.dtype)  # NaN stays NaN
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    want, want_lse = reference.paged_attention(**inputs.arrays(), **case.options())
    assert np.abs(want_lse[np.isfinite(want_lse)]).max() > 2e4
    compare.assert_same_special(out, want, frontend.name)
    # V is ±30 and nearly every row sees one key alone: what is left is one rounding of the result.
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize("exponent", (-60, -6, 20))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_float8_caches_with_queries_of_any_magnitude(frontend, head_dim, exponent):
    """Powers of two move from k_scale to Q, in opposite directions for the two kv heads, and change no bits."""
    case = AttentionCase("magnitudes", ((150, 300), (20, 70), (1, 40)), num_heads=4, num_kv_heads=2, head_dim=head_dim,
                         page_size=16, cache_dtype="float8_e4m3fn", scales="per_head", dtype="bfloat16")  # fmt: skip
    arrays = cases.build(case).arrays()
    query = np.rint(arrays["query"].astype(np.float32) * 32) / 32  # so that no value is much smaller than its row
    factors = np.float32(2.0) ** np.array([exponent, -exponent], np.float32)
    moved = dict(
        arrays,
        query=(query * np.repeat(factors, 2)[:, None]).astype(arrays["query"].dtype),
        k_scale=(arrays["k_scale"] / factors).astype(np.float32),
    )
    arrays["query"] = query.astype(arrays["query"].dtype)
    want = frontend.call("paged_attention_with_lse", arrays, **case.options())
    got = frontend.call("paged_attention_with_lse", moved, **case.options())
    for name, mine, other in zip(("out", "lse"), got, want, strict=True):
        compare.assert_bitwise_equal(mine, other, f"{frontend.name}: {name}")
    inputs = cases.build(case)
    inputs.query[:] = arrays["query"]
    base = baseline.paged_attention(inputs, **case.options())
    exact = reference.paged_attention(**inputs.arrays(), **case.options())
    compare.assert_close(want[0], exact[0], base[0], f"{frontend.name}: out")


@pytest.mark.frontends("eager", "eager-cuda")
def test_a_key_of_minus_infinite_logit_takes_no_part(frontend):
    """-inf in a used key makes that logit -inf; the others' sum goes on. Where all logits are -inf the row is 0."""
    case = AttentionCase("infinite", ((1, 20), (1, 20)), num_heads=2, num_kv_heads=1, head_dim=8, page_size=4)
    inputs = cases.build(case)
    inputs.query = np.abs(inputs.query)
    k_pages, _ = reference.split_cache(inputs.kv_cache)
    k_pages[inputs.block_tables[0, 1], 2] = -np.inf  # one key of the first sequence
    k_pages[inputs.block_tables[1, :5]] = -np.inf  # every key of the second
    want, want_lse = reference.paged_attention(**inputs.arrays(), **case.options())
    assert np.isfinite(want_lse[0]).all() and np.isneginf(want_lse[1]).all()
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    compare.assert_same_special(out, want, frontend.name)
    compare.assert_same_special(lse, want_lse, frontend.name)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(np.where(np.isfinite(lse), lse, 0), np.where(np.isfinite(lse), want_lse, 0), atol=1e-5)


@pytest.mark.frontends("eager", "eager-cuda")
def test_layout_does_not_change_bits(frontend):
    case = NAMES["mistral-7b-window"]
    inputs, *_ = expected(case)
    split = inputs.arrays()
    combined = dict(split, kv_cache=cases.combine(*reference.split_cache(inputs.kv_cache), "combined"))
    assert split["kv_cache"].ndim == 5 and combined["kv_cache"].ndim == 4
    (first,), (second,) = (frontend.call("paged_attention", arrays, **case.options()) for arrays in (split, combined))
    compare.assert_bitwise_equal(first, second, frontend.name)


@pytest.mark.frontends("eager", "eager-cuda")
def test_rows_before_the_first_sequence_are_zero(frontend):
    """query_start_loc may begin above 0; like those at the end, the rows before it are padding rows."""
    case = NAMES["more-queries-than-context"]
    inputs = cases.build(case)
    inputs.query = np.concatenate([np.full_like(inputs.query[:2], np.nan), inputs.query])
    inputs.query_start_loc[: len(case.sequences) + 1] += 2
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    want, want_lse = frontend.call("paged_attention_with_lse", cases.build(case).arrays(), **case.options())
    compare.assert_bitwise_equal(out[:2], np.zeros_like(out[:2]), frontend.name)
    assert np.isneginf(lse[:2]).all()
    compare.assert_bitwise_equal(out[2:], want, frontend.name)
    compare.assert_bitwise_equal(lse[2:], want_lse, frontend.name)


@pytest.mark.frontends("eager", "eager-cuda")
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("soft_cap", [2.0**-100, 2.0**13])
def test_soft_caps_at_the_ends_of_their_range(frontend, soft_cap, dtype):
    """Beyond them kernels would lose the scores, or overflow."""
    for head_dim in (64, 128):
        case = AttentionCase("caps", ((1, 300), (40, 70)), num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
        check(frontend, case.but(soft_cap=soft_cap))
        inputs = cases.build(case)
        inputs.query[...] = 0  # which must not be multiplied by an infinite 1 / soft_cap
        out, _ = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.but(soft_cap=soft_cap).options())
        assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.frontends("eager", "eager-cuda")
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scores", [(40, 120), (60, 62), (0, 1)], ids=lambda x: f"{x[0]}-{x[1]}")
def test_soft_caps_of_two_scores(frontend, scores, head_dim, dtype):
    """Rows see two keys of opposite values: the result is tanh of half the difference of their capped scores, where an
    error of the cap shows as nowhere else."""
    case = AttentionCase("two-scores", ((1, 300), (300, 300), (5, 40)), num_heads=4, num_kv_heads=2, head_dim=head_dim,
                         dtype=dtype, scale=1.0, soft_cap=50.0, sliding_window=2)  # fmt: skip
    inputs = cases.build(case, poison=False)
    inputs.query[...] = np.arange(head_dim) == 0
    k, v = reference.split_cache(inputs.kv_cache)
    k[...] = cases.rng_for("two-scores").uniform(*scores, k.shape)
    v[...] = np.where(np.arange(case.page_size) % 2 == 0, 1, -1)[:, None, None]
    out, lse = frontend.call("paged_attention_with_lse", inputs.arrays(), **case.options())
    want = reference.paged_attention(**inputs.arrays(), **case.options())
    base = baseline.paged_attention(inputs, **case.options())
    compare.assert_close(out, want[0], base[0], f"{frontend.name} {dtype}: out")
    compare.assert_close(lse, want[1], base[1], f"{frontend.name} {dtype}: lse")
