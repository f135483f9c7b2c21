"""``--quantization fp8`` with plain checkpoints: the tokens of a checkpoint that holds the rounded weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vllm import engines, test_quantization, tiny
from xla_gpu import quantization

PROMPTS = tiny.prompts((5, 37, 100))


def save(folder: Path, name: str) -> tuple[str, str]:
    """A plain checkpoint of bfloat16 numbers, and compressed-tensors' of the same with float8 of channels."""
    plain, stored = folder / "plain", folder / "stored"
    tiny.save(name, plain, test_quantization.EXPERTS.get(name))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    shutil.copytree(plain, stored)
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")]
    for name, tensor in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if tensor.dim() == 2 and ".layers." in name and layer not in routers:
            made = quantization.quantize(tensor, "float8")
            tensors |= {name: made.weight, f"{layer}.weight_scale": made.weight_scale[:, None].contiguous()}
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    _, settings = test_quantization.LAYOUTS["compressed-tensors-float8"]
    config = json.loads((stored / "config.json").read_text())
    settings = {**settings, "ignore": [*settings["ignore"], *routers]}
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return str(plain), str(stored)


@pytest.mark.parametrize("name", ["llama_wide", "qwen3_moe"])
def test_tokens(name, tmp_path):
    plain, stored = save(tmp_path, name)
    expected = engines.tokens(engines.make(stored, dtype="bfloat16"), PROMPTS, engines.greedy(16))
    llm = engines.make(plain, dtype="bfloat16", quantization="fp8")
    assert engines.tokens(llm, PROMPTS, engines.greedy(16)) == expected
    kinds = {name: str(parameter.dtype) for name, parameter in engines.runner_of(llm).model.named_parameters()}
    assert all((kinds[name] == "torch.float8_e4m3fn") == (f"{name}_scale" in kinds) for name in kinds)
    assert sum("float8" in kind for kind in kinds.values()) == 2 * 4
    assert engines.compiled_since_start(llm) == 0


def test_random_weights(tmp_path):
    plain, _ = save(tmp_path, "llama_wide")
    llm = engines.make(plain, dtype="float16", quantization="fp8", load_format="dummy")
    assert len(engines.tokens(llm, PROMPTS[:1], engines.greedy(4))[0]) == 4


def test_other_methods_are_refused(llama):
    with pytest.raises(ValueError, match=r"--quantization: expected none, fp8, or a checkpoint of .* got bitsandbytes"):
        engines.make(llama, dtype="bfloat16", quantization="bitsandbytes")


def test_a_matrix_that_linear_does_not_take(tmp_path):
    """It stays plain."""
    plain = tiny.save("llama", tmp_path, {"intermediate_size": 100})
    llm = engines.make(plain, dtype="bfloat16", quantization="fp8")
    kinds = {name: parameter.dtype for name, parameter in engines.runner_of(llm).model.named_parameters()}
    assert kinds["model.layers.0.mlp.down_proj.weight"] is torch.bfloat16
    assert kinds["model.layers.0.self_attn.o_proj.weight"] is torch.float8_e4m3fn
    assert len(engines.tokens(llm, PROMPTS[:1], engines.greedy(4))[0]) == 4
