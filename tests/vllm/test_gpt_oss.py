"""gpt-oss: experts with biases and clamped products, and checkpoints that have them in mxfp4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch_xla
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.vllm import engines, test_quantization, tiny
from xla_gpu.vllm import expert_products, moe, mxfp4, routing
from xla_gpu.vllm.expert_matrices import Matrices

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [..., k / 32, 16] and [..., k / 32] of values [..., k], and what they mean."""
    groups = values.unflatten(-1, (-1, mxfp4.GROUP))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scale = torch.exp2(exponent)[..., None]
    codes = (groups[..., None] / scale[..., None] - NUMBERS).abs().argmin(-1)
    meaning = (NUMBERS[codes] * scale).reshape(values.shape)
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8), meaning


def save(folder: Path, left_out: str = "none", **sizes: int) -> tuple[str, str]:
    """A checkpoint, and one of the weights that it means; without tensors whose names hold ``left_out``."""
    meant = Path(tiny.save("gpt_oss", folder / "meant", sizes))
    tensors = load_file(str(meant / "model.safetensors"))
    packed, meaning = {}, {}
    for name, tensor in tensors.items():
        meaning[name] = tensor
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        # In transformers [num_experts, inputs, outputs].
        blocks, scales, values = stored(tensor.transpose(1, 2).contiguous())
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meaning[name] = values.transpose(1, 2).contiguous()
    save_file(meaning, str(meant / "model.safetensors"), {"format": "pt"})
    kept = folder / "stored"
    kept.mkdir()
    for path in meant.iterdir():
        (kept / path.name).write_bytes(path.read_bytes())
    save_file({n: t for n, t in packed.items() if left_out not in n}, str(kept / "model.safetensors"), {"format": "pt"})
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS}))
    return str(kept), str(meant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers(dtype):
    """All sixteen, lower half of a byte first, with large and small scales."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    packed = (codes[::2] | codes[1::2] << 4).repeat(2, 3, 1)  # [2, 3, 16]
    exponents = torch.tensor([127, 120, 130], dtype=torch.uint8)
    scale = exponents[:, None].expand(2, 3, 1)
    got = mxfp4.dequantized(dtype, packed, scale)
    expected = NUMBERS.repeat(2) * torch.exp2(exponents.float() - 127)[:, None]
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected.expand(2, 3, 32), rtol=0, atol=0)
    least_and_most = mxfp4.powers(torch.tensor([1, 254], dtype=torch.uint8))
    assert least_and_most.log2().tolist() == [-126, 127]


def test_tokens_equal_transformers(tmp_path):
    stored, meant = save(tmp_path)
    prompts = tiny.prompts((5, 37, 130))
    expected = [tiny.Reference(meant).greedy(prompt, 16) for prompt in prompts]
    llm = engines.make(stored)
    experts = dict(engines.runner_of(llm).model.named_parameters())
    assert {str(p.dtype) for name, p in experts.items() if name.endswith("w13_weight")} == {"torch.uint8"}
    for _ in range(2):  # out of the prefix cache too
        assert engines.tokens(llm, prompts, engines.greedy(16)) == expected
    assert engines.compiled_since_start(llm) == 0


@pytest.mark.parametrize("left_out", ["gate_up_proj_scales", "down_proj_scales"])
def test_scales_that_are_missing(left_out, tmp_path):
    stored, _ = save(tmp_path, left_out)
    with pytest.raises(ValueError, match=r"expected scales of w.* in the checkpoint, got none"):
        engines.make(stored)


@pytest.mark.parametrize("layout", ["compressed-tensors-float8", "awq"])
def test_other_formats_are_refused(layout, tmp_path):
    """They would leave the biases out, and take gate and up for one another's."""
    path = Path(tiny.save("gpt_oss", tmp_path, {"hidden_size": 128, "intermediate_size": 128})) / "config.json"
    _, settings = test_quantization.LAYOUTS[layout]
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(ValueError, match=r"experts: .*: expected experts without biases .*, got biases and swigluoai"):
        engines.make(str(tmp_path))


def test_mxfp4_of_other_models_is_refused(tmp_path):
    """Their loaders bring one expert's gate or up at a time."""
    path = Path(tiny.save("mixtral", tmp_path)) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": SETTINGS}))
    with pytest.raises(ValueError, match=r"experts: mxfp4: expected gpt-oss's experts, .* got silu"):
        engines.make(str(tmp_path))


def test_random_weights(tmp_path):
    stored, _ = save(tmp_path)
    llm = engines.make(stored, load_format="dummy")
    assert len(engines.tokens(llm, tiny.prompts((5,)), engines.greedy(4))[0]) == 4


@pytest.mark.parametrize(("rows", "block"), [(1, None), (3, None), (70, None), (70, 32)])
def test_experts_with_biases(rows, block, monkeypatch):
    """As transformers' of gpt-oss, whose rows of gate and up come in turn."""
    monkeypatch.setattr(expert_products, "block_size", lambda *_: block)
    torch.manual_seed(0)
    config = transformers.GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2)
    reference = modeling_gpt_oss.GptOssExperts(config).eval()
    for parameter in reference.parameters():
        parameter.data.normal_(std=2.0)
    x, router, device = torch.randn(rows, 16), torch.randn(rows, 8), torch_xla.device()
    weights, chosen = routing.softmax(router, 2, True)
    share = torch.zeros(rows, 8).scatter(1, chosen, weights)
    expected = reference(x[None], chosen, share)[0]
    w13 = moe.in_halves(reference.gate_up_proj.data.transpose(1, 2).contiguous())
    parts = w13, moe.in_halves(reference.gate_up_proj_bias.data), reference.down_proj.data.transpose(1, 2)
    x, weights, chosen, w13, b13, w2, b2 = (
        tensor.to(device) for tensor in (x, weights, chosen, *parts, reference.down_proj_bias.data)
    )
    w13, w2 = Matrices(w13, bias=b13), Matrices(w2, bias=b2)
    out = expert_products.weighted_sum(x, w13, w2, weights, chosen, "swigluoai")
    got = expert_products.bias_of_sum(w2, weights, chosen, out).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_nan_stays_one():
    """On torch_xla clamp makes a number of it."""
    x = torch.tensor([[1.0, torch.nan, 20.0, -20.0]])
    activation = expert_products.ACTIVATIONS["swigluoai"]
    for gate, up in ((x, torch.ones_like(x)), (torch.ones_like(x), x)):
        expected = activation(gate, up)
        got = activation(gate.to(torch_xla.device()), up.to(torch_xla.device())).cpu()
        assert got.isnan().tolist() == [[False, True, False, False]]
        torch.testing.assert_close(got, expected, equal_nan=True)
