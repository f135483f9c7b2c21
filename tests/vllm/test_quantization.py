"""Quantised checkpoints: greedy tokens equal to transformers' with the weights that the stored ones mean.

All layouts with XLA_GPU_TEST_ALL_MODELS=1; otherwise two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.utils import WeightsMapper

from tests.vllm import engines, processes, tiny
from xla_gpu import quantization
from xla_gpu.vllm import supported
from xla_gpu.vllm.quantization import CheckpointQuantization

GROUP = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the value that each nibble holds


def pack(values: torch.Tensor, dim: int, order=range(8)) -> torch.Tensor:
    """int32 of eight values of 0 to 15 along ``dim`` each; order: the value in each nibble."""
    groups = values.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(groups[..., value] << (4 * nibble) for nibble, value in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, dim).contiguous()


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and zero points by group of a weight, float16 scales; and what they mean."""
    n, k = weight.shape
    groups = weight.view(n, k // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    values = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    meaning = ((values - zeros[..., None]) * scales.float()[..., None]).reshape(n, k)
    return values.reshape(n, k), scales, zeros, meaning


def awq(weight):
    values, scales, zeros, meaning = int4(weight)
    tensors = {
        "qweight": pack(values.t(), 1, AWQ_ORDER),
        "qzeros": pack(zeros.t(), 1, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return tensors, meaning


def gptq(weight):
    values, scales, zeros, meaning = int4(weight)
    tensors = {
        "qweight": pack(values.t(), 0),
        "qzeros": pack(zeros.t() - 1, 1),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }
    return tensors, meaning


def packed(weight):
    values, scales, zeros, meaning = int4(weight)
    tensors = {
        "weight_packed": pack(values, 1),
        "weight_scale": scales,
        "weight_zero_point": pack(zeros, 0),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, meaning


def channels(weight, form="float8"):
    made = quantization.quantize(weight, form)
    tensors = {"weight": made.weight, "weight_scale": made.weight_scale[:, None].contiguous()}
    return tensors, quantization.dequantize(made)


def one_scale(weight):
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, stored.float() * scale


def blocks(weight):
    n = len(weight)
    whole = torch.nn.functional.pad(weight, (0, 0, 0, -n % GROUP))
    tiles = whole.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [n / 128, 128, k / 128, 128]
    scale = tiles.abs().amax((1, 3)) / 448
    stored = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    meaning = (stored.float() * scale[:, None, :, None]).reshape(whole.shape)[:n].contiguous()
    return {"weight": stored.reshape(whole.shape)[:n].contiguous(), "weight_scale_inv": scale}, meaning


def compressed(form: str, weights: dict) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


INT4_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
LAYOUTS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8": (one_scale, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-blocks": (blocks, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "compressed-tensors-float8": (
        channels,
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    ),
    "compressed-tensors-int8": (
        lambda weight: channels(weight, "int8"),
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    ),
    "compressed-tensors-int4": (packed, compressed("pack-quantized", INT4_GROUPS)),
}
EVERY_TIME = ("awq", "fp8")
NAMES = sorted(LAYOUTS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME

PROGRAM = """
import sys
from tests.vllm import engines, tiny
from xla_gpu.vllm import layer_blocks
layer_blocks.MAX_ROWS = 8  # so that longer steps have their layers one by one
blocks = set()
for name in ("gated_mlp", "attention_block_"):
    def block(*operands, name=name, function=getattr(layer_blocks.xg, name), **others):
        if name == "gated_mlp" or operands[1] is not None:  # attention alone has no products
            blocks.add(name)
        return function(*operands, **others)
    setattr(layer_blocks.xg, name, block)
stored, meant = sys.argv[1:]
prompts = tiny.prompts((5, 37, 100))
expected = [tiny.Reference(meant).greedy(prompt, 16) for prompt in prompts]
llm = engines.make(stored)
got = engines.tokens(llm, prompts, engines.greedy(16))
print("RESULT", got == expected, engines.compiled_since_start(llm), ",".join(sorted(blocks)), got, expected)
"""


def save(
    folder: Path, layout: str, sizes: Mapping[str, int] | None = None, model_name: str = "llama_wide", part: str = ""
) -> tuple[Path, Path]:
    """A checkpoint in that layout, and one with the weights that it means.

    Args:
      folder: of both.
      layout: of LAYOUTS.
      sizes: in the place of the model's.
      model_name: of tiny.CONFIGS.
      part: of the names of the layers that are quantised.
    """
    quantize, settings = LAYOUTS[layout]
    meant, stored = folder / "meant", folder / "stored"
    tiny.save(model_name, meant, sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(meant, dtype=torch.float32)
    tensors, routers = {}, []
    for name, tensor in load_file(meant / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith(".gate"):
            routers.append(layer)
        if tensor.dim() == 2 and ".layers." in name and layer not in routers and part in name:
            made, meaning = quantize(tensor)
            tensors |= {f"{layer}.{part}": value for part, value in made.items()}
            model.get_parameter(name).data = meaning
        else:
            tensors[name] = tensor
    model.save_pretrained(meant)
    stored.mkdir()
    save_file(tensors, stored / "model.safetensors")
    config = json.loads((meant / "config.json").read_text())
    # As checkpoints name layers that are not quantised; those of GPTQ do not.
    plain = {"compressed-tensors": "ignore", "awq": "modules_to_not_convert", "fp8": "modules_to_not_convert"}
    if routers and settings["quant_method"] in plain:
        key = plain[settings["quant_method"]]
        settings = settings | {key: [*settings.get(key, []), *routers]}
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    for path in meant.glob("*token*"):
        (stored / path.name).write_bytes(path.read_bytes())
    return stored, meant


# Sizes that quantised weights have, also each of two devices.
EXPERTS = {
    "mixtral": {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64},
}
EVERY_TIME_EXPERTS = (("gptq", "qwen3_moe"),)
WITH_EXPERTS = [(layout, name) for layout in sorted(LAYOUTS) for name in EXPERTS]


@pytest.mark.parametrize(
    ("layout", "name"), WITH_EXPERTS if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME_EXPERTS
)
def test_experts(layout, name, tmp_path):
    check(*save(tmp_path, layout, EXPERTS[name], name), blocks="attention_block_")


def test_layers_are_named_as_the_model_names_them():
    """A checkpoint may have other names than vLLM's model, as those of OPT."""
    mapper = WeightsMapper(orig_to_new_prefix={"decoder.": "model.decoder."})
    layer = "decoder.layers.0.fc1"
    gptq = CheckpointQuantization({**LAYOUTS["gptq"][1]})
    gptq.is_quantised = {layer: True, "decoder.layers.1.fc1": False}
    gptq.apply_vllm_mapper(mapper)
    assert not gptq._is_plain(f"model.{layer}") and gptq._is_plain("model.decoder.layers.1.fc1")
    ignoring = CheckpointQuantization({**LAYOUTS["compressed-tensors-float8"][1], "ignore": [layer]})
    ignoring.apply_vllm_mapper(mapper)
    assert ignoring._is_plain(f"model.{layer}") and not ignoring._is_plain("model.decoder.layers.1.fc1")


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_a_vocabulary_that_is_quantised(layer, monkeypatch):
    """vLLM's layers over the vocabulary would look for a plain weight while they load."""
    config = CheckpointQuantization({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True})
    tensors = {f"{layer}.qweight": {"dtype": "I32"}, "model.norm.weight": {"dtype": "BF16"}}
    monkeypatch.setattr("xla_gpu.vllm.quantization.get_safetensors_params_metadata", lambda _: tensors)
    with pytest.raises(ValueError, match=f"not supported: {layer}: expected plain weights, got quantised ones"):
        config.maybe_update_config("a model")


@pytest.mark.parametrize("layout", ["compressed-tensors-float8", "fp8"])
def test_layers_that_are_plain_in_the_files(layout, tmp_path):
    """Whatever the settings say: they may name those that are quantised, by regular expressions."""
    check(*save(tmp_path, layout, part="mlp"), blocks="gated_mlp")


@pytest.mark.parametrize("layout", ["compressed-tensors-int4", "fp8"])
def test_a_scale_that_is_missing(layout, tmp_path):
    stored, _ = save(tmp_path, layout)
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    save_file(tensors, stored / "model.safetensors")
    text = r"model.layers.1.self_attn.qkv_proj: expected weight_scale in the checkpoint, got none"
    with pytest.raises(ValueError, match=text):
        engines.make(str(stored))


CACHE_SCALES_PROGRAM = """
import sys
from tests.vllm import engines
llm = engines.make(sys.argv[1], kv_cache_dtype="fp8")
context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
engines.tokens(llm, [[5, 6, 7]], engines.greedy(4))
print("RESULT", [(round(layer._k_scale_float, 3), round(layer._v_scale_float, 3)) for layer in context.values()])
"""


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")],
)
def test_scales_of_a_float8_cache(k_name, v_name, tmp_path):
    """Those that a checkpoint has, under either name."""
    stored, _ = save(tmp_path, "compressed-tensors-float8")
    tensors = load_file(stored / "model.safetensors")
    for index in range(2):
        tensors[f"model.layers.{index}.{k_name}"] = torch.tensor(0.25 + index)
        tensors[f"model.layers.{index}.{v_name}"] = torch.tensor(0.75 + index)
    save_file(tensors, stored / "model.safetensors")
    assert processes.run(["-c", CACHE_SCALES_PROGRAM, str(stored)]).line() == "[(0.25, 0.75), (1.25, 1.75)]"


@pytest.mark.parametrize("layout", NAMES)
def test_tokens_equal_transformers(layout, tmp_path):
    check(*save(tmp_path, layout))


def check(stored: Path, meant: Path, blocks: str = "attention_block_,gated_mlp") -> None:
    """blocks: the halves of a layer that are one call each, in steps of few rows."""
    result = processes.run(["-c", PROGRAM, str(stored), str(meant)])
    equal, compiled, made, tokens = result.line().split(maxsplit=3)
    assert (equal, compiled, made) == ("True", "0", blocks), tokens


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "group_size: expected a multiple of 128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "bits: expected 4, got 8"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "--quantization: expected none, fp8, or a checkpoint of",
        ),
    ],
)
def test_other_layouts_are_refused(settings, text, tmp_path):
    tiny.save("llama_wide", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(Exception, match=text):
        engines.make(str(tmp_path))
    assert supported.QUANTIZATION == "xla_gpu"


@pytest.mark.parametrize("named", ["awq", "awq_marlin", "fp8"])
def test_a_method_that_is_named(named, tmp_path):
    """The checkpoint's, by any of vLLM's names of it; another one is refused by vLLM."""
    stored, _ = save(tmp_path, "awq")
    if named == "fp8":
        with pytest.raises(Exception, match=r"\(awq\) does not match .*\(fp8\)"):
            EngineArgs(model=str(stored), quantization=named).create_engine_config()
    else:
        config = EngineArgs(model=str(stored), quantization=named).create_engine_config()
        assert config.model_config.quantization == supported.QUANTIZATION
