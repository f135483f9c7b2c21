"""Fills a PagedLlama: from a checkpoint's files, from transformers' own model, or with random numbers on the device."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .checkpoint import hugging_face_names, safetensors
from .model import PagedLlama

# Puts a parameter of that name on the device, or a shard on each device.
Place = Callable[[str, Tensor], Tensor]


def place_on(device: torch.device, model: PagedLlama) -> Place:
    """On one device whole, on several as PagedLlama says: XLA's SPMD sends each device its shard of a host tensor."""
    group = model.group

    def place(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        if group is not None:
            import torch_xla.distributed.spmd as xs

            kind, what = name.split(".")[-2:]
            divided = kind in ("qkv", "gate_up", "head") or (kind in ("out", "down") and what == "weight")
            xs.mark_sharding(tensor, group.mesh, (group.axis if divided else None, *(None,) * (tensor.dim() - 1)))
        return tensor

    return place


def load(model: PagedLlama, get: Callable[[str], Tensor], device: torch.device) -> None:
    """Takes the parameters from `get`, which returns a checkpoint's tensor by name. One at a time is on the host.

    Raises ValueError for a tensor whose shape is not the model's.
    """
    shapes, place = model.state_dict(), place_on(device, model)
    names = hugging_face_names(model.config)
    if "head.weight" in shapes and "head.weight" not in names:
        names["head.weight"] = names["embed.weight"]  # tied, and divided
    state = {}
    for name, parts in names.items():
        if name not in shapes:  # a matrix that quantized.py has loaded
            continue
        tensors = [get(part) for part in parts]
        shape, got = shapes[name].shape, (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
        whole = (model.config.vocab_size, shape[1]) if name == "head.weight" else shape
        if len(shape) == 3:
            whole = (shape[1], shape[0] * shape[2])
        if got != tuple(whole):
            raise ValueError(f"{' + '.join(parts)}: expected {list(whole)}, got {list(got)}")
        state[name] = place(name, _arranged(name, tensors, shape, model.devices).to(shapes[name].dtype))
    _assign(model, state, device)


def _arranged(name: str, tensors: list[Tensor], shape: torch.Size, devices: int) -> Tensor:
    """A checkpoint's tensors as the parameter that PagedLlama divides over so many devices."""
    if len(shape) == 3:
        return tensors[0].view(shape[1], devices, shape[2]).transpose(0, 1).contiguous()
    if name == "head.weight":
        return F.pad(tensors[0], (0, 0, 0, shape[0] - tensors[0].shape[0]))
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([t.unflatten(0, (devices, -1)) for t in tensors], 1).flatten(0, 1)


def load_checkpoint(model: PagedLlama, folder: pathlib.Path, device: torch.device) -> None:
    """From `folder`: model.safetensors, or the shards that model.safetensors.index.json lists."""
    with safetensors(folder, "pt") as get:
        load(model, get, device)


def randomise(model: PagedLlama, device: torch.device, sync: Callable[[], object]) -> None:
    """Normal numbers of standard deviation 0.02, drawn on the device: nothing the size of a model crosses the host.

    sync: called after each parameter, so that parameters of one shape share one compiled program.
    """
    state, place = {}, place_on(device, model)
    for name, shape in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape.shape, dtype=shape.dtype, device=device)
        else:
            tensor = torch.randn(shape.shape, dtype=shape.dtype, device=device) * 0.02
        state[name] = place(name, tensor)
        sync()
    _assign(model, state, device)


def _assign(model: PagedLlama, state: dict[str, Tensor], device: torch.device) -> None:
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)
    model.rotations = place_on(device, model)("rotations.", model.rotations)
