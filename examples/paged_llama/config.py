"""What shapes a Llama model."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes in elements; the names follow Hugging Face's config.json where one of them is meant."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # {"rope_type": "linear" or "llama3", "factor": …}
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> LlamaConfig:
        """From the content of a config.json. Raises ValueError for what this model cannot do."""
        for name, expected, default in (("model_type", "llama", None), ("hidden_act", "silu", "silu")):
            if config.get(name, default) != expected:
                raise ValueError(f"config.json: {name}: expected {expected!r}, got {config.get(name, default)!r}")
        # transformers 5 writes rope_parameters; before, rope_theta stood outside and rope_scaling was None or a dict.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
        if rope["rope_type"] not in ("default", "linear", "llama3"):
            raise ValueError(f"config.json: rope_type: expected default, linear or llama3, got {rope['rope_type']!r}")
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
        )

    @classmethod
    def from_folder(cls, folder: pathlib.Path) -> LlamaConfig:
        """From a checkpoint's folder; its generation_config.json, if there is one, names the end-of-sequence tokens."""
        config = cls.from_hugging_face(_read_json(folder / "config.json"))
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = _token_ids(_read_json(generation).get("eos_token_id"))
            config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
        return config


def _read_json(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Shapes of published models, for measurements with random weights.
SHAPES = {
    "llama3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE,
    ),
    "llama3-70b": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE,
    ),
    "llama3-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
}
