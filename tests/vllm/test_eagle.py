"""Drafts of EAGLE and EAGLE-3 heads: those of the head by its definition, and the tokens of engines without drafts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm import engines, heads, test_lora, tiny
from tests.vllm.engines import greedy, metric, random, run, tokens
from vllm import SamplingParams
from xla_gpu.vllm.program import compilations

METHODS = ("eagle", "eagle3")
NUM_DRAFTS = 3
LENGTHS = (5, 17, 1, 70, 12, 30, 100)

# Choices between two tokens that are as close depend on the order of sums.
CLOSE = 1e-3


def make(target: str, method: str, head: str, **options):
    drafts = {"method": method, "model": head, "num_speculative_tokens": NUM_DRAFTS}
    return engines.make(target, speculative_config=drafts, **options)


def check_drafts(recorder: heads.Recorder, reference: heads.Reference, least: int) -> None:
    """That the drafts recorded are the head's, of up to 100 of the steps."""
    recorded = [pair for pair in recorder.drafts if pair[1]]
    compared = 0
    for before, drafts in recorded[:: -(-len(recorded) // 100)]:
        expected, closest = reference.drafts(before, len(drafts))
        if closest > CLOSE:
            assert drafts == expected, len(before)
            compared += len(drafts)
    assert compared >= least


# ---- Heads with random weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, settings",
    [
        ("eagle", {}),
        ("eagle3", {}),
        # Caches of another shape than the model's; drafts end where the head's positions do.
        ("eagle3", {"num_key_value_heads": 4, "max_position_embeddings": 64, "norm_before_residual": True}),
    ],
    ids=["eagle", "eagle3", "eagle3-settings"],
)
def test_drafts_are_those_of_the_head(method, settings, tmp_path):
    """Of prompts read in chunks beside others, out of the prefix cache, and beside rejected drafts."""
    target = tiny.save("llama", tmp_path / "target", {"num_hidden_layers": 6 if method == "eagle3" else 2})
    head = heads.save(method, target, tmp_path / "head", **settings)
    llm = make(target, method, head)
    recorder, plain = heads.Recorder(engines.runner_of(llm)), tiny.Reference(target)
    reference = heads.Reference(method, target, head)
    prompts = tiny.prompts(LENGTHS)
    expected = [plain.greedy(prompt, 24) for prompt in prompts]
    for _ in range(2):
        assert tokens(llm, prompts, greedy(24)) == expected
    longest = settings.get("max_position_embeddings", 256)
    check_drafts(recorder, reference, least=150)
    # One more than the head has positions, since a row drafts the token after the next one.
    assert max(len(before) + len(drafts) for before, drafts in recorder.drafts if drafts) <= longest + NUM_DRAFTS + 1
    past = [drafts for before, drafts in recorder.drafts if len(before) > longest + 1]
    assert not any(past) and bool(past) == (longest == 64)
    assert metric(llm, "vllm:prefix_cache_hits") > 0
    assert metric(llm, "vllm:spec_decode_num_draft_tokens") == recorder.drafted > 0
    assert engines.compiled_since_start(llm) == 0


def test_head_of_speculators(tmp_path):
    target = tiny.save("llama", tmp_path / "target", {"num_hidden_layers": 6})
    head = heads.save("eagle3", target, tmp_path / "head", norm_before_residual=True)
    reference = heads.Reference("eagle3", target, head)
    heads.as_speculators(head, target)
    llm = make(target, "eagle3", head)
    recorder = heads.Recorder(engines.runner_of(llm))
    tokens(llm, tiny.prompts((20, 50)), greedy(12))
    check_drafts(recorder, reference, least=50)


@pytest.mark.parametrize(
    ("method", "name"),
    [("eagle", "mistral"), ("eagle", "phi3"), ("eagle", "qwen3"), ("eagle3", "qwen2"), ("eagle3", "qwen3")],
)
def test_other_models(method, name, tmp_path):
    """Windows, whose pages are given back, in the head too; norms of heads in the model alone; vLLM's three layers."""
    sizes = {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8} if method == "eagle3" else {}
    target = tiny.save(name, tmp_path / "target", sizes)
    # For eight layers these are vLLM's, where the head names none.
    chosen, streams = {}, heads.STREAMS
    if name == "qwen2":
        chosen, streams = {"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)
    head = heads.save(method, target, tmp_path / "head", head_dim=32 if name == "qwen3" else 16, **chosen)
    llm = make(target, method, head)
    recorder, prompts = heads.Recorder(engines.runner_of(llm)), tiny.prompts(LENGTHS)
    plain = tiny.Reference(target)
    assert tokens(llm, prompts, greedy(24)) == [plain.greedy(prompt, 24) for prompt in prompts]
    window = heads.config_of(target).sliding_window if name == "mistral" else None
    check_drafts(recorder, heads.Reference(method, target, head, window, streams), least=150)


def test_head_of_another_width(tmp_path):
    """Than the model's, with an embedding of its own."""
    target = tiny.save("llama", tmp_path / "target", {"num_hidden_layers": 6})
    head = heads.save("eagle3", target, tmp_path / "head", hidden_size=96, target_hidden_size=64)
    llm = make(target, "eagle3", head)
    recorder = heads.Recorder(engines.runner_of(llm))
    tokens(llm, tiny.prompts((20, 50)), greedy(12))
    check_drafts(recorder, heads.Reference("eagle3", target, head), least=50)


# ---- Heads that compute what the model does --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=METHODS)
def pair(request, tmp_path_factory):
    """An engine without drafts, one with, and what the latter drafts."""
    target, head = heads.save_copy(request.param, tmp_path_factory.mktemp(request.param))
    plain = engines.make(target)
    llm = make(target, request.param, head)
    recorder = heads.Recorder(engines.runner_of(llm))
    return SimpleNamespace(method=request.param, target=target, head=head, plain=plain, drafting=llm, recorder=recorder)


@pytest.fixture(autouse=True)
def nothing_is_compiled_or_left(request):
    if "pair" not in request.fixturenames:
        yield
        return
    pair = request.getfixturevalue("pair")
    pair.recorder.clear()
    before = compilations()
    yield
    engines.state_is_released(pair.drafting)
    if request.node.originalname not in OF_OTHER_ENGINES:
        assert compilations() == before


OF_OTHER_ENGINES = ("test_adapters", "test_preemption", "test_steps_in_16_bits_and_caches_in_8")


def test_most_drafts_are_accepted(pair):
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
    check_drafts(pair.recorder, heads.Reference(pair.method, pair.target, pair.head), least=150)


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
def test_tokens_and_logprobs_are_those_without_drafts(pair, params):
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


def test_requests_of_all_kinds_beside_each_other(pair):
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


def test_structured_output(pair):
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
    expected = [output.outputs[0].text for output in pair.plain.generate(prompts, params, use_tqdm=False)]
    assert [output.outputs[0].text for output in pair.drafting.generate(prompts, params, use_tqdm=False)] == expected
    assert pair.recorder.accepted > 0


def test_abort(pair):
    prompts, params = tiny.prompts((20, 30, 40)), greedy(24)
    expected = tokens(pair.plain, prompts, params)
    assert engines.abort_one_of_three(pair.drafting, prompts, params) == [expected[0], expected[2]]


def test_sequences_of_the_greatest_length(pair):
    prompts, params = tiny.prompts((240, 225)), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = tokens(pair.plain, prompts, params)
    assert tokens(pair.drafting, prompts, params) == expected
    assert [len(prompt) + len(ids) for prompt, ids in zip(prompts, expected, strict=True)] == [256, 256]
    assert pair.recorder.accepted > 0


def test_preemption(pair):
    """A cache too small for all, which leaves drafts without pages: these are fewer, and no other page is written."""
    llm = make(pair.target, pair.method, pair.head, num_gpu_blocks_override=18)
    recorder, prompts = heads.Recorder(engines.runner_of(llm)), tiny.prompts((40, 50, 60, 70))
    for params in (greedy(60), random(60, seed=3, temperature=0.2)):
        expected = tokens(pair.plain, prompts, params)
        before = metric(llm, "vllm:num_preemptions")
        assert tokens(llm, prompts, params) == expected
        assert metric(llm, "vllm:num_preemptions") > before
    assert recorder.accepted > 0.4 * recorder.drafted
    check_drafts(recorder, heads.Reference(pair.method, pair.target, pair.head), least=150)
    assert engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


def test_steps_in_16_bits_and_caches_in_8(pair):
    """Of a model in float8, whose layers of few rows are one call each; the head's is not one of them, and plain."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": "fp8"}
    llm = make(pair.target, pair.method, pair.head, **options)
    runner = engines.runner_of(llm)
    recorder, layers = heads.Recorder(runner), [model.model.layers[0] for model in (runner.model, runner.head)]
    dtypes = [layer.mlp.down_proj.weight.dtype for layer in layers]
    assert dtypes == [torch.float8_e4m3fn, torch.bfloat16]
    assert runner.head.model.embed_tokens is runner.model.model.embed_tokens
    assert runner.head.lm_head is runner.model.lm_head
    found = tokens(llm, tiny.prompts(LENGTHS), greedy(24))
    assert [len(ids) for ids in found] == [24] * len(LENGTHS)
    assert recorder.accepted > 0.3 * recorder.drafted > 0


def test_adapters(pair, tmp_path):
    """Of the model alone: the head drafts from the states that they change."""
    reference = tiny.Reference(pair.target)
    adapter = test_lora.write(tmp_path / "adapter", reference.model, test_lora.MLP, 4, 1)
    prompts = tiny.prompts(test_lora.LENGTHS)
    expected = [test_lora.expected(pair.target, path, prompts) for path in (adapter, None)]
    llm = make(pair.target, pair.method, pair.head, enable_lora=True)
    recorder = heads.Recorder(engines.runner_of(llm))
    adapters = LoRARequest("one", 1, adapter), None
    assert [test_lora.tokens(llm, prompts, [one] * len(prompts)) for one in adapters] == expected
    assert expected[0] != expected[1] and recorder.accepted > 0
    assert engines.compiled_since_start(llm) == 0


# ---- What is refused -------------------------------------------------------------------------------------------------


def refused(options: dict, *said: str) -> None:
    with pytest.raises(ValueError) as error:
        engines.make(**options)
    for text in said:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("missing", "settings"),
    [("embed_tokens", {"hidden_size": 96, "target_hidden_size": 64}), ("lm_head", {})],
    ids=["embed_tokens", "lm_head"],
)
def test_head_without_a_matrix_that_the_model_has_in_another_size(missing, settings, tmp_path):
    target = tiny.save("llama", tmp_path / "target", {"num_hidden_layers": 6})
    head = heads.save("eagle3", target, tmp_path / "head", **settings)
    path = tmp_path / "head" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if missing not in name}, path)
    with pytest.raises(ValueError, match=f"--speculative-config: model: expected a head with {missing} of its own"):
        make(target, "eagle3", head)
    make(target, "eagle3", head, load_format="dummy")


def test_refusals(tmp_path):
    target = tiny.save("llama", tmp_path / "target")
    head = heads.save("eagle", target, tmp_path / "head")
    drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 2}

    def options(folder: str = target, **others) -> dict:
        return {"folder": folder, "speculative_config": drafts, **others}

    gemma = tiny.save("gemma2", tmp_path / "gemma2")
    refused(options(gemma), "eagle: expected a model of LlamaForCausalLM", "got Gemma2ForCausalLM")
    tree = {**drafts, "speculative_token_tree": "[(0,), (1,)]"}
    refused(options(speculative_config=tree), "speculative_token_tree: expected none")
    wide = tiny.save("llama_wide", tmp_path / "wide")
    refused(options(wide), "hidden_size: expected the model's, 256, got 64")
    few = heads.save("eagle", target, tmp_path / "few", vocab_size=64)
    refused(options(speculative_config={**drafts, "model": few}), "vocab_size: expected the model's, 320, got 64")
    other = heads.save("eagle", target, tmp_path / "other", architectures=["LlamaForCausalLMEagle3"])
    refused(options(speculative_config={**drafts, "model": other}), "expected a head of EagleLlamaForCausalLM, got")
    eagle3 = heads.save("eagle3", target, tmp_path / "eagle3")
    refused(
        options(speculative_config={**drafts, "method": "eagle3", "model": eagle3}),
        "eagle_aux_hidden_state_layer_ids: expected 3 of the model's 2 layers, got [1, 3, 5]",
    )
    plain = heads.save("eagle3", target, tmp_path / "plain", eagle_config={"use_aux_hidden_state": False})
    refused(
        options(speculative_config={**drafts, "method": "eagle3", "model": plain}),
        "use_aux_hidden_state: expected true, got false",
    )
    medusa = tmp_path / "medusa"
    medusa.mkdir()
    sizes = {"model_type": "medusa", "hidden_size": 64, "vocab_size": 320}
    (medusa / "config.json").write_text(json.dumps({**sizes, "architectures": ["MedusaModel"]}))
    refused(
        options(speculative_config={**drafts, "method": "medusa", "model": str(medusa)}),
        "--speculative-config: method: expected ngram, eagle or eagle3, got medusa",
    )
