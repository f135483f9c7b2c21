"""A tiny Llama through the whole engine: tokens, sampling parameters, scheduling."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm import engines, tiny
from tests.vllm.engines import greedy, random, run, tokens
from vllm import SamplingParams, TokensPrompt
from xla_gpu.vllm import versions
from xla_gpu.vllm.program import compilations

LENGTHS = (5, 17, 33, 1, 70, 12, 100)
NEW = 24


@pytest.fixture(scope="module")
def reference(llama):
    return tiny.Reference(llama)


@pytest.fixture(autouse=True)
def nothing_compiled_after_warm_up(request):
    if "engine" not in request.fixturenames:  # a test that starts engines of its own
        yield
        return
    request.getfixturevalue("engine")
    before = compilations()
    yield
    assert compilations() == before


# ---- Tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_equal_transformers(engine, reference):
    """Chunked prefill beside decoding; then once more, out of the prefix cache."""
    prompts = tiny.prompts(LENGTHS)
    expected = [reference.greedy(prompt, NEW) for prompt in prompts]
    for is_cached in (False, True):
        outputs = engines.run(engine, prompts, greedy(NEW))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert any(output.num_cached_tokens for output in outputs) == is_cached
    engines.state_is_released(engine)


def test_counts_are_those_of_one_engine(llama):
    """Also after another one was made, with which vLLM's own metrics of a process begin anew."""
    engine, other = engines.make(llama), engines.make(llama)
    prompts = tiny.prompts((100,))
    tokens(engine, prompts, greedy(2))
    before = engines.metric(engine, "vllm:prefix_cache_hits")
    tokens(engine, prompts, greedy(2))
    assert engines.metric(engine, "vllm:prefix_cache_hits") - before == 96  # of whole pages
    tokens(other, prompts, greedy(2))
    assert engines.metric(other, "vllm:prefix_cache_hits") == 0


def test_a_program_takes_few_arguments(engine):
    """Each costs the host time: matrices, but neither a cache for each layer nor a weight for each norm."""
    runner = engines.runner_of(engine)
    matrices = sum(parameter.dim() > 1 for parameter in runner.model.parameters())
    caches = runner.caches.tensors
    assert sum(cache.nbytes for cache in caches) > (len(caches) - 1) * runner.caches.MAX_BYTES // 2
    for program in runner._programs._programs.values():
        assert matrices < len(program._arguments) <= matrices + 11 + len(caches)
        assert len(program.outputs) + program._num_state <= 6 + len(caches)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preemption(llama, reference, asynchronous):
    """A cache too small for all: requests are preempted and resumed, penalties and all."""
    options = {"token_buckets": [8, 64], "async_scheduling": asynchronous}
    llm = engines.make(llama, num_gpu_blocks_override=18, additional_config=options)
    prompts = tiny.prompts((40, 50, 60, 70))
    expected = [reference.greedy(prompt, 40) for prompt in prompts]
    assert tokens(llm, prompts, greedy(40)) == expected
    assert engines.metric(llm, "vllm:num_preemptions") > 0
    penalised = greedy(40, presence_penalty=1.5, repetition_penalty=1.2)
    alone = [tokens(llm, [prompt], penalised)[0] for prompt in prompts]
    before = engines.metric(llm, "vllm:num_preemptions")
    assert tokens(llm, prompts, penalised) == alone
    assert engines.metric(llm, "vllm:num_preemptions") > before
    before = engines.metric(llm, "vllm:num_preemptions")
    scored = run(llm, prompts, greedy(40, prompt_logprobs=0))
    assert [list(output.outputs[0].token_ids) for output in scored] == expected
    assert [len(output.prompt_logprobs) for output in scored] == [40, 50, 60, 70]
    assert engines.metric(llm, "vllm:num_preemptions") > before
    assert engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


def test_abort(engine, reference):
    prompts = tiny.prompts((20, 30, 40))
    expected = [reference.greedy(prompts[index], NEW) for index in (0, 2)]
    assert engines.abort_one_of_three(engine, prompts, greedy(NEW)) == expected
    engines.state_is_released(engine)


# ---- Randomness ------------------------------------------------------------------------------------------------------


def test_seed_decides_whatever_the_batch(engine):
    prompt, others = [5, 6, 7], tiny.prompts((3, 50, 9, 20))
    params = random(NEW, seed=1234, top_p=0.9)
    alone = tokens(engine, [prompt], params)[0]
    mixed = [greedy(NEW), random(5, top_k=3), random(NEW, temperature=2.0), greedy(7, presence_penalty=1.0)]
    assert tokens(engine, [*others, prompt], [*mixed, params])[-1] == alone
    assert tokens(engine, [prompt], random(NEW, seed=1235, top_p=0.9))[0] != alone


def test_requests_without_a_seed_differ(engine):
    first, second = tokens(engine, [[5, 6, 7]] * 2, random(NEW))
    assert first != second


def test_truncation_to_one_token_is_greedy(engine):
    expected = tokens(engine, [[5, 6, 7]], greedy(NEW))[0]
    for limit in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert tokens(engine, [[5, 6, 7]], random(NEW, **limit))[0] == expected, limit


def test_top_k_over_the_model_distribution(engine, reference):
    """First tokens of 400 requests beside the probabilities of transformers' logits, by chi-squared."""
    prompt, k, temperature, draws = [5, 6, 7], 4, 2.0, 400
    logits = reference.logits(prompt)[-1] / temperature
    best = logits.topk(k)
    chosen = [ids[0] for ids in tokens(engine, [prompt] * draws, random(1, top_k=k, temperature=temperature))]
    counts = np.array([chosen.count(token) for token in best.indices.tolist()])
    assert counts.sum() == draws
    expected = draws * best.values.softmax(0).double().numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 21.1  # 3 degrees of freedom, p = 0.0001


def test_several_outputs(engine):
    outputs = run(engine, [[5, 6, 7]], random(6, n=3, seed=7))[0].outputs
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    again = run(engine, [[5, 6, 7]], random(6, n=3, seed=7))[0].outputs
    assert [list(a.token_ids) for a in outputs] == [list(b.token_ids) for b in again]


# ---- Parameters that change logits -----------------------------------------------------------------------------------


def penalised_reference(reference, prompt, new, repetition, frequency, presence):
    """Greedy decoding with penalties, from transformers' logits."""
    ids = list(prompt)
    for _ in range(new):
        logits = reference.logits(ids)[-1].double()
        sampled = torch.tensor(ids[len(prompt) :], dtype=torch.long)
        counts = torch.zeros_like(logits).index_add_(0, sampled, torch.ones(len(sampled), dtype=torch.double))
        seen = counts > 0
        seen[torch.tensor(prompt)] = True
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - frequency * counts - presence * (counts > 0)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_penalties(engine, reference):
    """Long outputs of a small vocabulary, so that tokens repeat."""
    prompts = tiny.prompts((3, 40))
    values = {"repetition_penalty": 1.5, "frequency_penalty": 1.2, "presence_penalty": 1.7}
    expected = [penalised_reference(reference, prompt, 60, *values.values()) for prompt in prompts]
    assert tokens(engine, prompts, greedy(60, **values)) == expected
    assert expected != tokens(engine, prompts, greedy(60))


def test_logit_bias_and_allowed_tokens(engine):
    assert tokens(engine, [[5, 6]], greedy(4, logit_bias={11: 100.0})) == [[11] * 4]
    everything = {token: (100.0 if token == 12 else -1.0) for token in range(tiny.VOCAB_SIZE)}
    biased = tokens(engine, [[5, 6]] * 5, greedy(4, logit_bias=everything))  # more than one call of edits takes
    assert biased == [[12] * 4] * 5
    allowed = tokens(engine, [[5, 6], [7]], [random(20, allowed_token_ids=[4, 31, 32, 250]), greedy(20)])
    assert set(allowed[0]) <= {4, 31, 32, 250} and len(set(allowed[0])) > 1
    assert allowed[1] == tokens(engine, [[7]], greedy(20))[0]


def test_bad_words(engine):
    """Words of one token, and one of three whose first two come, so that its last is ruled out there alone."""
    text, tokenizer = "Hello", engine.get_tokenizer()
    letters = tokenizer.convert_tokens_to_ids(["a", "b"])
    for word, left in (("a", letters[1]), ("b", letters[0])):
        params = random(8, allowed_token_ids=letters, bad_words=[word])
        assert set(engine.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids) == {left}
    free = engine.generate([text], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    params = greedy(8)
    params._bad_words_token_ids = [list(free[1:4]), [*free[1:3], 3, 4], [9, 9, free[4]]]
    got = engine.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids
    assert list(got[:3]) == list(free[:3]) and got[3] != free[3]


def test_min_tokens_and_stops(engine):
    prompt = [5, 6, 7]
    free = tokens(engine, [prompt], greedy(12))[0]
    stop = free[3]
    stopped = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]))[0].outputs[0]
    assert list(stopped.token_ids) == free[: free.index(stop) + 1] and stopped.stop_reason == stop
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], min_tokens=8)
    later = list(run(engine, [prompt], params)[0].outputs[0].token_ids)
    assert len(later) >= 8 and stop not in later[:8]
    text = run(engine, [prompt], greedy(12, allowed_token_ids=[70]))[0].outputs[0].text
    params = greedy(12, allowed_token_ids=[70], stop=[text[0] * 3])
    assert run(engine, [prompt], params)[0].outputs[0].finish_reason == "stop"


def test_structured_output(engine):
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}")
        ),
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
        greedy(8),
    ]
    outputs = engine.generate(["Hello"] * 3, params, use_tqdm=False)
    year, month = outputs[0].outputs[0].text.split("-")
    assert len(year) == 4 and len(month) == 2 and (year + month).isdigit()
    assert outputs[1].outputs[0].text in ("yes", "no")
    assert (
        outputs[2].outputs[0].token_ids == engine.generate(["Hello"], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    )


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


def check_position(found: dict, expected: torch.Tensor, token: int, top: int) -> None:
    """One position's dictionary of vLLM beside log-probabilities of transformers."""
    best = expected.topk(top).indices.tolist()
    assert set(found) == {token, *best}
    for token_id, entry in found.items():
        assert math.isclose(entry.logprob, expected[token_id], rel_tol=1e-4, abs_tol=1e-4)
        assert entry.rank == int((expected > expected[token_id]).sum()) + 1


@pytest.mark.parametrize(
    "params", [greedy(6, logprobs=5, prompt_logprobs=3), random(6, seed=3, logprobs=5, prompt_logprobs=3)]
)
def test_logprobs(engine, reference, params):
    """Of sampled tokens and of a prompt that is read in chunks, some of them before the rest of the batch."""
    prompts = tiny.prompts((130, 20, 1))
    for prompt, output in zip(prompts, run(engine, prompts, params), strict=True):
        sampled = list(output.outputs[0].token_ids)
        expected = reference.logits(prompt + sampled).log_softmax(-1)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            check_position(output.prompt_logprobs[position], expected[position - 1], prompt[position], 3)
        for index, token in enumerate(sampled):
            check_position(output.outputs[0].logprobs[index], expected[len(prompt) + index - 1], token, 5)


def test_logprobs_of_a_prompt_whose_last_chunk_is_one_token(engine, reference):
    """That token predicts none of the prompt's."""
    for length in (65, 129):
        (prompt,) = tiny.prompts((length,))
        (output,) = run(engine, [prompt], greedy(2, prompt_logprobs=3))
        expected = reference.logits(prompt).log_softmax(-1)
        assert len(output.prompt_logprobs) == length
        for position in range(1, length):
            check_position(output.prompt_logprobs[position], expected[position - 1], prompt[position], 3)


def test_another_engine_with_longer_sequences(llama, reference):
    """VLLM's models share rotary embeddings, and with them the table, which is as long as an engine's sequences."""
    (prompt,) = tiny.prompts((80,))
    for max_model_len in (32, 96):
        llm = engines.make(llama, max_model_len=max_model_len, additional_config={"token_buckets": [64]})
        part = prompt[: max_model_len - 4]
        assert tokens(llm, [part], greedy(4)) == [reference.greedy(part, 4)]


# ---- What is refused -------------------------------------------------------------------------------------------------

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tensor_parallel_size": 2, "additional_config": {"compile_threads": 2}},
            "compile_threads: expected 1 with --t",
        ),
        ({"additional_config": {"buckets": [1]}}, "additional_config: expected keys token_buckets, async_scheduling"),
        ({"additional_config": {"compile_threads": 0}}, "compile_threads: expected an integer from 1 to 64, got 0"),
        ({"additional_config": {"token_buckets": [1000]}}, "token_buckets: expected a list of integers from 1"),
        (
            {"additional_config": {"token_buckets": 8}},
            "token_buckets: expected a list of integers from 1 to max_num_batched_tokens = 64, got 8",
        ),
        (
            {"additional_config": {"async_scheduling": "false"}},
            "additional_config: async_scheduling: expected true or false, got 'false'",
        ),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb: expected 0, got 1"),
        ({"logits_processors": ["a:B"]}, "--logits-processors: not supported: logits are results of an XLA program"),
        ({"load_format": "tensorizer"}, "--load-format: expected none of bitsandbytes, .* got tensorizer"),
        ({"model_impl": "transformers"}, "--model-impl: expected a model of vLLM's own, got transformers' Llama"),
        ({"seed": -1}, "--seed: expected a number from 0, got -1"),
        ({"convert": "embed"}, "--convert: expected none without --runner pooling, got embed"),
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype: expected auto or fp8 or"),
        ({"num_gpu_blocks_override": 16}, "--num-gpu-blocks-override: expected at least 17 for --max-model-len 256"),
    ],
)
def test_refused_at_start(llama, options, text):
    with pytest.raises(Exception, match=text):
        engines.make(llama, **options)


def test_models_with_images_are_refused_by_transformers(tmp_path):
    """Whose class has another name than the checkpoint's: not the text in a model with images."""
    model = tiny.save("mistral3_images", tmp_path)
    with pytest.raises(Exception, match="--model-impl: expected a model of vLLM's own, got transformers' Mistral3"):
        engines.make(model, model_impl="transformers", limit_mm_per_prompt={"image": 0})


@pytest.mark.skipif(versions.vllm_version() >= "0.17", reason="until vLLM 0.16")
def test_drafts_of_some_batches_are_refused(llama):
    with pytest.raises(Exception, match="--speculative-config: disable_by_batch_size: not supported"):
        engines.make(llama, speculative_config={**NGRAM, "disable_by_batch_size": 4})


@pytest.mark.parametrize(
    ("since", "options", "text"),
    [
        ("0.14", {"ubatch_size": 2}, "--ubatch-size: expected 0, got 2"),
        ("0.14", {"enable_return_routed_experts": True}, "--enable-return-routed-experts: not supported"),
        (
            "0.14",
            {"enable_lora": True, "enable_tower_connector_lora": True},
            "--enable-tower-connector-lora: not supported",
        ),
        ("0.16", {"weight_transfer_config": {"backend": "nccl"}}, "--weight-transfer-config: not supported"),
        (
            "0.16",
            {"speculative_config": {**NGRAM, "parallel_drafting": True}},
            "--speculative-config: parallel_drafting: not supported",
        ),
        ("0.17", {"offload_group_size": 2}, "--offload-group-size: expected 0, got 2"),
        ("0.17", {"offload_backend": "uva"}, "--offload-backend: expected auto, got uva"),
        (
            "0.17",
            {"speculative_config": {**NGRAM, "draft_load_config": {}}},
            "--speculative-config: draft_load_config: not supported",
        ),
        (
            "0.18",
            {"speculative_config": {**NGRAM, "rejection_sample_method": "probabilistic"}},
            "--speculative-config: rejection_sample_method: expected strict, got probabilistic",
        ),
        ("0.18", {"enable_ep_weight_filter": True}, "--enable-ep-weight-filter: not supported"),
    ],
)
def test_newer_options_refused_at_start(llama, since, options, text):
    if versions.vllm_version() < since:
        pytest.skip(f"an option of vLLM {since}")
    with pytest.raises(Exception, match=text):
        engines.make(llama, **options)


@pytest.mark.skipif(versions.vllm_version() < "0.15", reason="of vLLM 0.15")
def test_prompts_in_parts_are_refused(engine):
    process = engine.llm_engine.input_processor.process_inputs
    if versions.vllm_version() >= "0.17":
        process = functools.partial(process, supported_tasks=("generate",))
    prompt = TokensPrompt(prompt_token_ids=[5, 6, 7])
    with pytest.raises(ValueError, match=r"a prompt: expected it whole, got a part of one \(StreamingInput\)"):
        process("in-parts", prompt, greedy(4), resumable=True)
    assert process("whole", prompt, greedy(4)).prompt_token_ids == [5, 6, 7]


def test_a_length_below_one(llama):
    """vLLM 0.12.0 leaves it to the platform, 0.13.0 refuses it; for 0.14 it is the longest that the caches hold."""
    if versions.vllm_version() in ("0.12.0", "0.13.0"):
        text = "--max-model-len: expected a positive number, got -1|max_model_len\n.*greater than 0"
        with pytest.raises(Exception, match=text):
            engines.make(llama, max_model_len=-1)
        return
    llm = engines.make(llama, max_model_len=-1, kv_cache_memory_bytes=200 << 10)  # of 512 KiB for 512 positions
    chosen = llm.llm_engine.vllm_config.model_config.max_model_len
    assert 16 < chosen < tiny.MAX_POSITIONS
    assert tokens(llm, [[5, 6, 7]], greedy(4)) == [tiny.Reference(llama).greedy([5, 6, 7], 4)]
    assert engines.runner_of(llm).requests.token_ids.shape[1] == chosen


def test_positions_that_the_model_does_not_have(llama):
    """vLLM lets them through (conftest.py says so); XLA would read the rotary table's last row for them."""
    with pytest.raises(ValueError, match=r"--max-model-len: expected at most 512, .* got 513"):
        engines.make(llama, max_model_len=513)


def test_a_models_error_is_not_hidden(llama, monkeypatch):
    """Programs are traced to be compiled later: what their functions raise comes at once."""
    from xla_gpu.vllm.attention import XlaGpuAttention

    def refuse(*_):
        raise ValueError("this model's attention")

    monkeypatch.setattr(XlaGpuAttention, "_attend", refuse)
    with pytest.raises(ValueError, match="this model's attention"):
        engines.make(llama)


def test_a_cache_of_the_models_dtype_may_be_named(llama):
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=llama, dtype="bfloat16", kv_cache_dtype="bfloat16").create_engine_config()
    assert config.cache_config.cache_dtype == "bfloat16"
