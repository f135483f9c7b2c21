"""Drafts of multi-token prediction (MTP): the layer's by its definition, and tokens of engines without drafts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from tests.vllm import engines, heads, mtp_heads, test_lora, test_quantization, tiny
from tests.vllm.copied_heads import LENGTHS, Copies, check_drafts
from tests.vllm.engines import greedy, metric, tokens
from tests.vllm.test_latent_attention import WIDE

NUM_DRAFTS = 3
# vLLM's names: it calls all of them mtp.
METHODS = {"mimo": "mimo_mtp", "deepseek": "deepseek_mtp", "glm": "glm4_moe_mtp", "ernie": "ernie_mtp"}


def make(target: str, method: str = "mtp", num_drafts: int = NUM_DRAFTS, **options):
    drafts = {"method": method, "num_speculative_tokens": num_drafts}
    return engines.make(target, speculative_config=drafts, **options)


# ---- Layers with random weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", METHODS)
def test_drafts_are_those_of_the_layer(kind, tmp_path):
    """Of prompts read in chunks beside others, out of the prefix cache, and beside rejected drafts."""
    target = mtp_heads.save(kind, tmp_path)
    llm = make(target, METHODS[kind])
    recorder, plain = heads.Recorder(engines.runner_of(llm)), tiny.Reference(target)
    prompts = tiny.prompts(LENGTHS)
    expected = [plain.greedy(prompt, 24) for prompt in prompts]
    for _ in range(2):
        assert tokens(llm, prompts, greedy(24)) == expected
    check_drafts(recorder, mtp_heads.Reference(kind, target), least=150)
    assert metric(llm, "vllm:prefix_cache_hits") > 0
    assert metric(llm, "vllm:spec_decode_num_draft_tokens") == recorder.drafted > 0
    assert engines.compiled_since_start(llm) == 0
    runner = engines.runner_of(llm)
    assert runner.head.embed_tokens is runner.model.model.embed_tokens and runner.head.lm_head is runner.model.lm_head


def test_one_draft(tmp_path):
    """As the layers are trained."""
    target = mtp_heads.save("mimo", tmp_path)
    llm = make(target, num_drafts=1)
    recorder, prompts, plain = heads.Recorder(engines.runner_of(llm)), tiny.prompts(LENGTHS), tiny.Reference(target)
    assert tokens(llm, prompts, greedy(24)) == [plain.greedy(prompt, 24) for prompt in prompts]
    assert {len(drafts) for _, drafts in recorder.drafts} == {0, 1}
    check_drafts(recorder, mtp_heads.Reference("mimo", target), least=60)


def test_the_model_of_mimo_without_drafts(tmp_path):
    """Its states are those in front of the norm, which stands before the output matrix."""
    target = mtp_heads.save("mimo", tmp_path)
    prompts, plain = tiny.prompts(LENGTHS), tiny.Reference(target)
    llm = engines.make(target)
    assert tokens(llm, prompts, greedy(24)) == [plain.greedy(prompt, 24) for prompt in prompts]


def test_an_output_matrix_of_its_own(tmp_path):
    target = mtp_heads.save("deepseek", tmp_path, own_output=True)
    llm = make(target)
    runner = engines.runner_of(llm)
    assert runner.head.lm_head is not runner.model.lm_head
    recorder = heads.Recorder(runner)
    tokens(llm, tiny.prompts((20, 50)), greedy(12))
    check_drafts(recorder, mtp_heads.Reference("deepseek", target), least=50)


def test_latents_are_cached_as_the_models(tmp_path):
    """Of three layers, and no keys and values."""
    llm = make(mtp_heads.save("deepseek", tmp_path))
    runner = engines.runner_of(llm)
    text = llm.llm_engine.vllm_config.model_config.hf_text_config
    layers, width = text.num_hidden_layers + 1, text.kv_lora_rank + text.qk_rope_head_dim
    (cache,) = runner.caches.tensors
    pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert cache.shape == (layers * pages, 16, width)
    assert not any("kv_b_proj" in name for name, _ in runner.head.named_parameters())


def test_positions_of_the_drafts_end(tmp_path):
    """Where the user says so; requests go on without."""
    drafts = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "max_model_len": 64}
    target = mtp_heads.save("mimo", tmp_path)
    llm = engines.make(target, speculative_config=drafts)
    recorder, prompts, plain = heads.Recorder(engines.runner_of(llm)), tiny.prompts((50, 5)), tiny.Reference(target)
    assert tokens(llm, prompts, greedy(40)) == [plain.greedy(prompt, 40) for prompt in prompts]
    past = [drafts for before, drafts in recorder.drafts if len(before) > 65]
    assert past and not any(past)
    check_drafts(recorder, mtp_heads.Reference("mimo", target), least=80)


def test_quantised_weights(tmp_path):
    """The layer's too, where the checkpoint has them."""
    meant = mtp_heads.save("deepseek", tmp_path / "meant", WIDE)
    stored = mtp_heads.quantise(meant, tmp_path / "stored", *test_quantization.LAYOUTS["fp8-blocks"])
    llm, plain = make(stored), tiny.Reference(meant)
    runner = engines.runner_of(llm)
    assert runner.head.block.self_attn.o_proj.weight.dtype is torch.float8_e4m3fn
    recorder, prompts = heads.Recorder(runner), tiny.prompts((5, 37, 100))
    assert tokens(llm, prompts, greedy(16)) == [plain.greedy(prompt, 16) for prompt in prompts]
    check_drafts(recorder, mtp_heads.Reference("deepseek", meant), least=60)
    assert engines.compiled_since_start(llm) == 0


def test_random_weights(tmp_path):
    """Drawn on the device: those of the host are never touched."""
    target = mtp_heads.save("deepseek", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    llm = make(target, load_format="dummy")
    head = engines.runner_of(llm).head
    for weight in (head.fc.weight, head.block.self_attn.mla_attn.mla_attn.key_weight):
        assert 0 < weight.cpu().abs().max() <= 1e-3
    assert len(tokens(llm, tiny.prompts((5,)), greedy(4))[0]) == 4


# ---- Layers that compute what the model does -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mimo", "deepseek"])
def pair(request, tmp_path_factory):
    """An engine without drafts, one with, and what the latter drafts."""
    target = mtp_heads.save_copy(request.param, tmp_path_factory.mktemp(request.param))
    llm = make(target)
    return SimpleNamespace(
        target=target,
        make=functools.partial(make, target),
        reference=mtp_heads.Reference(request.param, target),
        plain=engines.make(target),
        drafting=llm,
        recorder=heads.Recorder(engines.runner_of(llm)),
    )


class TestCopies(Copies):
    pass


@pytest.mark.parametrize("kind", ["glm", "ernie"])
def test_most_drafts_of_other_models_are_accepted(kind, tmp_path):
    target = mtp_heads.save_copy(kind, tmp_path)
    llm, plain, prompts = make(target), tiny.Reference(target), tiny.prompts(LENGTHS)
    recorder = heads.Recorder(engines.runner_of(llm))
    assert tokens(llm, prompts, greedy(24)) == [plain.greedy(prompt, 24) for prompt in prompts]
    assert recorder.accepted > 0.4 * recorder.drafted > 0
    check_drafts(recorder, mtp_heads.Reference(kind, target), least=150)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # Its layers of few rows are calls of their own.
        ("mimo", {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": "fp8"}),
        # In which the residual stream is scaled.
        ("deepseek", {"dtype": "float16"}),
        ("deepseek", {"dtype": "bfloat16", "quantization": "fp8"}),
    ],
    ids=["mimo", "deepseek", "deepseek-fp8"],
)
def test_16_bits_and_8(kind, options, tmp_path):
    llm = make(mtp_heads.save_copy(kind, tmp_path), **options)
    runner = engines.runner_of(llm)
    rounded = torch.float8_e4m3fn if "quantization" in options else torch.float16
    for layer in (runner.model.model.layers[0], runner.head.block):
        assert layer.self_attn.o_proj.weight.dtype is rounded
    recorder = heads.Recorder(runner)
    assert [len(ids) for ids in tokens(llm, tiny.prompts(LENGTHS), greedy(24))] == [24] * len(LENGTHS)
    assert recorder.accepted > 0.3 * recorder.drafted > 0
    assert engines.compiled_since_start(llm) == 0


def test_adapters(tmp_path):
    """Of the model alone: the layer drafts from the states that they change."""
    target = mtp_heads.save_copy("mimo", tmp_path / "target")
    adapter = test_lora.write(tmp_path / "adapter", tiny.Reference(target).model, test_lora.MLP, 4, 1)
    prompts = tiny.prompts(test_lora.LENGTHS)
    expected = [test_lora.expected(target, path, prompts) for path in (adapter, None)]
    llm = make(target, enable_lora=True)
    recorder = heads.Recorder(engines.runner_of(llm))
    adapters = LoRARequest("one", 1, adapter), None
    assert [test_lora.tokens(llm, prompts, [one] * len(prompts)) for one in adapters] == expected
    assert expected[0] != expected[1] and recorder.accepted > 0


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mimo(tmp_path_factory) -> str:
    return mtp_heads.save("mimo", tmp_path_factory.mktemp("mimo"))


def changed(folder: str, new: Path, **settings) -> str:
    """A copy of a checkpoint with other settings; its weights are not copied, and drawn."""
    new.mkdir()
    for path in Path(folder).glob("*.json"):
        (new / path.name).write_bytes(path.read_bytes())
    config = json.loads((new / "config.json").read_text()) | settings
    (new / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return str(new)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_nextn_predict_layers": None}, r"mtp: expected one MTP layer \(num_nextn_predict_layers: 1\), got None"),
        ({"num_nextn_predict_layers": 3}, r"mtp: expected one MTP layer \(num_nextn_predict_layers: 1\), got 3"),
    ],
    ids=["none", "three"],
)
def test_numbers_of_layers_that_are_refused(settings, text, mimo, tmp_path):
    with pytest.raises(Exception, match=f"--speculative-config: {text}"):
        make(changed(mimo, tmp_path / "changed", **settings), load_format="dummy")


def test_refusals(mimo, tmp_path):
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    other = changed(mimo, tmp_path / "other")
    for more, text in (
        ({"model": other}, "model: expected none with mtp, whose layer is the model's own, got .*other"),
        ({"model": mimo, "quantization": "fp8"}, "quantization: expected the model's, None, got fp8"),
        ({"speculative_token_tree": "[(0,), (1,)]"}, "speculative_token_tree: expected none, got a tree"),
    ):
        with pytest.raises(Exception, match=f"--speculative-config: {text}"):
            engines.make(mimo, load_format="dummy", speculative_config={**drafts, **more})


def test_another_model_with_such_layers(tmp_path):
    """vLLM has them for more models."""
    folder = changed(
        mtp_heads.save("deepseek", tmp_path / "saved"), tmp_path / "changed", architectures=["DeepseekV2ForCausalLM"]
    )
    text = "mtp: expected a model of DeepseekV3ForCausalLM, .*, got DeepseekV2ForCausalLM"
    with pytest.raises(Exception, match=f"--speculative-config: {text}"):
        make(folder, load_format="dummy")


def test_a_checkpoint_without_the_layer(tmp_path):
    """Whose configuration says that it has one."""
    folder = mtp_heads.save("deepseek", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "layers.2." not in name}, path)
    with pytest.raises(
        Exception, match=r"not initialized from checkpoint.*model.layers.2|layer 2 weights missing from"
    ):
        make(folder)
