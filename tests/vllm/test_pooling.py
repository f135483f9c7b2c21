"""Pooling models: embeddings, classes, scores and rewards equal to transformers' in float32."""

from __future__ import annotations

import os

import pytest
import torch
import transformers

from tests.vllm import engines, processes, tiny
from xla_gpu._runtime import cuda_driver

PROMPTS = tiny.prompts((5, 37, 130, 1))
# Prompts of 130 tokens are read in three steps.
TOLERANCE = {"rtol": 0, "atol": 2e-5}
WHOLE = {"max_num_batched_tokens": 256, "additional_config": {"token_buckets": [8, 64]}}


def wrapped(prompts):
    from vllm import TokensPrompt

    return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]


@torch.no_grad()
def states(folder: str) -> list[torch.Tensor]:
    """What the model's head would get, of each prompt."""
    model = tiny.Reference(folder).model.model
    return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def add(llm, name: str, prompt: list[int], task: str, **options) -> None:
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, engines.pooling(llm, task, **options))


def finish(llm) -> dict[str, torch.Tensor]:
    """Results of all requests, by their names."""
    found, engine = {}, llm.llm_engine
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs.data for output in engine.step() if output.finished}
    return found


def normalized(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """Folder and engine of a model whose hidden states are embeddings, of sizes that a user may choose."""
    folder = tiny.save("qwen3", tmp_path_factory.mktemp("embedder"))
    return folder, engines.make(folder, runner="pooling", hf_overrides={"is_matryoshka": True})


def embeddings(llm, prompts, **options):
    from vllm import PoolingParams

    outputs = llm.embed(wrapped(prompts), pooling_params=PoolingParams(**options), use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def test_embeddings(embedder):
    folder, llm = embedder
    assert llm.supported_tasks == ("embed", "token_embed")
    expected = states(folder)
    for _ in range(2):  # out of the prefix cache too
        for got, rows in zip(embeddings(llm, PROMPTS), expected, strict=True):
            torch.testing.assert_close(got, normalized(rows[-1]), **TOLERANCE)
    assert engines.metric(llm, "vllm:prefix_cache_hits") > 0
    for got, rows in zip(embeddings(llm, PROMPTS, dimensions=24, **{engines.NORMALIZE: False}), expected, strict=True):
        torch.testing.assert_close(got, rows[-1, :24], rtol=1e-4, atol=1e-4)
    assert engines.compiled_since_start(llm) == 0


def test_embeddings_of_tokens(embedder):
    """Of prompts that are read in several steps too, and whose prefix is known."""
    folder, llm = embedder
    embeddings(llm, PROMPTS)
    outputs = llm.encode(wrapped(PROMPTS), pooling_task="token_embed", use_tqdm=False)
    for output, rows in zip(outputs, states(folder), strict=True):
        torch.testing.assert_close(output.outputs.data, normalized(rows), **TOLERANCE)
    runner = engines.runner_of(llm)
    assert not runner._rows


def test_tasks_and_options_beside_each_other(embedder):
    folder, llm = embedder
    expected = states(folder)
    wanted = [
        (0, "embed", {}, lambda rows: normalized(rows[-1])),
        (1, "token_embed", {engines.NORMALIZE: False}, lambda rows: rows),
        (2, "token_embed", {}, normalized),
        (2, "embed", {"dimensions": 16}, lambda rows: normalized(rows[-1, :16])),
        (3, "embed", {engines.NORMALIZE: False}, lambda rows: rows[-1]),
    ]
    for index, (prompt, task, options, _) in enumerate(wanted):
        add(llm, f"beside-{index}", PROMPTS[prompt], task, **options)
    found = finish(llm)
    for index, (prompt, _, _, function) in enumerate(wanted):
        torch.testing.assert_close(found[f"beside-{index}"], function(expected[prompt]), rtol=1e-4, atol=1e-4)


def test_results_do_not_depend_on_the_batch(embedder):
    _, llm = embedder
    prompts = tiny.prompts((130, 7, 61, 12, 5), seed=3)
    together = embeddings(llm, prompts)
    llm.reset_prefix_cache()
    alone = [embeddings(llm, [prompt])[0] for prompt in prompts]
    # XLA chooses how products are summed by the rows of a step: on GPUs, and on some CPUs.
    torch.testing.assert_close(together, alone, **TOLERANCE)


def test_more_requests_than_a_step_has_and_aborts(embedder):
    folder, llm = embedder
    for index in range(20):
        add(llm, f"many-{index}", PROMPTS[2], ("embed", "token_embed")[index % 2])
    llm.llm_engine.step()
    llm.llm_engine.abort_request(["many-0", "many-1", "many-19"])
    found, expected = finish(llm), normalized(states(folder)[2])
    assert len(found) == 17
    for name, got in found.items():
        rows = expected[-1] if int(name.split("-")[1]) % 2 == 0 else expected
        torch.testing.assert_close(got, rows, **TOLERANCE)
    for _ in range(2):
        embeddings(llm, PROMPTS[:1])  # an ended request leaves one step later
    assert not engines.runner_of(llm)._rows


def test_prompts_that_begin_anew(embedder, tmp_path):
    """Rows of a prompt that was preempted between two of its steps are those of its second time."""
    folder, _ = embedder
    # Prompts take turns, so that they fill the caches together.
    llm = engines.make(folder, runner="pooling", num_gpu_blocks_override=18, long_prefill_token_threshold=16)
    prompts = tiny.prompts((250, 240, 230, 200), seed=4)
    model = tiny.Reference(folder).model.model
    for index, prompt in enumerate(prompts):
        add(llm, f"anew-{index}", prompt, "token_embed")
    found = finish(llm)
    assert engines.metric(llm, "vllm:num_preemptions") > 0
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = normalized(model(torch.tensor([prompt])).last_hidden_state[0])
        torch.testing.assert_close(found[f"anew-{index}"], expected, **TOLERANCE)


def test_wrong_requests(embedder):
    _, llm = embedder
    with pytest.raises(ValueError, match=r"prompt: expected token ids from 0 to 319, got 320|out of vocabulary"):
        embeddings(llm, [[3, 320]])
    with pytest.raises(ValueError, match=r"[Uu]nsupported task|does not support|not supported"):
        llm.classify(wrapped(PROMPTS[:1]), use_tqdm=False)
    assert len(embeddings(llm, PROMPTS[:1])) == 1  # and the engine goes on


def save_classifier(folder, labels: int, name: str = "qwen3"):
    """A folder with a classifier of the last token, and transformers' model of it."""
    tiny.save(name, folder)
    config = tiny.CONFIGS[name]()
    config.num_labels, config.pad_token_id = labels, 0
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return str(folder), model


@torch.no_grad()
def test_classes(tmp_path):
    folder, model = save_classifier(tmp_path, 3)
    llm = engines.make(folder)
    assert llm.supported_tasks == ("classify", "token_classify")
    for output, prompt in zip(llm.classify(wrapped(PROMPTS), use_tqdm=False), PROMPTS, strict=True):
        expected = model(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, **TOLERANCE)
    outputs = llm.encode(wrapped(PROMPTS), pooling_task="token_classify", use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        expected = model.score(model.model(torch.tensor([prompt])).last_hidden_state[0]).softmax(-1)
        torch.testing.assert_close(output.outputs.data, expected, **TOLERANCE)


@torch.no_grad()
def test_a_reranker_made_of_a_head(tmp_path):
    """As Qwen 3's: the score is what of two tokens the head finds more likely."""
    folder = tiny.save("qwen3", tmp_path)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["a", "b"],
        "is_original_qwen3_reranker": True,
    }
    llm = engines.make(folder, runner="pooling", hf_overrides=overrides)
    tokenizer = llm.get_tokenizer()
    texts = ["which of them", "the second one", "not this one, which is a longer one"]
    scores = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
    no, yes = tokenizer.convert_tokens_to_ids(["a", "b"])
    reference = tiny.Reference(folder)
    for text, score in zip(texts[1:], scores, strict=True):
        logits = reference.logits(tokenizer(texts[0] + text)["input_ids"])[-1]
        assert score == pytest.approx((logits[yes] - logits[no]).sigmoid().item(), abs=2e-5)


@pytest.mark.parametrize("chunked", [False, True])
def test_means(chunked, tmp_path):
    """Of a pooling that reads all rows vLLM divides no prompts, unless it is told to."""
    from vllm.config import PoolerConfig

    folder = tiny.save("llama", tmp_path)
    options = {"enable_chunked_prefill": True} if chunked else WHOLE
    llm = engines.make(folder, runner="pooling", pooler_config=PoolerConfig(pooling_type="MEAN"), **options)
    for got, rows in zip(embeddings(llm, PROMPTS), states(folder), strict=True):
        torch.testing.assert_close(got, normalized(rows.mean(0)), **TOLERANCE)


OVER_DEVICES = """
import sys
from tests.vllm import engines, test_pooling
llm = engines.make(sys.argv[1], runner="pooling", tensor_parallel_size=2)
found = test_pooling.embeddings(llm, test_pooling.PROMPTS)
print("RESULT", max((a - b).abs().max().item() for a, b in zip(found, test_pooling.expected(sys.argv[1]), strict=True)))
"""


def expected(folder: str) -> list[torch.Tensor]:
    """Embeddings of the last rows."""
    return [normalized(rows[-1]) for rows in states(folder)]


def test_over_two_devices(llama):
    """SPMD is for a whole process."""
    if os.environ.get("PJRT_DEVICE", "").upper() == "GPU" and len(cuda_driver.driver().gpus) < 2:
        pytest.skip("needs two GPUs")
    assert float(processes.run(["-c", OVER_DEVICES, llama]).line()) < TOLERANCE["atol"]


REFUSED = [
    ({"pooler_config": {"pooling_type": "MEAN"}, "enable_prefix_caching": True, **WHOLE}, "--enable-prefix-caching"),
    ({"enable_lora": True}, "--enable-lora: expected a model that generates"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "--speculative-config: expected a model that generates",
    ),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_refused(options, text, llama):
    from vllm.config import PoolerConfig

    if "pooler_config" in options:
        options = {**options, "pooler_config": PoolerConfig(**options["pooler_config"])}
    with pytest.raises(ValueError, match=text):
        engines.make(llama, runner="pooling", **options)
