"""Steps launched ahead where no draft is found: the tokens of an engine without drafts, whatever comes between."""

from __future__ import annotations

import pytest

from tests.vllm import engines, tiny
from tests.vllm.engines import greedy, random, tokens
from vllm import SamplingParams
from xla_gpu.vllm import ahead, versions
from xla_gpu.vllm.program import compilations

# Drafts after three tokens alone that stood before: rarely with random weights.
RARE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 3}
LENGTHS = (5, 17, 1, 70, 12, 30)
NEW = 60


@pytest.fixture(scope="module")
def drafting(engine, llama):
    """Made after the other one, whose programs are compiled before tests count."""
    return engines.make(llama, speculative_config=RARE)


@pytest.fixture
def steps(drafting):
    """Of the steps launched ahead since the test began: how many, and how many were used."""
    state = engines.runner_of(drafting).ahead
    before, compiled = (state.launched, state.used), compilations()
    yield lambda: (state.launched - before[0], state.used - before[1])
    engines.state_is_released(drafting)
    assert compilations() == compiled


def test_most_steps_are_launched_ahead(engine, drafting, steps):
    """But the first ones, and those that need a new page, one in 16."""
    prompt, params = [[5, 6, 7]], random(NEW, seed=2, temperature=2.0)
    assert tokens(drafting, prompt, params) == tokens(engine, prompt, params)
    launched, used = steps()
    assert used >= (NEW - ahead.QUIET_STEPS) * 15 // 16 - 6
    assert launched - used <= 2


@pytest.mark.parametrize(
    "params",
    [
        greedy(NEW),
        random(NEW, seed=5, temperature=2.0),
        random(NEW, seed=5, temperature=1.5, top_p=0.9, logprobs=2),
        greedy(NEW, presence_penalty=1.0, repetition_penalty=1.2),
    ],
    ids=["greedy", "random", "logprobs", "penalties"],
)
def test_tokens(engine, drafting, steps, params):
    """Of requests that end together, and are read in chunks at the start."""
    prompts = tiny.prompts(LENGTHS)
    assert tokens(drafting, prompts, params) == tokens(engine, prompts, params)
    assert steps()[1] > 10


def test_requests_come_and_end(engine, drafting, steps):
    """Some at a length of their own, some at a stop token, which the host finds when the next step is launched."""
    prompts = tiny.prompts(LENGTHS) * 3
    free = tokens(engine, prompts, [random(NEW, seed=seed, temperature=2.0) for seed in range(len(prompts))])
    params = []
    for seed, found in enumerate(free):
        stops = {"stop_token_ids": [found[8 + seed]]} if seed % 2 else {"max_tokens": 12 + 2 * seed}
        params.append(SamplingParams(seed=seed, ignore_eos=True, **{"temperature": 2.0, "max_tokens": NEW, **stops}))
    assert tokens(drafting, prompts, params) == tokens(engine, prompts, params)
    launched, used = steps()
    assert launched > used > 10


def test_text_that_repeats_now_and_then(engine, drafting, steps):
    """Drafts between steps that were launched ahead."""
    prompts = [prompt + [70, 71, 72, 73] * 3 for prompt in tiny.prompts(LENGTHS)]
    few = {"allowed_token_ids": list(range(70, 78))}
    for seed in range(3):
        params = [random(NEW, seed=10 * seed + index, temperature=1.5, **few) for index in range(len(prompts))]
        for one, its in zip(prompts, params, strict=True):  # alone, where most steps have no draft
            assert tokens(drafting, [one], its) == tokens(engine, [one], its)
        assert tokens(drafting, prompts, params) == tokens(engine, prompts, params)
    launched, used = steps()
    assert launched > used > 10


def test_abort(engine, drafting, steps):
    prompts, params = tiny.prompts((20, 30, 40)), random(40, seed=3, temperature=2.0)
    expected = tokens(engine, prompts, params)
    assert engines.abort_one_of_three(drafting, prompts, params) == [expected[0], expected[2]]
    assert steps()[1] > 5


def test_sequences_of_the_greatest_length(engine, drafting, steps):
    params = SamplingParams(seed=4, temperature=2.0, max_tokens=None, ignore_eos=True)
    prompts = tiny.prompts((230, 200))
    got = tokens(drafting, prompts, params)
    assert got == tokens(engine, prompts, params)
    assert [len(prompt) + len(ids) for prompt, ids in zip(prompts, got, strict=True)] == [256, 256]
    assert steps()[1] > 5


def test_preemption(engine, llama):
    """Whose pages are another request's by the time that the step launched ahead would have been used."""
    llm = engines.make(llama, num_gpu_blocks_override=18, speculative_config=RARE)
    prompts, state = tiny.prompts((40, 50, 60, 70)), engines.runner_of(llm).ahead
    for seed in range(3):
        params = random(NEW, seed=seed, temperature=2.0)
        expected = tokens(engine, prompts, params)
        before, used = engines.metric(llm, "vllm:num_preemptions"), state.used
        assert tokens(llm, prompts, params) == expected
        assert engines.metric(llm, "vllm:num_preemptions") > before and state.used > used
    assert engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


def test_windows(tmp_path):
    """Block tables of layers with windows, whose pages are given back."""
    folder = tiny.save("gemma3", tmp_path)
    plain = engines.make(folder)
    llm = engines.make(folder, speculative_config=RARE)
    params = random(NEW, seed=1, temperature=3.0)
    assert tokens(llm, tiny.prompts(LENGTHS), params) == tokens(plain, tiny.prompts(LENGTHS), params)
    assert engines.runner_of(llm).ahead.used > 10


@pytest.mark.skipif(versions.vllm_version() >= "0.14", reason="vLLM 0.14 refuses min_tokens beside drafts")
def test_bad_words_and_min_tokens(engine, drafting, steps):
    """Which look at the tokens before: the host knows them when it chooses."""
    prompts = tiny.prompts(LENGTHS)
    free = tokens(engine, prompts, random(NEW, seed=6, temperature=2.0))
    params = [random(NEW, seed=6, temperature=2.0, stop_token_ids=[found[10]], min_tokens=20) for found in free]
    for one, found in zip(params, free, strict=True):
        one._bad_words_token_ids = [found[14:16], found[24:27]]
    assert tokens(drafting, prompts, params) == tokens(engine, prompts, params)
    assert steps()[1] > 10


def test_prompts_that_are_read_token_by_token(engine, llama):
    """Whose next token is the prompt's, not the one that such a step draws beside other requests' tokens."""
    llm = engines.make(llama, long_prefill_token_threshold=1, speculative_config=RARE)
    params, prompts = random(NEW, seed=8, temperature=2.0), tiny.prompts((3, 40, 25))
    assert tokens(llm, prompts, params) == tokens(engine, prompts, params)
    assert engines.runner_of(llm).ahead.used > 10
    engines.state_is_released(llm)
