"""LoRA in the linear layers: the adapters of a step's requests, of which each row gets what its own one adds.

A layer has the matrices of all adapter slots in two arrays. All rows are multiplied by all of them, and of the products
between the two matrices each row keeps its adapter's: with ranks this small that costs less than to gather them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch_xla
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.utils import get_packed_modules_mapping

from .program import Program

# Of a model with experts: what routes the rows to them.
_ROUTER = "gate"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """What an adapter adds to the outputs of a module of the checkpoint: ``x @ a.T @ b.T``.

    Attributes:
      a: float32[r, k].
      b: float32[n, r], scaled.
    """

    a: torch.Tensor
    b: torch.Tensor


class _Layer:
    """A linear layer of the model.

    Attributes:
      parts: the modules of the checkpoint that vLLM joined in it, each with its first output and its number of them.
      inputs: of the layer.
      outputs: of all parts.
    """

    def __init__(self, name: str, layer: Any, joined: Mapping[str, Sequence[str]]) -> None:
        parent, _, last = name.rpartition(".")
        names = list(joined.get(last) or [last])
        self.inputs, self.outputs = int(layer.input_size), int(layer.output_size)
        sizes = [self.outputs] if len(names) == 1 else [int(size) for size in layer.output_sizes]
        firsts = np.cumsum([0, *sizes]).tolist()
        self.parts = {
            f"{parent}.{part}" if parent else part: (first, size)
            for part, first, size in zip(names, firsts[:-1], sizes, strict=True)
        }

    def forms(self, slots: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of its two arrays."""
        rows = len(self.parts) * rank
        return (slots, rows, self.inputs), (slots, rows, self.outputs)

    def packed(self, found: Mapping[str, Matrices], rank: int) -> npt.NDArray[np.float32]:
        """An adapter's slot of the first array, then that of the second, whose rows are the columns of ``b``."""
        (_, rows, inputs), (_, _, outputs) = self.forms(1, rank)
        a, b = torch.zeros(rows, inputs), torch.zeros(rows, outputs)
        for index, (name, (first, size)) in enumerate(self.parts.items()):
            if (matrices := found.get(name)) is not None:
                begin, end = index * rank, index * rank + matrices.a.shape[0]
                a[begin:end] = matrices.a
                b[begin:end, first : first + size] = matrices.b.t()
        return np.concatenate([a.numpy().reshape(-1), b.numpy().reshape(-1)])


class LoraLayers:
    """The layers of a model that adapters may change, and the adapters' matrices on the device.

    Attributes:
      tensors: two for each layer, which the programs of steps take as arguments.
    """

    def __init__(self, model: nn.Module, config: VllmConfig, device: torch.device) -> None:
        self.slots = config.lora_config.max_loras
        self.rank = int(config.lora_config.max_lora_rank)
        self._device = device
        joined = get_packed_modules_mapping(model)
        has_experts = config.model_config.get_num_experts() > 1
        self._layers: list[_Layer] = []
        self.tensors: list[Any] = []
        for name, module in model.named_modules():
            if not isinstance(module, LinearBase) or (has_experts and name.rpartition(".")[2] == _ROUTER):
                continue
            names = joined.get(name.rpartition(".")[2]) or ()
            if len(names) > 1 and len(getattr(module, "output_sizes", ())) != len(names):
                continue  # what it is joined of is not known
            layer = _Layer(name, module, joined)
            module.quant_method = _WithAdapters(self, len(self._layers), module.quant_method)
            self._layers.append(layer)
            forms = layer.forms(self.slots, self.rank)
            dtype = config.model_config.dtype
            self.tensors += [torch.zeros(form, dtype=dtype, device=device) for form in forms]
        torch_xla.sync()
        self._programs: dict[tuple[int, int, int], Program] = {}
        self._used: set[tuple[int, int]] = set()  # slot and layer that are not zero
        # Where the model is traced: the layers' arrays, and of which slots' adapters each row is.
        self._traced: list[torch.Tensor] | None = None
        self._chosen = torch.empty(0)

    def parts(self) -> dict[str, tuple[int, int]]:
        """The modules of a checkpoint that an adapter may change: inputs and outputs of each."""
        return {name: (layer.inputs, size) for layer in self._layers for name, (_, size) in layer.parts.items()}

    def compile(self) -> None:
        """Compiles the programs that store an adapter: one for all layers of a form."""
        for index, layer in enumerate(self._layers):
            key = self._key(layer)
            if key in self._programs:
                continue
            (_, rows, inputs), (_, _, outputs) = layer.forms(self.slots, self.rank)

            def store(
                packed: torch.Tensor,
                slot: torch.Tensor,
                a: torch.Tensor,
                b: torch.Tensor,
                rows: int = rows,
                inputs: int = inputs,
                outputs: int = outputs,
            ) -> list[torch.Tensor]:
                split = rows * inputs
                a.index_put_((slot,), packed[:split].reshape(1, rows, inputs).to(a.dtype))
                b.index_put_((slot,), packed[split:].reshape(1, rows, outputs).to(b.dtype))
                return []

            packed = torch.zeros(rows * (inputs + outputs)).to(self._device)
            slot = torch.zeros(1, dtype=torch.int32).to(self._device)
            state = self.tensors[2 * index : 2 * index + 2]
            self._programs[key] = Program(f"adapter, {rows} x {inputs} x {outputs}", store, [packed, slot], state)

    def start(self) -> None:
        """Stores zeros once: from then on no array is one that the programs were made with."""
        self._used = {(0, index) for index in range(len(self._layers))}
        self.store(0, {})

    def store(self, slot: int, found: Mapping[str, Matrices]) -> None:
        """Gives a slot an adapter; found: by the names of ``parts``."""
        at = np.array([slot], np.int32)
        for index, layer in enumerate(self._layers):
            has = any(name in found for name in layer.parts)
            if not has and (slot, index) not in self._used:
                continue
            packed = layer.packed(found, self.rank)
            state = self.tensors[2 * index : 2 * index + 2]
            _, self.tensors[2 * index : 2 * index + 2] = self._programs[self._key(layer)]([packed, at], state)
            (self._used.add if has else self._used.discard)((slot, index))

    @contextlib.contextmanager
    def applied(self, tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> Iterator[None]:
        """A model called in here has the adapters.

        Args:
          tensors: in the place of ``tensors``, where a program is traced.
          slots: int32[rows], of each row its adapter's slot; -1: none.
        """
        self._traced = list(tensors)
        self._chosen = slots[:, None] == torch.arange(self.slots, dtype=torch.int32, device=slots.device)
        try:
            yield
        finally:
            self._traced, self._chosen = None, torch.empty(0)

    def added(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """What the rows' adapters add to the outputs of a layer, T[rows, n], from x: T[rows, k]."""
        if self._traced is None:
            return None
        a, b = self._traced[2 * index : 2 * index + 2]
        slots, rows, _ = a.shape
        between = x @ a.flatten(0, 1).t()
        # A choice, not a product with zeros: what is infinite for another adapter's matrices must not become NaN.
        chosen = self._chosen[:, :, None].expand(-1, slots, rows).flatten(1)
        return torch.where(chosen, between, torch.zeros_like(between)) @ b.flatten(0, 1)

    def _key(self, layer: _Layer) -> tuple[int, int, int]:
        return len(layer.parts), layer.inputs, layer.outputs


class _WithAdapters(LinearMethodBase):  # type: ignore[misc]
    """A layer's own method, and what the rows' adapters add."""

    def __init__(self, layers: LoraLayers, index: int, method: Any) -> None:
        self._layers, self._index, self._method = layers, index, method

    def create_weights(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("xla_gpu.vllm: --enable-lora: the layer has its weights already")

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """T[..., n] from x: T[..., k]."""
        out: torch.Tensor = self._method.apply(layer, x, bias)
        added = self._layers.added(self._index, x.reshape(-1, x.shape[-1]))
        return out if added is None else out + added.reshape(out.shape)
