"""paged_attention against the attention of Hugging Face transformers' models, and gradients against theirs."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tests.common import cases, compare
from tests.common.cases import AttentionCase

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

CASES = [
    ("llama", AttentionCase("hf-llama", ((40, 40),), num_heads=8, num_kv_heads=2)),
    ("llama", AttentionCase("hf-llama-chunk", ((9, 60),), num_heads=8, num_kv_heads=2, page_size=7)),
    ("llama", AttentionCase("hf-llama-decode", ((1, 77),), num_heads=8, num_kv_heads=8, head_dim=128)),
    ("mistral", AttentionCase("hf-mistral", ((30, 60),), num_heads=4, num_kv_heads=2, sliding_window=16)),
    ("gemma2", AttentionCase("hf-gemma2", ((30, 60),), num_heads=4, num_kv_heads=2, soft_cap=5.0, head_dim=256)),
    ("gpt_oss", AttentionCase("hf-gpt-oss", ((30, 60),), num_heads=4, num_kv_heads=2, sinks=True, sliding_window=16)),
]


def contiguous(inputs: cases.AttentionInputs, case: AttentionCase):
    """q [1, heads, q_len, d], k and v [1, kv_heads, context, d] of the one sequence."""
    from tests.common import reference
    from tests.common.arrays import to_torch

    ((q_len, context_len),) = case.sequences
    pages = inputs.block_tables[0, : -(-context_len // case.page_size)]
    k, v = (
        part[pages].reshape(-1, case.num_kv_heads, case.head_dim)[:context_len]
        for part in reference.split_cache(inputs.kv_cache)
    )
    return [to_torch(np.ascontiguousarray(x)).transpose(0, 1)[None] for x in (inputs.query[:q_len], k, v)]


@pytest.mark.parametrize(("model", "case"), CASES, ids=[case.name for _, case in CASES])
@pytest.mark.frontends("eager", "eager-cuda")
def test_agrees_with_eager_attention_of(frontend, model, case):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", exc_type=ImportError)
    inputs = cases.build(case)
    q, k, v = contiguous(inputs, case)
    ((q_len, context_len),) = case.sequences
    rows, keys = torch.arange(context_len - q_len, context_len)[:, None], torch.arange(context_len)[None]
    hidden = keys > rows
    if case.sliding_window:
        hidden |= keys <= rows - case.sliding_window
    mask = torch.zeros(1, 1, q_len, context_len).masked_fill(hidden, torch.finfo(torch.float32).min)
    layer = types.SimpleNamespace(
        num_key_value_groups=case.num_heads // case.num_kv_heads,
        training=False,
        head_dim=case.head_dim,
        sinks=torch.from_numpy(inputs.sinks) if case.sinks else None,
        config=types.SimpleNamespace(attn_logit_softcapping=case.soft_cap),
    )
    extra = {"softcap": case.soft_cap} if case.soft_cap else {}
    theirs, _ = module.eager_attention_forward(layer, q, k, v, mask, scaling=case.softmax_scale, dropout=0.0, **extra)
    (out,) = frontend.call("paged_attention", inputs.arrays(), **case.options())
    np.testing.assert_allclose(out[:q_len], theirs[0].numpy(), atol=2e-5)


@pytest.mark.frontends("eager")
def test_a_whole_llama_layer(frontend):
    """LlamaAttention with its projections and rotary embedding, prefill in two chunks, against one pass of theirs."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=1
    )
    config._attn_implementation = "eager"
    layer, rotary = llama.LlamaAttention(config, 0).eval(), llama.LlamaRotaryEmbedding(config)
    x = torch.randn(1, 23, 128)
    cos, sin = rotary(x, torch.arange(23)[None])
    mask = torch.full((23, 23), torch.finfo(torch.float32).min).triu(1)[None, None]
    ops = frontend.module()
    with torch.no_grad():
        theirs = layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=mask)[0]
        heads = (1, 23, -1, 16)
        q, k, v = (p(x).view(heads).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        cache = torch.full((6, 5, 2 * 2, 16), torch.nan)
        table = torch.tensor([[4, 0, 5, 1, 2]], dtype=torch.int32)
        rows = []
        for start, end in ((0, 14), (14, 23)):
            positions = torch.arange(start, end)
            slots = table[0][positions // 5] * 5 + positions % 5
            ops.reshape_and_cache_(k[start:end], v[start:end], cache, slots)
            rows.append(
                ops.paged_attention(
                    q[start:end],
                    cache,
                    torch.tensor([end], dtype=torch.int32),
                    table,
                    torch.tensor([0, end - start], dtype=torch.int32),
                    1,
                    scale=layer.scaling,
                )
            )
        ours = layer.o_proj(torch.cat(rows).reshape(1, 23, -1))
    compare.assert_same_special(ours.numpy(), theirs.numpy())
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


# ---- Training --------------------------------------------------------------------------------------------------------
def with_our_operators(module, model):
    """The model with the operators that have gradients in the place of its norms, rotations and MLPs."""
    import xla_gpu.torch as xg

    def norm(layer):
        gemma = type(layer).__name__.startswith("Gemma")
        eps = layer.eps if gemma else layer.variance_epsilon
        return lambda x: xg.rms_norm(x, layer.weight, eps=eps, weight_offset=float(gemma), round_once=gemma)

    def mlp(layer):
        activation = "gelu_and_mul" if type(layer).__name__.startswith("Gemma") else "silu_and_mul"

        def forward(x):
            gate_up = torch.cat([layer.gate_proj.weight, layer.up_proj.weight])
            out = xg.gated_mlp(x.flatten(0, -2), gate_up, layer.down_proj.weight, activation=activation)
            return out.view(x.shape)

        return forward

    def turn(query, key, cos, sin, *_, **__):
        batch, _, tokens, head_dim = query.shape
        table = torch.stack([x[0, :, : head_dim // 2].float() for x in (cos, sin)], -1)
        heads = [x.transpose(1, 2).reshape(batch * tokens, -1, head_dim) for x in (query, key)]
        positions = torch.arange(tokens, dtype=torch.int32, device=query.device).repeat(batch)
        turned = xg.rotary_embedding(*heads, positions, table)
        return tuple(x.view(batch, tokens, -1, head_dim).transpose(1, 2) for x in turned)

    module.apply_rotary_pos_emb = turn
    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            layer.forward = norm(layer)
        elif type(layer).__name__.endswith("MLP"):
            layer.forward = mlp(layer)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
@pytest.mark.frontends("eager", "eager-cuda")
def test_gradients_of_models(frontend, name, checkpointing, monkeypatch):
    module = pytest.importorskip(f"transformers.models.{name.lower()}.modeling_{name.lower()}", exc_type=ImportError)
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=96, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(module, f"{name}ForCausalLM")(config).to(frontend.device()).train()
    tokens = torch.randint(0, 96, (2, 17), device=frontend.device())

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    want = gradients()
    monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
    with_our_operators(module, model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for (argument, _), grad, expected in zip(model.named_parameters(), gradients(), want, strict=True):
        largest = float(expected.abs().max())
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=2e-5 * largest, msg=argument)
