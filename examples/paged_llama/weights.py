"""Fills a PagedLlama: from a checkpoint's files, from transformers' own model, or with random numbers on the device."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch
from torch import Tensor

from .checkpoint import hugging_face_names, safetensors
from .model import PagedLlama


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
    with safetensors(folder, "pt") as get:
        load(model, get, device)


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
