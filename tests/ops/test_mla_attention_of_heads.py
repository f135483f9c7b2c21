"""mla_attention beside attention over each head's keys and values, which the latents stand for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import mla_cases
from tests.common.mla_cases import Case


@pytest.mark.parametrize("lengths", [((40, 40), (7, 7)), ((1, 40), (5, 33))], ids=["prompts", "behind-a-context"])
@pytest.mark.frontends("eager", "eager-cuda", "jax")
def test_as_attention_of_heads(frontend, lengths):
    """The un-absorbed form: DeepSeek V2's keys and values of each head, by PyTorch's scaled_dot_product_attention."""
    torch = pytest.importorskip("torch")
    heads, rank, nope, rope, value = 6, 64, 32, 16, 24
    case = Case("heads", lengths, num_heads=heads, head_dim=rank + rope, value_dim=rank, padding_tokens=0,
                scale=(nope + rope) ** -0.5)  # fmt: skip
    arrays = mla_cases.build(case)
    generator = torch.Generator().manual_seed(0)
    w_k = torch.randn(heads, nope, rank, generator=generator) * rank**-0.5
    w_v = torch.randn(heads, value, rank, generator=generator) * rank**-0.5
    q_nope = torch.randn(len(arrays["query"]), heads, nope, generator=generator)
    q_pe = torch.randn(len(arrays["query"]), heads, rope, generator=generator)
    arrays["query"] = torch.cat([torch.einsum("thn,hnr->thr", q_nope, w_k), q_pe], -1).numpy()
    (latents,) = frontend.call("mla_attention", arrays, **case.options())
    got = torch.einsum("thr,hvr->thv", torch.from_numpy(np.array(latents)), w_v)

    for s, (new, context) in enumerate(lengths):
        pages = arrays["block_tables"][s, : -(-context // case.page_size)]
        kv = torch.from_numpy(arrays["kv_cache"][pages].reshape(-1, rank + rope)[:context])
        kv_c, k_pe = kv[:, :rank], kv[:, rank:].expand(heads, -1, -1)
        k = torch.cat([torch.einsum("cr,hnr->hcn", kv_c, w_k), k_pe], -1)
        v = torch.einsum("cr,hvr->hcv", kv_c, w_v)
        rows = slice(*arrays["query_start_loc"][s : s + 2].tolist())
        q = torch.cat([q_nope, q_pe], -1)[rows].transpose(0, 1)
        mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
        np.testing.assert_allclose(got[rows].numpy(), want.numpy(), atol=2e-5)


@pytest.mark.frontends("eager", "torch_xla")
def test_as_transformers_deepseek(frontend):
    """A layer of transformers' DeepSeek V3, with the weights of its projections absorbed."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    configuration = pytest.importorskip("transformers.models.deepseek_v3.configuration_deepseek_v3")
    heads, rank, nope, rope, value, tokens = 4, 64, 32, 16, 24, 21
    config = configuration.DeepseekV3Config(
        hidden_size=96, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=48, kv_lora_rank=rank,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value, num_hidden_layers=1,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = modeling.DeepseekV3Attention(config, layer_idx=0).eval()
    rotary = modeling.DeepseekV3RotaryEmbedding(config)
    x = torch.randn(1, tokens, 96)
    cos, sin = rotary(x, torch.arange(tokens)[None])
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x, position_embeddings=(cos, sin), attention_mask=mask)[0]

        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).view(1, tokens, heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split([nope, rope], -1)
        kv_c, k_pe = layer.kv_a_proj_with_mqa(x).split([rank, rope], -1)
        turn = modeling.apply_rotary_pos_emb_interleave if config.rope_interleave else modeling.apply_rotary_pos_emb
        q_pe, k_pe = turn(q_pe, k_pe.view(1, 1, tokens, rope), cos, sin)
        w_k, w_v = layer.kv_b_proj.weight.view(heads, nope + value, rank).split([nope, value], 1)
        query = torch.cat([torch.einsum("htn,hnr->thr", q_nope[0], w_k), q_pe[0].transpose(0, 1)], -1)

        case = Case("deepseek", ((tokens, tokens),), num_heads=heads, head_dim=rank + rope, value_dim=rank,
                    padding_tokens=0)  # fmt: skip
        arrays = mla_cases.build(case)
        new = {
            "kv_c": layer.kv_a_layernorm(kv_c)[0].numpy(),
            "k_pe": k_pe[0, 0].numpy(),
            "kv_cache": arrays["kv_cache"],
        }
        slots = arrays["block_tables"][0, np.arange(tokens) // 8] * 8 + np.arange(tokens) % 8
        (arrays["kv_cache"],) = frontend.call("concat_and_cache_mla", new | {"slot_mapping": slots.astype(np.int32)})
        arrays["query"] = query.numpy()
        (latents,) = frontend.call("mla_attention", arrays, scale=layer.scaling, value_dim=rank)
        got = torch.einsum("thr,hvr->thv", torch.from_numpy(np.array(latents)), w_v)
        got = layer.o_proj(got.reshape(1, tokens, heads * value))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
