"""Compiled programs and plans kept from earlier calls: each call gets its own, from memory and from disk, and what ran
before leaves no trace."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.common import baseline, cache_cases, cases, compare, frontends, reference
from tests.common.cases import AttentionCase
from tests.fuzz.programs import program
from tests.robustness import cached_program


def test_every_attribute_dtype_and_shape_in_one_process(frontend):
    cached_program.check(frontend)


def test_every_attribute_dtype_and_shape_in_one_graph(frontend):
    made = [(case, cases.build(case)) for case in cached_program.CASES]
    arrays = {f"{name}_{i}": x for i, (_, inputs) in enumerate(made) for name, x in inputs.arrays().items()}

    calls = [(list(inputs.arrays()), case.options()) for case, inputs in made]

    def body(ops, **tensors):
        results = []
        for i, (names, options) in enumerate(calls):
            mine = {name: tensors[f"{name}_{i}"] for name in names}
            results += ops.paged_attention_with_lse(**mine, **options)
        return tuple(results)

    got = frontend.run(body, arrays)
    for i, (case, inputs) in enumerate(made):
        want = reference.paged_attention(**inputs.arrays(), **case.options())
        base = baseline.paged_attention(inputs, **case.options())
        for g, w, y in zip(got[2 * i : 2 * i + 2], want, base, strict=True):
            compare.assert_close(g, w, y, f"{frontend.name} {case.name}")


@pytest.mark.frontends("jax", "jax-cuda", "torch_xla-cuda")
def test_from_a_persistent_compilation_cache(frontend, tmp_path):
    """A second process finds the first one's programs on disk, and calls its own handlers in them."""
    counts = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-m", "tests.robustness.cached_program", frontend.name, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        counts.append(json.loads(result.stdout.splitlines()[-1]))
    assert any(tmp_path.iterdir()), "nothing was cached"
    first, second = counts
    if frontend.framework == "jax":
        assert not first.get("cache_hits") and second["cache_hits"] == first["cache_misses"]
    else:
        assert first["stored"] == first["compiled"] >= 2 * len(cached_program.CASES)
        assert second["loaded"] == first["loaded"] + first["compiled"]
        assert second["compiled"] == second["unusable"] == 0


def test_the_variants_can_be_told_apart():
    """Each of them fails where it gets the program of another with the same shapes and dtypes."""
    made = [(case, cases.build(case)) for case in cached_program.CASES]
    for case, inputs in made:
        want, _ = reference.paged_attention(**inputs.arrays(), **case.options())
        base, _ = baseline.paged_attention(inputs, **case.options())
        for other, theirs in made:
            same = {k: (x.shape, x.dtype) for k, x in inputs.arrays().items()} == {
                k: (x.shape, x.dtype) for k, x in theirs.arrays().items()
            }
            if other.options() == case.options() or not same:
                continue
            wrong, _ = reference.paged_attention(**inputs.arrays(), **other.options())
            with pytest.raises(AssertionError):
                compare.assert_close(wrong, want, base)


REPLAYS = 1000
REPLAYED = {
    "decode-bf16": AttentionCase(
        "replayed-decode", ((1, 120),) * 5, num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16"
    ),
    "mixed-f32": AttentionCase("replayed-mixed", ((1, 90), (20, 60), (3, 40)), num_heads=4, num_kv_heads=2),
}


def replays(case: AttentionCase):
    """Batches of one shape: lengths, bounds and the number of sequences change, all of them on the device."""
    base = cases.build(case, poison=False)
    rng = cases.rng_for("replays")
    total = int(base.query_start_loc[len(case.sequences)])
    for _ in range(20):
        inputs = dict(base.arrays())
        live = int(rng.integers(0, len(case.sequences) + 1))
        starts = np.zeros_like(base.query_start_loc)
        starts[1 : live + 1] = np.sort(rng.integers(0, total + 1, live))
        lengths = base.context_lens.copy()
        lengths[:live] = rng.integers(0, [c for _, c in case.sequences][:live], endpoint=True)
        yield inputs | {"num_seqs": np.array([live], np.int32), "query_start_loc": starts, "context_lens": lengths}


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.frontends("jax", "torch_xla-compiled", "jax-cuda", "torch_xla-cuda-compiled")
def test_a_thousand_replays_of_one_program(frontend, name):
    """Whatever the last replay left in scratch, plans and threads: the results are right, and have the bits of a first
    run through another front end if there is one (the eager one compiles nothing)."""
    case = REPLAYED[name]
    batches = list(replays(case))
    other = frontends.beside(frontend) or frontend
    fresh = [other.call("paged_attention_with_lse", arrays, **case.options()) for arrays in batches]
    for i, arrays in enumerate(batches):
        want = reference.paged_attention(**arrays, **case.options())
        base = baseline.paged_attention(cases.AttentionInputs(**arrays), **case.options())
        for g, w, y in zip(fresh[i], want, base, strict=True):
            compare.assert_close(g, w, y, f"{other.name}: batch {i}")
    step = program(frontend, "paged_attention_with_lse", case.options())
    order = cases.rng_for("order").integers(0, len(batches), REPLAYS)
    for turn, i in enumerate(order):
        for g, w in zip(step(batches[i]), fresh[i], strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name}: replay {turn} of batch {i}")


def test_a_large_batch_then_a_small_one(frontend):
    """And back: another shape, another plan, no trace of the other's."""
    large = AttentionCase("large-batch", ((40, 90), (1, 600)) * 6, num_heads=8, num_kv_heads=4, dtype="bfloat16")
    small = AttentionCase("small-batch", ((1, 3),), num_heads=8, num_kv_heads=4, dtype="bfloat16", spare_seqs=0)
    same_shape = large.but(sequences=((1, 2), (9, 9)), padding_tokens=large.num_tokens - 10, spare_seqs=12)
    wanted = {}
    for turn in range(3):
        for case in (large, small, same_shape):
            got = frontend.call("paged_attention", cases.build(case).arrays(), **case.options())[0]
            compare.assert_bitwise_equal(
                got, wanted.setdefault(case.name, got), f"{frontend.name} {case.name}, turn {turn}"
            )
    for case in (large, small, same_shape):
        inputs = cases.build(case)
        want = reference.paged_attention(**inputs.arrays(), **case.options())[0]
        base = baseline.paged_attention(inputs, **case.options())[0]
        compare.assert_close(wanted[case.name], want, base, f"{frontend.name} {case.name}")


def test_a_failing_call_leaves_the_next_healthy(frontend, monkeypatch):
    """Of every operator that can fail, between calls of all of them, many times over."""
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    case = AttentionCase("healthy", ((2, 30), (9, 20)), num_heads=4, num_kv_heads=2, page_size=8)
    sound = cases.build(case)
    update = cache_cases.build_cache(cache_cases.CACHE_CASES[0])
    (want,) = frontend.call("paged_attention", sound.arrays(), **case.options())
    (stored,) = frontend.call("reshape_and_cache", update)
    for turn in range(3):
        wrong = cases.build(case)
        wrong.block_tables[turn % 2, 0] = -1
        past = dict(update, slot_mapping=np.full_like(update["slot_mapping"], 2**31 - 1))
        for operator, arrays, options in (
            ("paged_attention", wrong.arrays(), case.options()),
            ("reshape_and_cache", past, {}),
        ):
            with pytest.raises((ValueError, RuntimeError), match=operator):
                frontend.call(operator, arrays, **options)
            compare.assert_bitwise_equal(frontend.call("paged_attention", sound.arrays(), **case.options())[0], want)
            compare.assert_bitwise_equal(frontend.call("reshape_and_cache", update)[0], stored)
