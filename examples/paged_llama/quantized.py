"""Quantised matrices of a PagedLlama: made from its weights at load, or read from a checkpoint that holds such.

The layers' matrices are quantised; the embedding stays as it is, and so does the head unless requested: most published
checkpoints leave both.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import xla_gpu.torch
from xla_gpu import quantization
from xla_gpu.quantization import CheckpointFormat, LinearWeight

from . import weights
from .checkpoint import hugging_face_names, safetensors
from .model import PagedLlama, RowParallel


class QuantizedLinear(nn.Module):
    """In place of an nn.Linear: up to 64 rows are multiplied by xla_gpu's kernel, more by XLA's product."""

    def __init__(self, weight: LinearWeight, linear: nn.Module):
        """linear: what it takes the place of, whose bias is kept; that of a RowParallel is its caller's to add."""
        super().__init__()
        self.adds_bias = not isinstance(linear, RowParallel)
        for name, tensor in weight._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return xla_gpu.torch.linear(
            x,
            self.weight,
            weight_scale=self.weight_scale,
            weight_zero_point=self.weight_zero_point,
            bias=self.bias if self.adds_bias else None,
        )


def quantize(model: PagedLlama, weight_format: str, sync: Callable[[], object], head: bool = False) -> None:
    """Quantises the layers' matrices where they are, or the head; int4 leaves those whose k is no multiple of 128.

    sync: called after each, so that only one matrix exists twice.
    """
    matrices = [(model, "head", model.head)] if head else list(_matrices(model))
    for parent, name, linear in matrices:  # on one device a RowParallel's weight is a matrix, too
        if _fits(linear.weight, weight_format):
            setattr(parent, name, QuantizedLinear(quantization.quantize(linear.weight, weight_format), linear))
        sync()


@torch.no_grad()
def round_reference(theirs: nn.Module, weight_format: str, head: bool = False) -> None:
    """Gives transformers' model the values that `quantize` leaves, to compare tokens with."""
    for name, linear in theirs.named_modules():
        if isinstance(linear, nn.Linear) and (name == "lm_head") == head and _fits(linear.weight, weight_format):
            linear.weight.copy_(quantization.dequantize(quantization.quantize(linear.weight.detach(), weight_format)))


def load_checkpoint(model: PagedLlama, folder: pathlib.Path, device: torch.device) -> None:
    """From a folder whose config.json has a quantization_config: its matrices as they are stored.

    Raises ValueError for a format that xla_gpu's linear does not have, and for shapes that are not the model's.
    """
    stored = CheckpointFormat(json.loads((folder / "config.json").read_text()))
    names = hugging_face_names(model.config)
    paths = {id(module): path for path, module in model.named_modules()}
    with safetensors(folder, "pt") as get:
        there: set[str] = get.names
        for parent, name, linear in list(_matrices(model)):
            parts = [part.removesuffix(".weight") for part in names[f"{paths[id(linear)]}.weight"]]
            dtype = linear.weight.dtype
            weight = quantization.concatenate([stored.load(part, get, there, dtype) for part in parts])
            rows, columns = weight.weight.shape
            if weight.weight.dtype is torch.uint8:
                columns *= 2  # packed int4
            if (rows, columns) != tuple(linear.weight.shape):
                raise ValueError(f"{' + '.join(parts)}: expected {list(linear.weight.shape)}, got {[rows, columns]}")
            placed = LinearWeight(*(None if tensor is None else tensor.to(device) for tensor in weight))
            setattr(parent, name, QuantizedLinear(placed, linear))
        weights.load(model, get, device)


def _matrices(model: PagedLlama) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(its parent, its name there, the module) of each matrix of the layers."""
    for layer in model.layers:
        for name, module in layer.named_children():
            if isinstance(module, nn.Linear | RowParallel):
                yield layer, name, module


def _fits(weight: Tensor, weight_format: str) -> bool:
    n, k = weight.shape
    return n % 16 == 0 and k % (128 if weight_format == "int4" else 16) == 0
