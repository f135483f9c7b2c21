"""A Hugging Face checkpoint: its files, and which of its tensors make up a parameter."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from .config import LlamaConfig


def hugging_face_names(config: LlamaConfig) -> dict[str, list[str]]:
    """For each parameter of the model the tensors of a checkpoint that it is made of, stacked along dimension 0."""
    names = {"embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tie_word_embeddings:
        names["head.weight"] = ["lm_head.weight"]
    attention = {"qkv": ["q_proj", "k_proj", "v_proj"], "out": ["o_proj"]}
    mlp = {"gate_up": ["gate_proj", "up_proj"], "down": ["down_proj"]}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        names[ours + "attention_norm.weight"] = [theirs + "input_layernorm.weight"]
        names[ours + "mlp_norm.weight"] = [theirs + "post_attention_layernorm.weight"]
        for block, parts, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
            for mine, matrices in parts.items():
                for kind in ("weight", "bias") if bias else ("weight",):
                    names[f"{ours}{mine}.{kind}"] = [f"{theirs}{block}.{matrix}.{kind}" for matrix in matrices]
    return names


@contextlib.contextmanager
def safetensors(folder: pathlib.Path, framework: str, slices: bool = False) -> Iterator[Callable[[str], Any]]:
    """Opens a checkpoint's files; yields a function from a tensor's name to the tensor, read on demand.

    The function's attribute `names` is the set of all names.

    framework: whose tensor, "pt" or "np"; slices: instead of a tensor, what reads the part of it that an index names.
    """
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").exists():
        with safe_open(folder / "model.safetensors", framework=framework) as file:
            shards = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise FileNotFoundError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    with contextlib.ExitStack() as stack:
        files = {
            shard: stack.enter_context(safe_open(folder / shard, framework=framework)) for shard in set(shards.values())
        }

        def get(name: str) -> Any:
            if name not in shards:
                raise ValueError(f"{folder}: the checkpoint has no tensor {name!r}, which its config.json asks for")
            file = files[shards[name]]
            return file.get_slice(name) if slices else file.get_tensor(name)

        get.names = set(shards)  # type: ignore[attr-defined]
        yield get
