"""sample: its random numbers, its truncation, its distribution, and that a row's token is its own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.common import cases, compare, layer_cases, reference

EAGER = pytest.mark.frontends("eager", "eager-cuda")


def call(frontend, arrays):
    token, logprob = frontend.call("sample", arrays)
    assert token.dtype == np.int32 and logprob.dtype == np.float32
    return token, logprob


def assert_sampled(frontend, arrays) -> None:
    """Each token is what the rules choose, up to the rounding of float32 at the edges of what is kept."""
    token, logprob = call(frontend, arrays)
    layer_cases.assert_sampled(arrays, token, logprob, frontend.name)


def test_random_numbers_are_philox():
    """Known answers of the Random123 library: counters and keys of zeros, and of digits of pi."""
    assert reference.philox(0, 0, 4).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = reference.philox(0xA4093822, 7, 40)
    assert len(set(words.tolist())) == 40


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_values(frontend, dtype):
    assert_sampled(frontend, layer_cases.sampling(dtype, 12, 1000))


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("vocab", [1, 3, 8, 1023, 32000, 128256])
@EAGER
def test_vocabularies(frontend, dtype, vocab):
    assert_sampled(frontend, layer_cases.sampling(dtype, 5 if vocab > 10000 else 40, vocab))


@EAGER
def test_the_host_agrees_to_the_bit(frontend):
    """What a row's token and its log-probability are does not depend on the processor."""
    from tests.common import frontends

    for dtype, vocab in (("float32", 5000), ("bfloat16", 128256), ("float16", 777)):
        arrays = layer_cases.sampling(dtype, 24, vocab, seed=3)
        host = frontends.ALL["eager"].call("sample", arrays)
        for got, want in zip(call(frontend, arrays), host, strict=True):
            compare.assert_bitwise_equal(got, want, f"{frontend.name} {dtype}")


@EAGER
def test_bits_of_a_row_are_its_own(frontend):
    arrays = layer_cases.sampling("bfloat16", 150, 9000)
    whole = call(frontend, arrays)
    for rows in ([3], [149, 7, 7, 0], list(range(40, 80))):
        for got, want in zip(call(frontend, {n: x[rows] for n, x in arrays.items()}), whole, strict=True):
            compare.assert_bitwise_equal(got, want[rows], f"{frontend.name} {rows[:4]}")


def options(rows: int, **given) -> dict[str, np.ndarray]:
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    dtypes |= {"seed": np.int64, "step": np.int32}
    usual = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 11, "step": np.arange(rows)}
    return {n: np.broadcast_to(np.asarray((usual | given)[n], d), rows).copy() for n, d in dtypes.items()}


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """In standard deviations above its mean, classes with few expected counts together."""
    expected = probabilities * counts.sum()
    few = expected < 20
    observed = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


RULES = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5, "min_p": 0.05},
    {"top_k": 7},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@EAGER
def test_distribution(frontend, rule):
    """Chi-square against float64: 60 000 draws of a vocabulary of 60, by step and by seed."""
    rows, vocab = 30_000, 60
    logits = (cases.rng_for("distribution").standard_normal(vocab) * 2).astype(np.float32)
    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rule
    kept = reference.kept_tokens(logits, *numbers.values())
    weights = np.where(kept, np.exp(logits.astype(np.float64) / numbers["temperature"]), 0)
    probabilities = weights / weights.sum()
    for given in ({"step": np.arange(rows)}, {"step": 5, "seed": np.arange(rows) * 7919}):
        arrays = {"logits": np.broadcast_to(logits, (rows, vocab)).copy(), **options(rows, **rule, **given)}
        token, _ = call(frontend, arrays)
        counts = np.bincount(token, minlength=vocab)
        assert not counts[~kept].any()
        assert abs(chi_square(counts, probabilities)) < 5, given.keys()


@EAGER
def test_ties_and_special_values(frontend):
    inf, nan = np.inf, np.nan
    logits = np.array(
        [
            [1, 5, 5, 2, -inf, 5, 0, 0],  # 0: greedy, the first of equals
            [1, nan, 5, 2, 0, 0, 0, 0],  # 1: a NaN
            [-inf] * 8,  # 2: nothing to choose
            [1, inf, 3, inf, 0, 0, 0, 0],  # 3: infinities share all
            [-0.0, 0.0, -1, -1, -1, -1, -1, -1],  # 4: zeros are equal
            [2, 2, 2, 2, -inf, -inf, -inf, -inf],  # 5: top_k = 1 keeps equals
            [-inf, -inf, -3, -inf, -inf, -inf, -inf, -inf],  # 6: one
            [1, 2, 3, 4, 5, 6, 7, 8],  # 7: top_p = 0
            [1, 2, 3, 4, 5, 6, 7, 8],  # 8: min_p = 1
        ],
        np.float32,
    )
    arrays = {"logits": logits, **options(9, temperature=[0, 1, 1, 1, 0, 1, 1, 1, 1])}
    arrays["top_k"][5], arrays["top_p"][7], arrays["min_p"][8] = 1, 0, 1
    seen = set()
    for step in range(40):
        arrays["step"][:] = step
        token, logprob = call(frontend, arrays)
        assert token[[0, 1, 2, 4, 6, 7, 8]].tolist() == [1, -1, -1, 0, 2, 7, 7]
        assert np.isnan(logprob[[1, 2]]).all() and logprob[6] == 0
        assert token[3] in (1, 3) and token[5] in (0, 1, 2, 3)
        np.testing.assert_allclose(logprob[[3, 5]], np.log([0.5, 0.25]), atol=1e-6)
        seen |= {(3, int(token[3])), (5, int(token[5]))}
    assert len(seen) == 6, seen


@EAGER
def test_far_and_near_logits(frontend):
    """Distances beyond the bins that a search begins with, and logits that are nearly equal."""
    rng = cases.rng_for("far")
    for spread, shift in ((1e-6, 0.0), (1e-3, 900.0), (3e4, 0.0), (1e30, 0.0), (1e-30, 0.0)):
        logits = (rng.standard_normal((16, 2000)) * spread + shift).astype(np.float32)
        numbers = options(16, temperature=[spread, 1] * 8, top_k=[0, 3, 50, 1999] * 4, top_p=[0.9, 0.5, 1, 1e-4] * 4)
        assert_sampled(frontend, {"logits": logits, **numbers})


WRONG = [("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.5), ("min_p", -0.1)]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
@EAGER
def test_options_out_of_range(frontend, name, value, monkeypatch):
    arrays = layer_cases.sampling("float32", 6, 50)
    arrays[name][4] = value
    if frontend.platform == "cuda":
        token, logprob = call(frontend, arrays)
        assert token[4] == -1 and np.isnan(logprob[4]) and (np.delete(token, 4) >= 0).all()
        monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    with pytest.raises(ValueError, match=rf"sample: {name}\[4\]: expected .*, got "):
        call(frontend, arrays)


@EAGER
def test_no_rows(frontend):
    token, logprob = call(frontend, layer_cases.sampling("float32", 0, 10))
    assert token.shape == logprob.shape == (0,)
