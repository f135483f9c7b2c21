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

from . import repeated_kv_heads, tensor_parallel
from .divided_layers import DividedInputs, DividedOutputs
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
      outputs: of all parts, as the checkpoint has them.
      made_outputs: of the layer, which over several devices may have copies of kv heads.
      divided: how several devices share it, if they do.
    """

    def __init__(self, name: str, layer: Any, joined: Mapping[str, Sequence[str]]) -> None:
        parent, _, last = name.rpartition(".")
        names = list(joined.get(last) or [last])
        own = repeated_kv_heads.output_sizes(layer)
        self.inputs, self.outputs, self.made_outputs = int(layer.input_size), sum(own), int(layer.output_size)
        self._layer = layer
        method = layer.quant_method
        self.divided = method if isinstance(method, (DividedOutputs, DividedInputs)) else None
        sizes = [self.outputs] if len(names) == 1 else own
        firsts = np.cumsum([0, *sizes]).tolist()
        self.parts = {
            f"{parent}.{part}" if parent else part: (first, size)
            for part, first, size in zip(names, firsts[:-1], sizes, strict=True)
        }

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layers whose adapters one program stores."""
        return len(self.parts), self.inputs, self.made_outputs, type(self.divided)

    def forms(self, slots: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of its two arrays. Where devices divide the inputs, the first one has a part for each of them."""
        rows = len(self.parts) * rank
        devices = tensor_parallel.active()
        if isinstance(self.divided, DividedInputs) and devices is not None:
            return (devices.size, slots, rows, self.inputs // devices.size), (slots, rows, self.made_outputs)
        return (slots, rows, self.inputs), (slots, rows, self.made_outputs)

    def divided_dims(self) -> tuple[int | None, int | None]:
        """Along which dimension each is divided between devices."""
        if self.divided is None:
            return None, None
        return (None, 2) if isinstance(self.divided, DividedOutputs) else (0, None)

    def packed(self, found: Mapping[str, Matrices], rank: int) -> npt.NDArray[np.float32]:
        """An adapter's slot of the first array, then that of the second, whose rows are the columns of ``b``."""
        rows = len(self.parts) * rank
        a, b = torch.zeros(rows, self.inputs), torch.zeros(rows, self.outputs)
        for index, (name, (first, size)) in enumerate(self.parts.items()):
            if (matrices := found.get(name)) is not None:
                begin, end = index * rank, index * rank + matrices.a.shape[0]
                a[begin:end] = matrices.a
                b[begin:end, first : first + size] = matrices.b.t()
        if isinstance(self.divided, DividedOutputs):
            b = self.divided.by_device(repeated_kv_heads.of_outputs(self._layer, b))
        elif self.divided is not None:
            own = self.forms(1, rank)[0][-1]
            a = a.view(rows, -1, own).transpose(0, 1)
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
            dtype = config.model_config.dtype
            for form, dim in zip(layer.forms(self.slots, self.rank), layer.divided_dims(), strict=True):
                self.tensors.append(_zeros(form, dim, dtype, device))
        torch_xla.sync()
        self._programs: dict[tuple[Any, ...], Program] = {}
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
            if layer.key in self._programs:
                continue
            one = layer.forms(1, self.rank)
            split = int(np.prod(one[0]))

            def store(
                packed: torch.Tensor,
                slot: torch.Tensor,
                *arrays: torch.Tensor,
                forms: Sequence[tuple[int, ...]] = one,
                split: int = split,
                dims: Sequence[int | None] = layer.divided_dims(),
            ) -> list[torch.Tensor]:
                here = torch.arange(self.slots, dtype=torch.int32, device=slot.device) == slot
                devices = tensor_parallel.active()
                for array, part, form, dim in zip(arrays, (packed[:split], packed[split:]), forms, dims, strict=True):
                    one = part.to(array.dtype).reshape(form)
                    if devices is not None:  # whole on each: otherwise it would be divided, and parts exchanged
                        one = devices.mark(one.clone())
                    new = torch.where(here[:, None, None], one, array)
                    array.copy_(new if devices is None else devices.mark(new, dim))
                return []

            packed = torch.from_numpy(layer.packed({}, self.rank)).to(self._device)
            slot = torch.zeros(1, dtype=torch.int32).to(self._device)
            state = self.tensors[2 * index : 2 * index + 2]
            self._programs[layer.key] = Program(f"adapter of {next(iter(layer.parts))}", store, [packed, slot], state)

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
            _, self.tensors[2 * index : 2 * index + 2] = self._programs[layer.key]([packed, at], state)
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
        """What the rows' adapters add to the outputs of a layer, T[rows, n], from x: T[rows, k].

        Where devices divide the layer's inputs T[devices, rows, n], which is to be summed. None: no adapters here.
        """
        if self._traced is None:
            return None
        a, b = self._traced[2 * index : 2 * index + 2]
        slots, rows, _ = b.shape
        if a.dim() == 4:
            between = torch.bmm(x.view(x.shape[0], a.shape[0], -1).transpose(0, 1), a.flatten(1, 2).transpose(1, 2))
        else:
            between = x @ a.flatten(0, 1).t()
        # A choice, not a product with zeros: what is infinite for another adapter's matrices must not become NaN.
        chosen = self._chosen[:, :, None].expand(-1, slots, rows).flatten(1)
        return torch.where(chosen, between, torch.zeros_like(between)) @ b.flatten(0, 1)


def _zeros(form: tuple[int, ...], dim: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An array of adapters; over several devices each has its part."""
    array = torch.zeros(form, dtype=dtype, device=device)
    devices = tensor_parallel.active()
    if devices is None:
        return array
    devices.bytes_per_device += array.nbytes // (1 if dim is None else devices.size)
    return devices.mark(array, dim)


class _WithAdapters(LinearMethodBase):  # type: ignore[misc]
    """A layer's own method, and what the rows' adapters add."""

    def __init__(self, layers: LoraLayers, index: int, method: Any) -> None:
        self._layers, self._index, self._method = layers, index, method

    def create_weights(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("xla_gpu.vllm: --enable-lora: the layer has its weights already")

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """T[..., n] from x: T[..., k]; over several devices what the layer's own method returns."""
        method = self._method
        added = self._layers.added(self._index, x.reshape(-1, x.shape[-1]))
        if added is None:
            return method.apply(layer, x, bias)
        if isinstance(method, DividedOutputs):
            return method.joined(method.product(layer, x, bias) + added)
        if isinstance(method, DividedInputs):
            return method.apply(layer, x, bias).plus(added)
        out: torch.Tensor = method.apply(layer, x, bias)
        return out + added.reshape(out.shape)
