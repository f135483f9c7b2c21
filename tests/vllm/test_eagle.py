"""Drafts of EAGLE and EAGLE-3 heads: those of the head by its definition, and the tokens of engines without drafts."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from tests.vllm import engines, heads, test_lora, tiny
from tests.vllm.copied_heads import LENGTHS, Copies, check_drafts
from tests.vllm.engines import greedy, metric, tokens
from xla_gpu.vllm import versions

METHODS = ("eagle", "eagle3")
NUM_DRAFTS = 3


def make(target: str, method: str, head: str, **options):
    drafts = {"method": method, "model": head, "num_speculative_tokens": NUM_DRAFTS}
    return engines.make(target, speculative_config=drafts, **options)


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
    return SimpleNamespace(
        method=request.param,
        target=target,
        head=head,
        make=functools.partial(make, target, request.param, head),
        reference=heads.Reference(request.param, target, head),
        plain=plain,
        drafting=llm,
        recorder=recorder,
    )


class TestCopies(Copies):
    pass


def test_steps_in_16_bits_and_caches_in_8(pair):
    """Of a model in float8, whose layers of few rows are one call each; the head's is not one of them, and plain."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": "fp8"}
    llm = pair.make(**options)
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
    llm = pair.make(enable_lora=True)
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
    vllms = versions.vllm_version() >= "0.17"  # which refuses it before
    text = "are not supported" if vllms else "expected a head of EagleLlamaForCausalLM, got"
    refused(options(speculative_config={**drafts, "model": other}), text)
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
        "--speculative-config: method: expected ngram, eagle, eagle3 or mtp, got medusa",
    )
