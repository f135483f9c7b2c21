"""The sampler's functions beside NumPy, on the device and in eager PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm import SamplingParams
from xla_gpu.vllm.sampler import edits, logprobs, masks, penalties, truncation


@pytest.fixture(params=["eager", "xla"])
def to_device(request):
    if request.param == "eager":
        return lambda array: torch.from_numpy(np.asarray(array))
    import torch_xla

    device = torch_xla.device()
    return lambda array: torch.from_numpy(np.asarray(array)).to(device)


def kept_by_sorting(logits: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """What vLLM keeps: a float64 reference that sorts."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    weights[order[top_k:]] = 0
    before = np.concatenate([[0], np.cumsum(weights[order])[:-1]]) / weights.sum()
    weights[order[before >= top_p]] = 0
    return weights > 0


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0, 1000, 1),
        (0, 1, 1),
        (0, 50, 1),
        (0, 1000, 0.9),
        (0, 1000, 0.05),
        (0.1, 1000, 1),
        (0.01, 30, 0.7),
        (0, 3, 1e-6),
    ],
)
def test_truncation(to_device, min_p, top_k, top_p):
    rng = np.random.default_rng(0)
    logits = np.stack([rng.normal(size=1000), rng.normal(size=1000) * 8, rng.uniform(-1, 1, 1000)]).astype(np.float32)
    rows = np.ones(len(logits))
    got = truncation.truncate(
        to_device(logits),
        to_device((rows * min_p).astype(np.float32)),
        to_device((rows * top_k).astype(np.int32)),
        to_device((rows * top_p).astype(np.float32)),
    )
    got = got.cpu().numpy()
    for row in range(len(logits)):
        kept = kept_by_sorting(logits[row], min_p, top_k, top_p)
        assert np.array_equal(np.isfinite(got[row]), kept), (row, np.isfinite(got[row]).sum(), kept.sum())
        assert np.array_equal(got[row][kept], logits[row][kept])


def test_ties_are_kept(to_device):
    logits = to_device(np.array([[3, 1, 1, 0]], np.float32))
    one = to_device(np.array([1.0], np.float32))
    got = truncation.truncate(logits, one * 0, to_device(np.array([2], np.int32)), one).cpu()
    assert torch.isfinite(got).tolist() == [[True, True, True, False]]


def test_masks(to_device):
    vocabulary = 100  # not a multiple of 32
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, vocabulary)).astype(np.float32)
    bitmask = masks.all_allowed(3, vocabulary)
    allowed = {1: [0, 31, 32, 63, 99], 2: [95]}
    for row, tokens in allowed.items():
        bitmask[row] = masks.only(tokens, vocabulary)
    got = masks.apply(to_device(logits), to_device(bitmask)).cpu().numpy()
    assert np.array_equal(got[0], logits[0])
    for row, tokens in allowed.items():
        assert np.flatnonzero(np.isfinite(got[row])).tolist() == tokens


def test_penalties(to_device):
    vocabulary, prompt, sampled = 50, [3, 3, 7, 9], [9, 11, 11, 11]
    tokens, values = penalties.history(np.array(prompt + sampled, np.int32), len(prompt))
    assert len(tokens) == len(set(tokens.tolist()))
    counts = to_device(np.full((4, vocabulary), 77, np.int32))  # what another request left behind
    packed = np.empty(2 + 2 * penalties.MAX_ENTRIES, np.int32)
    packed[:2] = 2, 1
    packed[2 : 2 + penalties.MAX_ENTRIES] = tokens[0]
    packed[2 + penalties.MAX_ENTRIES :] = values[0]
    packed[2 : 2 + len(tokens)] = tokens
    packed[2 + penalties.MAX_ENTRIES : 2 + penalties.MAX_ENTRIES + len(values)] = values
    penalties.load(to_device(packed), counts)
    penalties.count(counts, to_device(np.array([2, 2], np.int32)), to_device(np.array([13, 13], np.int32)))
    sampled += [13, 13]
    row = counts.cpu()[2].numpy()
    expected = np.bincount(sampled, minlength=vocabulary)
    assert np.array_equal(row & (penalties.IN_PROMPT - 1), expected)
    assert np.flatnonzero(row & penalties.IN_PROMPT).tolist() == sorted(set(prompt))

    logits = np.random.default_rng(0).normal(size=(1, vocabulary)).astype(np.float32)
    repetition, frequency, presence = 1.3, 0.4, 0.7
    seen = np.isin(np.arange(vocabulary), prompt + sampled)
    wanted = np.where(seen, np.where(logits[0] > 0, logits[0] / repetition, logits[0] * repetition), logits[0])
    wanted = wanted - frequency * expected - presence * (expected > 0)
    one = to_device(np.ones(1, np.float32))
    got = penalties.apply(to_device(logits), counts[2:3], one * repetition, one * frequency, one * presence)
    np.testing.assert_allclose(got.cpu().numpy()[0], wanted, rtol=1e-5, atol=1e-6)


def test_edits(to_device):
    logits = np.zeros((3, 10), np.float32)
    infinity = float("inf")
    listed = [(0, 4, edits.NO_CONDITION, 2.5), (1, 5, 7, -infinity), (1, 6, 8, -infinity), (2, 9, -1, -infinity)]
    ((places, values),) = edits.pack(listed, unused_row=2)
    last = np.array([0, 7, 0], np.int32)
    got = edits.apply(to_device(logits), to_device(places), to_device(values), to_device(last)).cpu().numpy()
    assert got[0, 4] == 2.5 and got[1, 5] == -infinity and got[1, 6] == 0 and got[2, 9] == -infinity
    assert np.count_nonzero(got) == 3


def test_stop_tokens_that_are_none():
    """vLLM takes any integer; each would end the engine, or rule out another token."""
    params = SamplingParams(min_tokens=2, stop_token_ids=[-1, 3, 2**31 - 1, 2**31, 2**70])
    listed = edits.of_request(0, SimpleNamespace(params=params), 1)
    assert listed == [(0, token, edits.NO_CONDITION, -np.inf) for token in (3, 2**31 - 1)]
    assert edits.pack(listed, unused_row=1)[0][0][edits.MAX_EDITS + 1] == 2**31 - 1


def test_more_edits_than_one_call_takes():
    listed = [(0, token, edits.NO_CONDITION, 1.0) for token in range(edits.MAX_EDITS + 3)]
    packed = edits.pack(listed, unused_row=1)
    assert [int(np.count_nonzero(values)) for _, values in packed] == [edits.MAX_EDITS, 3]


def test_logprobs(to_device):
    rng = np.random.default_rng(0)
    scores, tokens = rng.normal(size=(4, 60)).astype(np.float32), np.array([5, 0, 59, 33], np.int32)
    ids, values, rank = (part.cpu().numpy() for part in logprobs.gather(to_device(scores), to_device(tokens), 7))
    order = np.argsort(-scores, -1)
    assert np.array_equal(ids[:, 0], tokens) and np.array_equal(ids[:, 1:], order[:, :7])
    assert np.array_equal(values, np.take_along_axis(scores, ids.astype(np.int64), -1))
    assert np.array_equal(rank, (order == tokens[:, None]).argmax(-1) + 1)
