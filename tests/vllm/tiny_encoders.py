"""Tiny models that attend in both directions, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import save_file

from tests.vllm import tiny

_BERT = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS = {
    "bert": lambda: t.BertConfig(**_BERT),
    # Positions from 3 on.
    "roberta": lambda: t.RobertaConfig(**{**_BERT, "pad_token_id": 2}),
    "xlm_roberta": lambda: t.XLMRobertaConfig(**{**_BERT, "pad_token_id": 1, "type_vocab_size": 1}),
    # A layer that sees all, and two that see 8 tokens on either side.
    "modernbert": lambda: t.ModernBertConfig(**_BERT, local_attention=16, attn_implementation="eager"),
}


def randomize(model: Any) -> Any:
    """Biases and norms, which are 0 and 1 otherwise."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model.float().eval()


def save(name: str, folder: Path, auto: Any = t.AutoModel, **changes: Any) -> tuple[str, Any]:
    """Writes the model of class ``auto`` with a tokenizer; its folder, and transformers' model."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(changes)
    options = {"attn_implementation": "eager"} if name == "modernbert" else {}
    model = randomize(auto.from_config(config, **options))
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder, types=name == "bert")
    return str(folder), model


def save_decoder(name: str, folder: Path) -> tuple[str, Any]:
    """Writes a decoder that attends in both directions, as embedding models made of one do; and transformers' model."""
    tiny.save(name, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = tiny.CONFIGS[name]()
    config.is_causal = False
    if name == "gemma3":
        config.use_bidirectional_attention, config.hidden_act = True, "gelu_pytorch_tanh"
    torch.manual_seed(0)
    randomize(t.AutoModel.from_config(config)).save_pretrained(folder)
    return str(folder), t.AutoModel.from_pretrained(folder).float().eval()


# ---- Encoders whose configurations and code are not transformers' own ------------------------------------------------
class NomicBertConfig(t.GPT2Config):
    """As nomic-embed-text-v1.5's."""

    model_type = "nomic_bert"


class NewConfig(t.PretrainedConfig):
    """As gte-multilingual-base's."""

    model_type = "new"


# By the names of _states.
_NOMIC_NAMES = {
    "word": "embeddings.word_embeddings",
    "type": "embeddings.token_type_embeddings",
    "norm": "emb_ln",
    "qkv": "encoder.layers.{}.attn.Wqkv",
    "out": "encoder.layers.{}.attn.out_proj",
    "norm1": "encoder.layers.{}.norm1",
    "up": "encoder.layers.{}.mlp.fc11",
    "gate": "encoder.layers.{}.mlp.fc12",
    "down": "encoder.layers.{}.mlp.fc2",
    "norm2": "encoder.layers.{}.norm2",
}
_GTE_NAMES = {
    "word": "embeddings.word_embeddings",
    "type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "qkv": "encoder.layer.{}.attention.qkv_proj",
    "out": "encoder.layer.{}.attention.o_proj",
    "norm1": "encoder.layer.{}.attn_ln",
    "up": "encoder.layer.{}.mlp.up_gate_proj",
    "down": "encoder.layer.{}.mlp.down_proj",
    "norm2": "encoder.layer.{}.mlp_ln",
}
ROTARY = ("nomic", "gte")
_HIDDEN, _WIDTH, _LAYERS, _HEADS, _THETA = 64, 96, 2, 4, 1000.0


def save_rotary(name: str, folder: Path) -> tuple[str, Any]:
    """Writes one of ROTARY; its folder, and a function from token ids to the states of their rows."""
    sizes = {"vocab_size": tiny.VOCAB_SIZE, "type_vocab_size": 2, "torch_dtype": "float32"}
    if name == "nomic":
        config = NomicBertConfig(
            n_embd=_HIDDEN, n_inner=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, n_positions=512, layer_norm_epsilon=1e-5,
            activation_function="swiglu", rotary_emb_base=_THETA, rotary_emb_fraction=1.0, rotary_emb_scale_base=None,
            rotary_emb_interleaved=False, mlp_fc1_bias=False, mlp_fc2_bias=False, qkv_proj_bias=False,
            architectures=["NomicBertModel"], **sizes,
        )  # fmt: skip
    else:
        config = NewConfig(
            hidden_size=_HIDDEN, intermediate_size=_WIDTH, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS,
            max_position_embeddings=512, layer_norm_eps=1e-5, hidden_act="gelu", rope_theta=_THETA,
            position_embedding_type="rope", architectures=["GteNewModel"], **sizes,
        )  # fmt: skip
    t.AutoConfig.register(config.model_type, type(config), exist_ok=True)
    config.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    # As in real checkpoints; vLLM expects it of Nomic's.
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}')
    weights = _rotary_weights(name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder), lambda ids: _states(name, weights, torch.tensor(ids))


def _rotary_weights(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = _NOMIC_NAMES if name == "nomic" else _GTE_NAMES
    up = _WIDTH if name == "nomic" else 2 * _WIDTH
    shapes = {
        "word": (tiny.VOCAB_SIZE, _HIDDEN), "type": (2, _HIDDEN), "norm": (_HIDDEN,), "norm1": (_HIDDEN,),
        "norm2": (_HIDDEN,), "qkv": (3 * _HIDDEN, _HIDDEN), "out": (_HIDDEN, _HIDDEN), "up": (up, _HIDDEN),
        "gate": (up, _HIDDEN), "down": (_HIDDEN, _WIDTH),
    }  # fmt: skip
    weights = {}
    for key, path in names.items():
        is_norm = key.startswith("norm")
        for layer in range(_LAYERS if "{}" in path else 1):
            full = path.format(layer)
            weights[f"{full}.weight"] = torch.randn(shapes[key]) * 0.2 + is_norm
            if is_norm or (name == "gte" and key in ("qkv", "out", "down")):
                weights[f"{full}.bias"] = torch.randn(shapes[key][0]) * 0.2
    return weights


def _states(name: str, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The rows' states by the definition: norms behind sums, rotary positions, gated MLPs."""
    names = _NOMIC_NAMES if name == "nomic" else _GTE_NAMES
    functional = torch.nn.functional

    def linear(x: torch.Tensor, key: str, layer: int) -> torch.Tensor:
        path = names[key].format(layer)
        return functional.linear(x, weights[f"{path}.weight"], weights.get(f"{path}.bias"))

    def norm(x: torch.Tensor, key: str, layer: int = 0) -> torch.Tensor:
        path = names[key].format(layer)
        return functional.layer_norm(x, (_HIDDEN,), weights[f"{path}.weight"], weights[f"{path}.bias"], 1e-5)

    half = _HIDDEN // _HEADS // 2
    angles = torch.arange(len(ids))[:, None] * _THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = norm(weights[f"{names['word']}.weight"][ids] + weights[f"{names['type']}.weight"][0], "norm")
    for layer in range(_LAYERS):
        q, k, v = (part.view(len(ids), _HEADS, -1) for part in linear(x, "qkv", layer).chunk(3, -1))
        q, k, v = (part.transpose(0, 1) for part in (turned(q), turned(k), v))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(len(ids), -1)
        x = norm(x + linear(attended, "out", layer), "norm1", layer)
        if name == "nomic":
            inner = functional.silu(linear(x, "gate", layer)) * linear(x, "up", layer)
        else:
            up, gate = linear(x, "up", layer).chunk(2, -1)
            inner = functional.gelu(gate) * up
        x = norm(x + linear(inner, "down", layer), "norm2", layer)
    return x
