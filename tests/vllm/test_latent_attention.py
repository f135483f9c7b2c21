"""Multi-head latent attention: tokens equal to transformers', by vLLM's caches of latents, on one device and on two.

Whole models are in test_models.py, those with whole keys and values in the place of latents too.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from tests.vllm import engines, heads, processes, test_lora, test_pooling, test_quantization, tiny
from tests.vllm.engines import greedy, metric, run, tokens
from tests.vllm.latent_over_devices import NEW_TOKENS, PROMPTS
from tests.vllm.tensor_parallel import ON_A_CPU, exchanged, run_module
from xla_gpu.vllm import latent_attention

LENGTHS = (5, 17, 33, 1, 70, 12, 130)
NEW = 24
LAYERS = 2
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

# Sizes that quantised weights have; those of latents end within a block of 128 where the checkpoint has blocks.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "head_dim": 64,
    "v_head_dim": 128,
}
# A block of kv_b_proj has rows for keys and rows for values, and of two heads.
ACROSS_BLOCKS = {"qk_nope_head_dim": 96, "qk_head_dim": 160, "v_head_dim": 64}
# Of a head and a latent of DeepSeek V2 and V3.
OF_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "head_dim": 64,
    "v_head_dim": 128,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.save("deepseek_v2", tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def reference(folder):
    return tiny.Reference(folder)


@pytest.fixture(scope="module")
def llm(folder):
    return engines.make(folder)


# ---- One device ------------------------------------------------------------------------------------------------------


def test_chunks_beside_decoding_and_prefixes(llm, reference):
    """Prompts of several pages and steps; then once more, out of the prefix cache."""
    prompts = tiny.prompts(LENGTHS)
    expected = [reference.greedy(prompt, NEW) for prompt in prompts]
    for is_cached in (False, True):
        outputs = run(llm, prompts, greedy(NEW))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert any(output.num_cached_tokens for output in outputs) == is_cached
    assert engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


def test_a_token_is_a_latent_and_a_rotary_key(llm):
    """No keys and values: 40 numbers of float32 in each layer; the weights that make them are the products' own."""
    runner = engines.runner_of(llm)
    config = llm.llm_engine.vllm_config
    text = config.model_config.hf_text_config
    width, heads = text.kv_lora_rank + text.qk_rope_head_dim, text.num_attention_heads
    (cache,) = runner.caches.tensors
    pages, size = cache.shape[0] // LAYERS, config.cache_config.block_size
    assert cache.shape == (LAYERS * pages, size, width) and cache.dtype is torch.float32
    assert config.cache_config.num_gpu_blocks == pages == (1 << 26) // (LAYERS * size * width * 4)
    parameters = {name: parameter.shape for name, parameter in runner.model.named_parameters()}
    assert not any("kv_b_proj" in name for name in parameters)
    shapes = {
        "key_weight": (heads, text.qk_nope_head_dim, text.kv_lora_rank),
        "value_weight": (heads, text.v_head_dim, text.kv_lora_rank),
    }
    for name, shape in shapes.items():
        found = [value for key, value in parameters.items() if key.endswith(f".{name}")]
        assert found == [shape] * LAYERS


def test_preemption(folder, reference):
    llm = engines.make(folder, num_gpu_blocks_override=18)
    prompts = tiny.prompts((40, 50, 60, 70))
    assert tokens(llm, prompts, greedy(40)) == [reference.greedy(prompt, 40) for prompt in prompts]
    assert metric(llm, "vllm:num_preemptions") > 0
    assert engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


def test_drafts(folder, llm):
    """Steps with several rows of a sequence, of which some are taken back."""
    drafting = engines.make(folder, speculative_config=DRAFTS)
    prompts = tiny.prompts(LENGTHS)
    few = greedy(NEW, allowed_token_ids=[70, 71, 72])
    assert tokens(drafting, prompts, few) == tokens(llm, prompts, few)
    drafted, accepted = (metric(drafting, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert 0 < accepted < drafted
    assert engines.compiled_since_start(drafting) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.06)])
@pytest.mark.parametrize("sizes", [{}, OF_DEEPSEEK], ids=["tiny", "deepseek"])
def test_16_bits(sizes, dtype, tolerance, tmp_path):
    """By how much the logit of a token may fall short of the largest one that transformers has in that dtype.

    GPUs of compute capability 9.0 have kernels of their own for DeepSeek's sizes.
    """
    # Of experts two may be as likely.
    folder = tiny.save("deepseek_v2_lite", tmp_path, {"first_k_dense_replace": 2, **sizes})
    llm = engines.make(folder, dtype=dtype)
    assert {cache.dtype for cache in engines.runner_of(llm).caches.tensors} == {getattr(torch, dtype)}
    prompts = tiny.prompts((5, 37, 130))
    got = tokens(llm, prompts, greedy(16))
    model, short = tiny.Reference(folder, getattr(torch, dtype)), []
    for prompt, chosen in zip(prompts, got, strict=True):
        logits = model.logits(prompt + chosen)[len(prompt) - 1 : -1]
        short.append(max(row.max().item() - row[token].item() for row, token in zip(logits, chosen, strict=True)))
    assert max(short) < tolerance, short
    assert engines.compiled_since_start(llm) == 0


def test_yarn_of_deepseek_v2(tmp_path):
    """Its scale has YaRN's factor in DeepSeek's code and in vLLM, but not in transformers' model of V2."""
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    scaling = {**yarn, "original_max_position_embeddings": 64}
    folder = tiny.save("deepseek_v2", tmp_path, {"rope_scaling": scaling})
    reference = tiny.Reference(folder)
    for layer in reference.model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5 * (0.1 * 0.707 * math.log(4.0) + 1) ** 2
    prompts = tiny.prompts((5, 37, 130))
    assert tokens(engines.make(folder), prompts, greedy(16)) == [reference.greedy(prompt, 16) for prompt in prompts]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_queries_that_grow_with_their_position(dtype, tolerance, tmp_path):
    """As those of Mistral Large 3 (llama_4_scaling), by factors that are float32 in a model of any dtype."""
    # Of experts two may be as likely in 16 bits.
    folder = tiny.save("deepseek_v3", tmp_path, {"first_k_dense_replace": 2})
    path, scaling = Path(folder) / "config.json", {"original_max_position_embeddings": 16, "beta": 0.5}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"llama_4_scaling": scaling}))
    prompts = tiny.prompts((5, 37, 130))
    got = tokens(engines.make(folder, dtype=dtype), prompts, greedy(16))
    model = tiny.Reference(folder, getattr(torch, dtype))

    def scaled(_module, _args, query):  # rotation keeps factors
        return query * (1 + 0.5 * torch.log1p(torch.arange(query.shape[1]) // 16))[:, None].to(query.dtype)

    plain = [model.logits(prompt) for prompt in prompts]
    for layer in model.model.model.layers:
        layer.self_attn.q_b_proj.register_forward_hook(scaled)
    assert all(
        (model.logits(prompt) - rows)[20:].abs().max() > 0.1
        for prompt, rows in zip(prompts[1:], plain[1:], strict=True)
    )
    short = []
    for prompt, chosen in zip(prompts, got, strict=True):
        logits = model.logits(prompt + chosen)[len(prompt) - 1 : -1]
        short.append(max(row.max().item() - row[token].item() for row, token in zip(logits, chosen, strict=True)))
    assert max(short) < tolerance, short


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("fp8-blocks", {}), ("fp8-blocks", ACROSS_BLOCKS), ("compressed-tensors-int4", {})],
    ids=["fp8-blocks", "fp8-blocks-of-several-heads", "compressed-tensors-int4"],
)
def test_quantised_weights(layout, sizes, tmp_path):
    """The matrix that makes keys and values is quantised too."""
    stored, meant = test_quantization.save(tmp_path, layout, WIDE | sizes, "deepseek_v3")
    llm, model = engines.make(str(stored)), tiny.Reference(str(meant))
    prompts = tiny.prompts((5, 37, 100))
    assert tokens(llm, prompts, greedy(16)) == [model.greedy(prompt, 16) for prompt in prompts]
    assert engines.compiled_since_start(llm) == 0


def test_weights_rounded_at_load(folder):
    """All but what is multiplied by in the model's dtype whatever is stored."""
    llm, config = engines.make(folder, dtype="bfloat16", quantization="fp8"), tiny.Reference(folder).model.config
    layer = engines.runner_of(llm).model.model.layers[1].self_attn
    assert layer.q_b_proj.weight.dtype is layer.o_proj.weight.dtype is torch.float8_e4m3fn
    stored = load_file(f"{folder}/model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"].bfloat16()
    of_heads = stored.unflatten(0, (config.num_attention_heads, -1))
    attention = layer.mla_attn.mla_attn
    for weight, part in (
        (attention.key_weight, of_heads[:, : config.qk_nope_head_dim]),
        (attention.value_weight, of_heads[:, config.qk_nope_head_dim :]),
    ):
        torch.testing.assert_close(weight.cpu(), part, rtol=0, atol=0)
    assert len(tokens(llm, tiny.prompts((20,)), greedy(4))[0]) == 4


def test_random_weights(folder):
    """Drawn on the device: those of the host are never touched."""
    llm = engines.make(folder, load_format="dummy")
    parameters = dict(engines.runner_of(llm).model.named_parameters())
    for name in ("key_weight", "value_weight"):
        (weight, _) = [parameter.cpu() for key, parameter in parameters.items() if key.endswith(name)]
        assert 0 < weight.abs().max() <= 1e-3 and weight.std() > 1e-4
    assert len(tokens(llm, tiny.prompts((5,)), greedy(4))[0]) == 4


# ---- LoRA and pooling ------------------------------------------------------------------------------------------------


def test_adapters(folder, tmp_path):
    """Of all matrices of attention but kv_b_proj, which is not multiplied by as a whole; that one is refused."""
    model = tiny.Reference(folder).model
    modules = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    path = test_lora.write(tmp_path / "adapter", model, modules, 4, 1)
    llm = engines.make(folder, enable_lora=True, max_loras=1, max_lora_rank=8)
    prompts = tiny.prompts((5, 37, 130))
    adapter = LoRARequest("adapter", 1, path)
    expected = test_lora.expected(folder, path, prompts)
    assert expected != test_lora.expected(folder, None, prompts)
    assert test_lora.tokens(llm, prompts, [adapter] * 3) == expected
    other = test_lora.write(tmp_path / "other", model, ("kv_b_proj",), 4, 2)
    with pytest.raises(ValueError, match="kv_b_proj"):
        llm.llm_engine.add_lora(LoRARequest("other", 2, other))


def test_embeddings(folder):
    llm = engines.make(folder, runner="pooling")
    expected = test_pooling.states(folder)
    for got, rows in zip(test_pooling.embeddings(llm, test_pooling.PROMPTS), expected, strict=True):
        torch.testing.assert_close(got, test_pooling.normalized(rows[-1]), rtol=0, atol=1e-4)


# ---- Two devices -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over_two(tmp_path_factory):
    """What latent_over_devices.py says of a plain model and a quantised one, the weights that they mean, programs."""
    made = tmp_path_factory.mktemp("models")
    plain = tiny.save("deepseek_v3", made / "plain")
    stored, meant = test_quantization.save(made / "fp8", "fp8-blocks", WIDE, "deepseek_v3")
    dump = tmp_path_factory.mktemp("hlo")
    result, texts = run_module("latent_over_devices", 2, ["2", plain, str(stored)], dump)
    return result["cases"], [plain, str(meant)], [text for text in texts.values() if '"xla_gpu_mla_attention"' in text]


@pytest.mark.parametrize("case", [0, 1], ids=["plain", "fp8-blocks"])
def test_tokens_over_devices(over_two, case):
    cases, meant, _ = over_two
    model = tiny.Reference(meant[case])
    assert cases[case]["tokens"] == [model.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert cases[case]["compiled"] == 0


def test_heads_are_divided_and_latents_are_not(over_two):
    for case in over_two[0]:
        assert case["caches"] == ["{replicated}"]
        assert case["cache_bytes"] <= 1 << 26 < case["cache_bytes"] + (1 << 20)  # of each device
        for name, spec in case["weights"].items():
            if re.search(r"(q_b_proj|key_weight|value_weight|self_attn.o_proj)", name) and spec != "{replicated}":
                continue
            assert not re.search(r"(q_b_proj|key_weight|value_weight|o_proj\.weight$)", name), (name, spec)
            assert "self_attn" not in name or spec == "{replicated}", (name, spec)


@ON_A_CPU
def test_devices_exchange_sums_alone(over_two):
    """Those of layers, of shared experts, and the most likely tokens; each device attends with two of four heads."""
    programs = over_two[2]
    assert len(programs) == 2 * 2
    for text in programs:
        found = exchanged(text)
        sums = [shape for shape, _ in found if re.fullmatch(r"f32\[2,(8|64),(64|256)\]", shape)]
        assert len(sums) == 2 * LAYERS + 1 and [shape for shape, _ in found if shape not in sums] == ["f32[2,2,2,8]"]
        calls = re.findall(r"\(f32\[\d+,(\d+),\d+\]\S*, u8\S* custom-call\(.*\"xla_gpu_mla_attention\"", text)
        assert calls == ["2"] * LAYERS
        assert not re.search(r"= f32\[\d+,16,(40|192)\]\S* copy\(", text)  # of a cache


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype: expected auto with multi-head latent attention .*, got fp8"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "--kv-cache-dtype: expected auto with .*, got fp8_ds_mla"),
        ({"hf_overrides": {"index_topk": 64}}, r"sparse attention \(index_topk, DeepSeek V3.2\): not supported"),
        (
            {"hf_overrides": {"qk_rope_head_dim": 12}},
            "kv_lora_rank and qk_rope_head_dim: expected positive multiples of 8, .* got 32 and 12",
        ),
        (
            {"hf_overrides": {"kv_lora_rank": 520}},
            "expected positive multiples of 8, up to 512 and together up to 576, got 520 and 8",
        ),
        ({"hf_overrides": {"kv_lora_rank": 512, "qk_rope_head_dim": 72}}, "together up to 576, got 512 and 72"),
        ({"hf_overrides": {"kv_lora_rank": 0}}, "expected positive multiples of 8, .* got 0 and 8"),
        ({"hf_overrides": {"qk_rope_head_dim": 0}}, "expected positive multiples of 8, .* got 32 and 0"),
    ],
    ids=str,
)
def test_refused(options, text, folder):
    with pytest.raises(Exception, match=text):
        engines.make(folder, load_format="dummy", **options)


def test_heads_that_draft_are_refused(folder, llama, tmp_path):
    head = heads.save("eagle", llama, tmp_path / "head")
    drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 2}
    with pytest.raises(Exception, match=r"eagle: expected a model of LlamaForCausalLM, .* got DeepseekV2ForCausalLM"):
        engines.make(folder, speculative_config=drafts)


def test_float8_caches_of_whole_keys_and_values(folder):
    """With VLLM_MLA_DISABLE=1, which vLLM reads when it is imported."""
    program = (
        "import sys\nfrom tests.vllm import engines\nllm = engines.make(sys.argv[1], kv_cache_dtype='fp8')\n"
        "print('RESULT', len(engines.runner_of(llm).caches.tensors[0].shape))"
    )
    assert processes.run_anew(["-c", program, folder], VLLM_MLA_DISABLE="1").line() == "4"


# ---- Parts -----------------------------------------------------------------------------------------------------------


def test_memory_is_left_to_queries_by_latents(folder):
    """More than a model of as many heads takes that has no latents: each row has its heads' latents twice, at least."""
    from xla_gpu.vllm import memory

    config = EngineArgs(model=folder, dtype="float32", max_num_batched_tokens=512, max_num_seqs=8)
    config = config.create_engine_config()
    text = config.model_config.hf_text_config
    before = memory.step_bytes(config)
    text.kv_lora_rank += 64
    added = 512 * text.num_attention_heads * 64 * 4
    assert 3 * added <= memory.step_bytes(config) - before <= 4 * added


def test_another_device_needs_all_latents(folder, monkeypatch):
    """So that the caches of all devices together are no larger than one's."""
    from types import SimpleNamespace

    from xla_gpu.vllm import memory, tensor_parallel

    config = EngineArgs(model=folder, kv_cache_memory_bytes=1 << 20).create_engine_config()
    monkeypatch.setattr(tensor_parallel, "active", lambda: SimpleNamespace(size=4))
    assert memory.for_kv_caches(config, torch.device("cpu")) == 1 << 20


def test_products_in_float32(llm):
    """Not in TF32, which the engine has told torch_xla."""
    import torch_xla

    x, weight = torch.ones(5, 4, 6), torch.arange(4.0 * 6 * 7).view(4, 6, 7)
    made = latent_attention.by_heads(x.to(torch_xla.device()), weight.to(torch_xla.device()))
    assert "operand_precision={highest,highest}" in torch_xla._XLAC._get_xla_tensors_hlo([made])
    expected = torch.einsum("thk,hkn->thn", x, weight)
    torch.testing.assert_close(made.cpu(), expected)
    torch.testing.assert_close(latent_attention.by_heads(x.half(), weight.half()), expected.half())


def test_settings_of_a_real_model(tmp_path):
    """DeepSeek V3's sizes are taken: 576 numbers of a token."""
    path = Path(tiny.save("deepseek_v3", tmp_path)) / "config.json"
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    llm = engines.make(str(tmp_path), load_format="dummy", dtype="bfloat16")
    assert engines.runner_of(llm).caches.tensors[0].shape[2] == 576
    assert len(tokens(llm, tiny.prompts((20,)), greedy(3))[0]) == 3
