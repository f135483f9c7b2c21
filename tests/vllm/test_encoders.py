"""Models that attend in both directions: embeddings, classes and scores equal to transformers' in float32."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from tests.vllm import engines, tiny, tiny_encoders

PROMPTS = tiny.prompts((5, 37, 130, 1))
TOLERANCE = {"rtol": 0, "atol": 2e-5}
WHOLE = {"max_num_batched_tokens": 256}  # prompts are read in one step


def wrapped(prompts):
    from vllm import TokensPrompt

    return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]


def make(folder: str, **options):
    return engines.make(folder, **{"runner": "pooling", **WHOLE, **options})


def embeddings(llm, prompts, **options) -> list[torch.Tensor]:
    from vllm import PoolingParams

    outputs = llm.embed(wrapped(prompts), pooling_params=PoolingParams(**options), use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def normalized(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@torch.no_grad()
def states(model, prompts=PROMPTS) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


# ---- Embeddings ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=tiny_encoders.CONFIGS)
def embedder(request, tmp_path_factory):
    """transformers' model, and an engine."""
    folder, model = tiny_encoders.save(request.param, tmp_path_factory.mktemp(request.param))
    return model, make(folder)


def test_embeddings(embedder):
    """Of the first token, and of every one."""
    model, llm = embedder
    assert llm.supported_tasks == ("embed", "token_embed")
    expected = states(model)
    for got, rows in zip(embeddings(llm, PROMPTS), expected, strict=True):
        torch.testing.assert_close(got, normalized(rows[0]), **TOLERANCE)
    for got, rows in zip(embeddings(llm, PROMPTS, **{engines.NORMALIZE: False}), expected, strict=True):
        torch.testing.assert_close(got, rows[0], rtol=1e-4, atol=1e-4)
    outputs = llm.encode(wrapped(PROMPTS), pooling_task="token_embed", use_tqdm=False)
    for output, rows in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.outputs.data, normalized(rows), **TOLERANCE)
    assert engines.compiled_since_start(llm) == 0


def test_results_do_not_depend_on_the_batch(embedder):
    """More requests than a step has, whose steps have other requests and sizes than they have alone."""
    model, llm = embedder
    prompts = tiny.prompts((130, 7, 61, 12, 5, 90, 33, 1, 250, 64, 2), seed=3)
    together = embeddings(llm, prompts)
    for got, rows in zip(together, states(model, prompts), strict=True):
        torch.testing.assert_close(got, normalized(rows[0]), **TOLERANCE)
    alone = [embeddings(llm, [prompt])[0] for prompt in prompts]
    torch.testing.assert_close(together, alone, **TOLERANCE)


def test_no_memory_is_taken_for_caches(embedder):
    _, llm = embedder
    runner = engines.runner_of(llm)
    assert runner.caches.tensors == [] and runner.caches.block_sizes == []


def test_requests_that_end_early(embedder):
    model, llm = embedder
    engine = llm.llm_engine
    for index in range(20):
        params = engines.pooling(llm, ("embed", "token_embed")[index % 2])
        engine.add_request(f"many-{index}", {"prompt_token_ids": PROMPTS[2]}, params)
    found = {output.request_id: output.outputs.data for output in engine.step() if output.finished}
    engine.abort_request(["many-18", "many-19"])
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs.data for output in engine.step() if output.finished}
    assert len(found) == 18
    expected = normalized(states(model)[2])
    for name, got in found.items():
        rows = expected[0] if int(name.split("-")[1]) % 2 == 0 else expected
        torch.testing.assert_close(got, rows, **TOLERANCE)
    assert not runner_rows(llm)


def runner_rows(llm) -> dict:
    return engines.runner_of(llm)._rows


def test_too_long_and_wrong_prompts(embedder):
    _, llm = embedder
    with pytest.raises(ValueError, match=r"maximum model length|longer than|maximum input length"):
        embeddings(llm, tiny.prompts((257,)))
    with pytest.raises(ValueError, match=r"prompt: expected token ids from 0 to 319, got 320|out of vocabulary"):
        embeddings(llm, [[3, 320]])
    assert len(embeddings(llm, PROMPTS[:1])) == 1


@pytest.mark.parametrize("pooling", ["MEAN", "LAST"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_other_poolings(name, pooling, tmp_path):
    from vllm.config import PoolerConfig

    folder, model = tiny_encoders.save(name, tmp_path)
    llm = make(folder, pooler_config=PoolerConfig(pooling_type=pooling))
    for got, rows in zip(embeddings(llm, PROMPTS), states(model), strict=True):
        torch.testing.assert_close(got, normalized(rows.mean(0) if pooling == "MEAN" else rows[-1]), **TOLERANCE)


@pytest.mark.parametrize("name", tiny_encoders.ROTARY)
def test_encoders_with_rotary_positions(name, tmp_path):
    """Nomic's BERT and GTE, beside their definitions: transformers has no code of its own for them."""
    folder, states_of = tiny_encoders.save_rotary(name, tmp_path)
    for got, prompt in zip(embeddings(make(folder), PROMPTS), PROMPTS, strict=True):
        torch.testing.assert_close(got, normalized(states_of(prompt)[0]), **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_decoders_in_both_directions(name, tmp_path):
    folder, model = tiny_encoders.save_decoder(name, tmp_path)
    for got, prompt in zip(embeddings(make(folder), PROMPTS), PROMPTS, strict=True):
        mask = torch.zeros(1, 1, len(prompt), len(prompt))  # it hides nothing
        rows = model(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0]
        torch.testing.assert_close(got, normalized(rows[-1]), **TOLERANCE)


def test_gemma_3_in_both_directions(tmp_path):
    """As EmbeddingGemma: the mean of the rows, and windows on either side in five of six layers."""
    from vllm.config import PoolerConfig

    folder, model = tiny_encoders.save_decoder("gemma3", tmp_path)
    llm = make(folder, pooler_config=PoolerConfig(pooling_type="MEAN"))
    for got, rows in zip(embeddings(llm, PROMPTS), states(model), strict=True):
        torch.testing.assert_close(got, normalized(rows.mean(0)), **TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype, tmp_path):
    folder, model = tiny_encoders.save("bert", tmp_path)
    llm = make(folder, dtype=dtype)
    for got, rows in zip(embeddings(llm, PROMPTS), states(model), strict=True):
        torch.testing.assert_close(got, normalized(rows[0]), rtol=0, atol=0.05 if dtype == "bfloat16" else 0.006)


@torch.no_grad()
def test_sparse_embeddings(tmp_path):
    """SPLADE's: of each vocabulary entry the largest weight that a token gives it."""
    folder, model = tiny_encoders.save("bert", tmp_path, t.AutoModelForMaskedLM, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")  # transformers leaves out what is another's too
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    llm = make(folder, hf_overrides={"architectures": ["BertSpladeSparseEmbeddingModel"]})
    prompts = [[1, *prompt, 2] for prompt in PROMPTS]
    for got, prompt in zip(embeddings(llm, prompts), prompts, strict=True):
        weights = model(torch.tensor([prompt])).logits[0].relu().log1p()
        torch.testing.assert_close(got, weights[1:-1].amax(0), rtol=1e-4, atol=1e-4)


# ---- Classes and scores ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "modernbert", "modernbert-mean"])
@torch.no_grad()
def test_classes(name, tmp_path):
    name, _, pooling = name.partition("-")
    changes = {"num_labels": 3, **({"classifier_pooling": pooling or "cls"} if name == "modernbert" else {})}
    folder, model = tiny_encoders.save(name, tmp_path, t.AutoModelForSequenceClassification, **changes)
    llm = make(folder)
    assert llm.supported_tasks == ("classify", "token_classify")
    for output, prompt in zip(llm.classify(wrapped(PROMPTS), use_tqdm=False), PROMPTS, strict=True):
        expected = model(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "modernbert"])
@torch.no_grad()
def test_scores(name, tmp_path):
    """Of pairs, in which BERT tells the texts by their tokens' types; some longer than others."""
    folder, model = tiny_encoders.save(name, tmp_path, t.AutoModelForSequenceClassification, num_labels=1)
    llm = make(folder)
    assert "score" in llm.supported_tasks
    tokenizer = llm.get_tokenizer()
    texts = ["which of them", "the second one", "not this one, which is a longer one", "x"]
    scores = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
    for text, score in zip(texts[1:], scores, strict=True):
        inputs = tokenizer(texts[0], text, return_tensors="pt")
        if name == "bert":
            assert inputs["token_type_ids"].sum() == len(text) + 1
            untyped = model(**{**inputs, "token_type_ids": torch.zeros_like(inputs["token_type_ids"])})
            assert abs(score - untyped.logits.sigmoid().item()) > 1e-3
        assert score == pytest.approx(model(**inputs).logits.sigmoid().item(), abs=2e-5)
    # Beside prompts without types.
    for output, prompt in zip(llm.classify(wrapped(PROMPTS), use_tqdm=False), PROMPTS, strict=True):
        assert output.outputs.probs[0] == pytest.approx(model(torch.tensor([prompt])).logits.sigmoid().item(), abs=2e-5)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@torch.no_grad()
def test_classes_of_tokens(name, tmp_path):
    folder, model = tiny_encoders.save(name, tmp_path, t.AutoModelForTokenClassification, num_labels=4)
    llm = make(folder)
    outputs = llm.encode(wrapped(PROMPTS), pooling_task="token_classify", use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        expected = model(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(output.outputs.data, expected, **TOLERANCE)


def test_token_types_that_would_be_ignored_are_refused(tmp_path):
    """A tokenizer that tells the texts of a pair by types, of a model that has none."""
    folder, _ = tiny_encoders.save("modernbert", tmp_path, t.AutoModelForSequenceClassification, num_labels=1)
    tiny.save_tokenizer(tmp_path, types=True)
    llm = make(folder)
    with pytest.raises(ValueError, match=r"prompt: expected tokens of one type, .* got a second one from token 3 on"):
        llm.score("a", "b", use_tqdm=False)
    assert len(llm.classify(wrapped(PROMPTS), use_tqdm=False)) == len(PROMPTS)


# ---- Refused ---------------------------------------------------------------------------------------------------------
REFUSED = [
    ({"enable_chunked_prefill": True}, "--enable-chunked-prefill: expected false with attention in both directions"),
    ({"enable_prefix_caching": True}, "--enable-prefix-caching: expected false with attention in both directions"),
    ({"tensor_parallel_size": 2}, "--tensor-parallel-size: expected 1 with attention in both directions, got 2"),
    ({"hf_overrides": {"moe_every_n_layers": 2}}, "a mixture of experts in RobertaModel: not supported"),
    ({"enable_lora": True}, "--enable-lora: expected a model that generates"),
    ({"max_model_len": 298, "max_num_batched_tokens": 512}, "--max-model-len: expected at most 297, the positions"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(options, text, tmp_path):
    folder, _ = tiny_encoders.save("roberta", tmp_path)
    with pytest.raises(ValueError, match=text):
        make(folder, **options)


def test_a_decoder_that_would_look_back_alone_is_refused(tmp_path):
    """vLLM's GPT-2 does not read is_causal."""
    folder = tiny.save("gpt2", tmp_path)
    with pytest.raises(ValueError, match=r"expected attention in both directions .* GPT2LMHeadModel does not have"):
        make(folder, hf_overrides={"is_causal": False})
