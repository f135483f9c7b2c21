"""What engines do whose drafts come from a head that computes what the model does: most drafts are accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm import engines, heads, tiny
from tests.vllm.engines import greedy, metric, random, run, tokens
from vllm import SamplingParams
from xla_gpu.vllm.program import compilations

LENGTHS = (5, 17, 1, 70, 12, 30, 100)

# Choices between two tokens that are as close depend on the order of sums.
CLOSE = 1e-3


def check_drafts(recorder: heads.Recorder, reference: Any, least: int) -> None:
    """That the drafts recorded are the head's, of up to 100 of the steps."""
    recorded = [pair for pair in recorder.drafts if pair[1]]
    compared = 0
    for before, drafts in recorded[:: -(-len(recorded) // 100)]:
        expected, closest = reference.drafts(before, len(drafts))
        if closest > CLOSE:
            assert drafts == expected, len(before)
            compared += len(drafts)
    assert compared >= least


class Copies:
    """Tests that take a fixture ``pair``.

    It has ``target``, a model; ``plain``, an engine without drafts; ``make``, which makes one with drafts;
    ``drafting``, one of these; its ``recorder``, a heads.Recorder; ``reference``, which gives the head's drafts by its
    definition.
    """

    @pytest.fixture(autouse=True)
    def nothing_is_compiled_or_left(self, request, pair):
        pair.recorder.clear()
        before = compilations()
        yield
        engines.state_is_released(pair.drafting)
        if request.node.originalname != "test_preemption":  # which has an engine of its own
            assert compilations() == before

    def test_most_drafts_are_accepted(self, pair):
        """And the steps are fewer: one reads the prompt, each other one gives up to four tokens."""
        steps, runner = [], engines.runner_of(pair.drafting)
        launch = runner.execute_model
        runner.execute_model = lambda scheduled: steps.append(scheduled.total_num_scheduled_tokens) or launch(scheduled)
        prompt = tiny.prompts((20,))
        assert tokens(pair.drafting, prompt, greedy(41)) == tokens(pair.plain, prompt, greedy(41))
        del runner.execute_model
        assert pair.recorder.accepted > 0.4 * pair.recorder.drafted > 0
        assert len([total for total in steps if total]) <= 20
        assert tokens(pair.drafting, tiny.prompts(LENGTHS), greedy(24)) == tokens(
            pair.plain, tiny.prompts(LENGTHS), greedy(24)
        )
        assert pair.recorder.accepted > 0.4 * pair.recorder.drafted
        check_drafts(pair.recorder, pair.reference, least=150)

    @pytest.mark.parametrize(
        "params",
        [
            greedy(24, logprobs=3, prompt_logprobs=2),
            random(40, seed=5, temperature=0.2),
            random(40, seed=5, top_k=4, top_p=0.95, temperature=0.5),
            random(24, seed=5, logprobs=0),
            greedy(40, allowed_token_ids=list(range(50, 150))),
        ],
        ids=["logprobs", "cool", "truncated", "warm", "allowed"],
    )
    def test_tokens_and_logprobs_are_those_without_drafts(self, pair, params):
        prompts = tiny.prompts(LENGTHS)
        expected, got = run(pair.plain, prompts, params), run(pair.drafting, prompts, params)
        for wanted, found in zip(expected, got, strict=True):
            wanted, found = wanted.outputs[0], found.outputs[0]
            assert list(found.token_ids) == list(wanted.token_ids)
            for one, other in zip(wanted.logprobs or (), found.logprobs or (), strict=True):
                assert one.keys() == other.keys()
                values = ([entry.logprob for entry in found.values()] for found in (one, other))
                np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-4)
        if params.prompt_logprobs is not None:
            assert [len(output.prompt_logprobs) for output in got] == list(map(len, prompts))
        assert 0 < pair.recorder.accepted <= pair.recorder.drafted

    def test_requests_of_all_kinds_beside_each_other(self, pair):
        """Penalties have no drafts; stops end a request amid accepted ones."""
        prompts = tiny.prompts(LENGTHS) * 2
        free = tokens(pair.plain, prompts, greedy(30))
        kinds = [
            lambda ids: greedy(30),
            lambda ids: greedy(30, presence_penalty=0.5, repetition_penalty=1.1),
            lambda ids: SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[ids[13]]),
            lambda ids: random(17, seed=3, temperature=0.3),
        ]
        params = [kinds[index % len(kinds)](ids) for index, ids in enumerate(free)]
        for wanted, found in zip(run(pair.plain, prompts, params), run(pair.drafting, prompts, params), strict=True):
            wanted, found = wanted.outputs[0], found.outputs[0]
            assert (list(found.token_ids), found.finish_reason) == (list(wanted.token_ids), wanted.finish_reason)
        assert pair.recorder.accepted > 0

    def test_structured_output(self, pair):
        def constrained(seed: int, **what) -> SamplingParams:
            structured = StructuredOutputsParams(**what)
            return SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=structured)

        params = [
            constrained(1, regex="(ab){3,9}c"),
            greedy(24),
            constrained(2, json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
            constrained(3, regex="[a-zA-Z0-9 ]{30}"),
        ]
        prompts = ["ababab", "Hello", '{"a": 1}', "0101010101"]
        expected, got = (
            [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
            for llm in (pair.plain, pair.drafting)
        )
        assert got == expected
        assert pair.recorder.accepted > 0

    def test_abort(self, pair):
        prompts, params = tiny.prompts((20, 30, 40)), greedy(24)
        expected = tokens(pair.plain, prompts, params)
        assert engines.abort_one_of_three(pair.drafting, prompts, params) == [expected[0], expected[2]]

    def test_sequences_of_the_greatest_length(self, pair):
        prompts, params = tiny.prompts((240, 225)), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        expected = tokens(pair.plain, prompts, params)
        assert tokens(pair.drafting, prompts, params) == expected
        assert [len(prompt) + len(ids) for prompt, ids in zip(prompts, expected, strict=True)] == [256, 256]
        assert pair.recorder.accepted > 0

    def test_preemption(self, pair):
        """A cache too small for all leaves drafts without pages: these are fewer, and no other page is written."""
        llm = pair.make(num_gpu_blocks_override=18)
        recorder, prompts = heads.Recorder(engines.runner_of(llm)), tiny.prompts((40, 50, 60, 70))
        for params in (greedy(60), random(60, seed=3, temperature=0.2)):
            expected = tokens(pair.plain, prompts, params)
            before = metric(llm, "vllm:num_preemptions")
            assert tokens(llm, prompts, params) == expected
            assert metric(llm, "vllm:num_preemptions") > before
        assert recorder.accepted > 0.4 * recorder.drafted
        check_drafts(recorder, pair.reference, least=150)
        assert engines.compiled_since_start(llm) == 0
        engines.state_is_released(llm)
