"""Speculative decoding: drafts, what is made of them, and that engines with drafts give the tokens of those without."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch_xla
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm import engines, tiny
from tests.vllm.engines import greedy, metric, random, run, tokens
from vllm import SamplingParams
from xla_gpu.vllm import versions
from xla_gpu.vllm.block_tables import BlockTables
from xla_gpu.vllm.ngram import NgramProposer
from xla_gpu.vllm.program import compilations
from xla_gpu.vllm.requests import Batch, RequestTable
from xla_gpu.vllm.sampler import edits
from xla_gpu.vllm.speculation import DraftRows
from xla_gpu.vllm.step_layout import StepLayout
from xla_gpu.vllm.step_packer import StepPacker

DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Of few tokens even random weights choose some again.
FEW = {"allowed_token_ids": [70, 71, 72, 73]}


def taken(**parameters) -> dict:
    """What vLLM lets through beside drafts: before 0.14 everything."""
    return parameters if versions.vllm_version() in ("0.12.0", "0.13.0") else {}


# ---- Parts -----------------------------------------------------------------------------------------------------------


def drafts_by_comparing(tokens: list[int], most: int, shortest: int, longest: int, max_model_len: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                after = start + length
                return tokens[after : after + min(most, max(0, max_model_len - len(tokens)))]
    return []


def test_drafts_follow_the_longest_ngram_where_it_stood_first():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(2000):
        # Tokens whose bytes are found at odd places too.
        vocabulary = np.array([0, 1, 256, 257, 65536, 16777216][: rng.integers(1, 7)])
        given = rng.choice(vocabulary, rng.integers(1, 24))
        shortest, longest = sorted(rng.integers(1, 5, 2).tolist())
        most, limit = int(rng.integers(1, 5)), int(rng.integers(len(given), 40))
        got = NgramProposer(most, shortest, longest, limit).propose(given.astype(np.int32))
        assert got == drafts_by_comparing(given.tolist(), most, shortest, longest, limit)
        found += bool(got)
    assert found > 500


def test_rows_of_a_step():
    requests = [SimpleNamespace(req_id=name) for name in "abc"]
    batch = Batch(requests, np.array([4, 0, 2], np.int32), np.ones(3, np.int32))
    rows = DraftRows.of(batch, {"c": [7, 8], "a": [5]})
    assert rows.request.tolist() == [0, 0, 1, 2, 2, 2] and rows.number.tolist() == [0, 1, 0, 0, 1, 2]
    assert rows.batch.slots.tolist() == [4, 4, 0, 2, 2, 2] and rows.batch.requests[3] is requests[2]
    # b reads 10 tokens of its prompt.
    assert rows.step_rows(np.array([2, 10, 3], np.int32)).tolist() == [0, 1, 11, 12, 13, 14]
    assert rows.before() == [[], [5], [], [], [7], [7, 8]]
    sampled = np.array([True, False, True])
    assert rows.accept([5, 6, 1, 7, 9, 3], sampled) == [[5, 6], [], [7, 9]]
    assert rows.accept([4, 6, 1, 7, 8, 3], sampled) == [[4], [], [7, 8, 3]]
    masks = np.arange(4)[:, None]
    found = rows.grammar(["b", "c"], masks, sampled)
    # A row for a request that the step has not is nobody's.
    assert rows.grammar(["b", "gone", "c"], np.insert(masks, 1, 9, 0), sampled) == found
    assert {row: int(words[0]) for row, words in found.items()} == {3: 1, 4: 2, 5: 3}


def test_steps_without_drafts():
    """Their rows are the requests, and they are packed from a template: what is not rewritten must not change."""
    tables = BlockTables(max_seqs=3, max_model_len=32, block_sizes=[8], device=torch_xla.device())
    table = RequestTable(3, 32, tables, seed=0)
    packer = StepPacker(table, tables, unused_slot=3)
    given = {"a": [5, 6, 7], "b": list(range(10, 17))}
    new = [
        SimpleNamespace(
            req_id=name,
            sampling_params=SamplingParams(),
            prompt_token_ids=prompt,
            lora_request=None,
            mm_features=[],
            block_ids=[[1 + 2 * index, 2 + 2 * index]],
            num_computed_tokens=0,
        )
        for index, (name, prompt) in enumerate(given.items())
    ]
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
    step = {"finished_req_ids": (), "preempted_req_ids": (), "scheduled_cached_reqs": none}
    table.update(SimpleNamespace(scheduled_new_reqs=new, **step))
    batch = table.batch(SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1}))
    layout = StepLayout(num_tokens=4, max_seqs=3, num_groups=1, max_updates=8, max_draft_rows=4)
    rows, general = DraftRows.of(batch, {}), DraftRows.of(batch, {"another": [1]})
    for name in ("drafts", "first", "request", "number"):
        assert np.array_equal(getattr(rows, name), getattr(general, name))
    assert rows.batch is batch and np.array_equal(general.batch.slots, batch.slots)
    for token in (40, 41, 42):
        for slot in batch.slots.tolist():
            table.num_computed[slot] = table.num_tokens[slot]
            table.put(slot, [token + slot])
            table.num_tokens[slot] += 1
        got = layout.unpack(packer.decode(layout, batch))
        assert got["tokens"].tolist()[:2] == [token + slot for slot in batch.slots.tolist()]
        expected = layout.unpack(packer.pack(layout, batch, batch.ones, rows.step_rows(batch.ones)))
        for name, part in expected.items():
            if not name.startswith("update"):  # the pages went with the first step
                assert np.array_equal(got[name], part), name


def test_bad_words_beside_drafts():
    params = SamplingParams()
    params._bad_words_token_ids = [[1, 2, 3], [3, 9], [4]]
    request = SimpleNamespace(params=params, outputs=[7, 1])
    listed = [
        [token for _, token, _, _ in edits.of_request(0, request, 2 + len(drafts), drafts)]
        for drafts in ([], [2], [2, 3], [5, 2, 3])
    ]
    assert listed == [[4], [3, 4], [9, 4], [9, 4]]
    request.outputs = [2]  # fewer than a bad word has
    assert [token for _, token, _, _ in edits.of_request(0, request, 1, [])] == [4]


# ---- Engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(engine, llama):
    """Made after the other one, whose programs are compiled before tests count."""
    return engines.make(llama, speculative_config=CONFIG)


@pytest.fixture(autouse=True)
def nothing_is_compiled_or_left(request):
    if "drafting" not in request.fixturenames:
        yield
        return
    llm = request.getfixturevalue("drafting")
    before = compilations()
    yield
    engines.state_is_released(llm)
    assert compilations() == before


def repeated(lengths: tuple[int, ...] = (5, 17, 1, 70, 12, 30)) -> list[list[int]]:
    return [(prompt * 3)[:100] for prompt in tiny.prompts(lengths)]


def test_steps_wait_for_each_other(drafting):
    core = drafting.llm_engine.engine_core.engine_core
    assert not core.async_scheduling and core.use_spec_decode


def test_greedy_tokens(drafting, llama):
    """With prompts read in chunks beside; once more out of the prefix cache."""
    reference = tiny.Reference(llama)
    prompts = repeated()
    expected = [reference.greedy(prompt, 24) for prompt in prompts]
    before = metric(drafting, DRAFTED)
    assert tokens(drafting, prompts, greedy(24)) == expected
    assert metric(drafting, DRAFTED) > before
    assert tokens(drafting, prompts, greedy(24)) == expected


@pytest.mark.parametrize(
    "params",
    [
        greedy(40, **FEW),
        greedy(40, **FEW, **taken(logit_bias={71: 1.0})),
        random(40, **FEW, seed=5),
        random(40, **FEW, seed=5, temperature=0.5, top_p=0.9, **taken(min_p=0.05)),
        random(40, seed=5, top_k=3, temperature=0.5),
        greedy(24, **FEW, logprobs=3, prompt_logprobs=2),
        random(24, **FEW, seed=5, logprobs=0),
    ],
)
def test_tokens_and_logprobs_are_those_without_drafts(engine, drafting, params):
    drafted, accepted = metric(drafting, DRAFTED), metric(drafting, ACCEPTED)
    prompts = repeated()
    expected, got = run(engine, prompts, params), run(drafting, prompts, params)
    for wanted, found in zip(expected, got, strict=True):
        wanted, found = wanted.outputs[0], found.outputs[0]
        assert list(found.token_ids) == list(wanted.token_ids)
        for one, other in zip(wanted.logprobs or (), found.logprobs or (), strict=True):
            assert one.keys() == other.keys()
            assert [entry.rank for entry in one.values()] == [entry.rank for entry in other.values()]
            values = ([entry.logprob for entry in found.values()] for found in (one, other))
            np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-4)
    if params.prompt_logprobs is not None:
        assert [len(output.prompt_logprobs) for output in got] == list(map(len, prompts))
    drafted, accepted = metric(drafting, DRAFTED) - drafted, metric(drafting, ACCEPTED) - accepted
    assert 0 < accepted < drafted
    if params.allowed_token_ids:
        assert accepted > drafted / 8


def test_few_steps_for_text_that_repeats(drafting):
    steps, runner = [], engines.runner_of(drafting)
    launch = runner.execute_model
    runner.execute_model = lambda scheduled: steps.append(scheduled.total_num_scheduled_tokens) or launch(scheduled)
    params = greedy(41, allowed_token_ids=[70])
    assert tokens(drafting, [[70] * 8], params) == [[70] * 41]
    del runner.execute_model
    assert len([total for total in steps if total]) == 11  # the prompt's, and 10 with three drafts each


def test_a_seed_decides_whatever_the_batch(drafting):
    prompt, params = [70, 71, 70, 71, 72], random(24, **FEW, seed=1234, top_p=0.95)
    alone = tokens(drafting, [prompt], params)[0]
    others = [greedy(24, **FEW), random(9, top_k=3), greedy(7, presence_penalty=1.0), random(12, **FEW, logprobs=2)]
    assert tokens(drafting, [*repeated((5, 40, 9, 20)), prompt], [*others, params])[-1] == alone


def test_penalties_have_no_drafts(engine, drafting):
    drafted = metric(drafting, DRAFTED)
    params = greedy(24, **FEW, presence_penalty=0.5, repetition_penalty=1.1)
    assert tokens(drafting, repeated(), params) == tokens(engine, repeated(), params)
    assert metric(drafting, DRAFTED) == drafted
    # Beside requests that have.
    both = [params, greedy(24, **FEW)] * 3
    assert tokens(drafting, repeated(), both) == tokens(engine, repeated(), both)
    assert metric(drafting, DRAFTED) > drafted


def test_stops_bad_words_and_min_tokens(engine, drafting):
    prompts = repeated()
    free = tokens(engine, prompts, greedy(24, **FEW))
    stops = [ids[9] for ids in free]
    words = [[ids[3:5], ids[8:11]] for ids in free]
    several = []
    for stop, pair in zip(stops, words, strict=True):
        later = taken(min_tokens=6)
        several.append(SamplingParams(temperature=0, max_tokens=24, **FEW, stop_token_ids=[stop], **later))
        several.append(greedy(24, **FEW))
        several[-1]._bad_words_token_ids = pair
    text = run(engine, prompts[:1], greedy(24, **FEW))[0].outputs[0].text
    several += [greedy(24, **FEW, stop=[text[6:8]]), SamplingParams(temperature=0, max_tokens=5, **FEW)]
    twice = [prompt for prompt in prompts for _ in range(2)] + prompts[:1] * 2
    for wanted, found in zip(run(engine, twice, several), run(drafting, twice, several), strict=True):
        wanted, found = wanted.outputs[0], found.outputs[0]
        assert (list(found.token_ids), found.text, found.finish_reason, found.stop_reason) == (
            list(wanted.token_ids),
            wanted.text,
            wanted.finish_reason,
            wanted.stop_reason,
        )


def test_structured_output(engine, drafting):
    def constrained(seed: int, **what) -> SamplingParams:
        structured = StructuredOutputsParams(**what)
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=structured)

    params = [
        constrained(1, regex="(ab){3,9}c"),
        greedy(24, **FEW),
        constrained(2, json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        constrained(3, regex="[01]{30}"),
    ]
    prompts = ["ababab", "Hello", '{"a": 1}', "0101010101"]
    accepted = metric(drafting, ACCEPTED)
    expected = [output.outputs[0].text for output in engine.generate(prompts, params, use_tqdm=False)]
    assert [output.outputs[0].text for output in drafting.generate(prompts, params, use_tqdm=False)] == expected
    assert metric(drafting, ACCEPTED) > accepted


def test_abort(engine, drafting):
    prompts, params = repeated((20, 30, 40)), greedy(24, **FEW)
    expected = tokens(engine, prompts, params)
    assert engines.abort_one_of_three(drafting, prompts, params) == [expected[0], expected[2]]


def test_sequences_of_the_greatest_length(engine, drafting):
    prompts = [prompt[:90] + [70] * 150 for prompt in repeated((90, 30))]
    expected = tokens(engine, prompts, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, **FEW))
    assert tokens(drafting, prompts, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, **FEW)) == expected
    assert [len(prompt) + len(ids) for prompt, ids in zip(prompts, expected, strict=True)] == [256, 256]


def test_preemption(engine, llama):
    """A cache too small for all, and a prefix cache of what was accepted alone."""
    llm = engines.make(llama, num_gpu_blocks_override=18, speculative_config=CONFIG)
    prompts = repeated((40, 50, 60, 70))
    for params in (greedy(60, **FEW), random(60, **FEW, seed=3)):
        expected = tokens(engine, prompts, params)
        before = metric(llm, "vllm:num_preemptions")
        assert tokens(llm, prompts, params) == expected
        assert metric(llm, "vllm:num_preemptions") > before
    assert metric(llm, ACCEPTED) > 0 and engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_other_models(name, tmp_path):
    """Block tables of windows, whose pages are given back behind rejected drafts; experts."""
    folder = tiny.save(name, tmp_path)
    plain = engines.make(folder)
    llm = engines.make(folder, speculative_config=CONFIG)
    for params in (greedy(60), greedy(60, **FEW)):
        assert tokens(llm, repeated(), params) == tokens(plain, repeated(), params)
    assert metric(llm, ACCEPTED) > 0
