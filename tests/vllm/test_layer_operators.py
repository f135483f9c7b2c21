"""Which layers use this library's operators, and that they compute what vLLM's do. Tokens: test_models.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from xla_gpu.vllm import layer_operators


@pytest.fixture
def called(monkeypatch):
    """Names of the operators that were called."""
    names = []
    for name in ("rms_norm", "silu_and_mul"):
        operator = getattr(layer_operators.xg, name)

        def counted(*args, name=name, operator=operator, **options):
            names.append(name)
            return operator(*args, **options)

        monkeypatch.setattr(layer_operators.xg, name, counted)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
def test_norms_of_large_steps(kind, dtype, called, monkeypatch):
    monkeypatch.setattr(layer_operators, "MIN_ROWS", 4)
    with set_current_vllm_config(VllmConfig()):
        norm = kind(64, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    layer_operators.take(norm, 32)
    torch.manual_seed(0)
    for rows in (3, 4):
        x, residual = (torch.randn(rows, 64).to(dtype) for _ in range(2))
        got, expected = norm(x, residual), norm.forward_native(x, residual)
        # Llama's norms in vLLM take the sum before it is rounded.
        tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
    assert called == ["rms_norm"]
    # Without a residual, with a residual of another dtype, and heads: vLLM's.
    norm(x)
    norm(x, residual.double())
    norm(x.new_zeros(4, 2, 64), x.new_zeros(4, 2, 64))
    assert called == ["rms_norm"]


def test_silu_of_large_steps(called, monkeypatch):
    monkeypatch.setattr(layer_operators, "MIN_ROWS", 4)
    with set_current_vllm_config(VllmConfig()):
        silu = SiluAndMul()
    layer_operators.take(silu, 32)
    for rows in (3, 4):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(silu(x), silu.forward_native(x))
    assert called == ["silu_and_mul"]


def test_attention_of_a_model(engine):
    """Each layer of the tests' Llama rotates and stores in one operator; they share a table of the rows in use.

    vLLM shares it with other engines of a process, which may have more rows.
    """
    from tests.vllm.engines import runner_of

    runner = runner_of(engine)
    layers = runner.model.model.layers
    tables = {id(layer.self_attn.rotary_emb.xla_gpu_table) for layer in layers}
    assert len(tables) == 1 and all("forward" in vars(layer.self_attn) for layer in layers)
    table = layers[0].self_attn.rotary_emb.xla_gpu_table
    assert table.device.type == "xla" and list(table.shape[1:]) == [8, 2]
    assert table.shape[0] >= runner.config.model_config.max_model_len


def test_attention_of_the_same_name_elsewhere_is_left_alone(engine):
    """A model that is registered from outside of vLLM may compute something else in it."""
    from tests.vllm.engines import runner_of

    attention = runner_of(engine).model.model.layers[0].self_attn
    assert layer_operators.is_known_attention(type(attention))
    assert not layer_operators.is_known_attention(type(type(attention).__name__, (type(attention),), {}))
