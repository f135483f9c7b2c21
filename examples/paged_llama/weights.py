"""Fills a PagedLlama: from a checkpoint's files, from transformers' own model, or with random numbers on the device."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .config import LlamaConfig
from .model import PagedLlama


def hugging_face_names(config: LlamaConfig) -> dict[str, list[str]]:
    """For each parameter of PagedLlama the tensors of a checkpoint that it is made of, stacked along dimension 0."""
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


def load(model: PagedLlama, get: Callable[[str], Tensor], device: torch.device) -> None:
    """Takes the parameters from `get`, which returns a checkpoint's tensor by name. One at a time is on the host.

    Raises ValueError for a tensor whose shape is not the model's.
    """
    shapes = model.state_dict()
    state = {}
    for name, parts in hugging_face_names(model.config).items():
        tensor = torch.cat([get(part) for part in parts])
        if tensor.shape != shapes[name].shape:
            raise ValueError(f"{' + '.join(parts)}: expected {list(shapes[name].shape)}, got {list(tensor.shape)}")
        state[name] = tensor.to(shapes[name].dtype).to(device)
    _assign(model, state, device)


def load_checkpoint(model: PagedLlama, folder: pathlib.Path, device: torch.device) -> None:
    """From `folder`: model.safetensors, or the shards that model.safetensors.index.json lists."""
    with safetensors(folder) as get:
        load(model, get, device)


@contextlib.contextmanager
def safetensors(folder: pathlib.Path) -> Iterator[Callable[[str], Tensor]]:
    """Opens a checkpoint's files; yields a function from a tensor's name to the tensor, read on demand."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").exists():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            shards = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise FileNotFoundError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    with contextlib.ExitStack() as stack:
        files = {
            shard: stack.enter_context(safe_open(folder / shard, framework="pt")) for shard in set(shards.values())
        }

        def get(name: str) -> Tensor:
            if name not in shards:
                raise ValueError(f"{folder}: the checkpoint has no tensor {name!r}, which its config.json asks for")
            return files[shards[name]].get_tensor(name)

        yield get


def randomise(model: PagedLlama, device: torch.device, sync: Callable[[], object]) -> None:
    """Normal numbers of standard deviation 0.02, drawn on the device: nothing the size of a model crosses the host.

    sync: called after each parameter, so that parameters of one shape share one compiled program.
    """
    state = {}
    for name, shape in model.state_dict().items():
        if name.endswith("norm.weight"):
            state[name] = torch.ones(shape.shape, dtype=shape.dtype, device=device)
        else:
            state[name] = torch.randn(shape.shape, dtype=shape.dtype, device=device) * 0.02
        sync()
    _assign(model, state, device)


def _assign(model: PagedLlama, state: dict[str, Tensor], device: torch.device) -> None:
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)
    model.rotations = model.rotations.to(device)
