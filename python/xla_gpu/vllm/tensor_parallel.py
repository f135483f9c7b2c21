"""Tensor parallelism: one process drives all devices through torch_xla's SPMD.

vLLM sees one rank that holds the whole model; every tensor is one tensor, of which each device keeps a part. Attention
and the matrices that are multiplied before it are divided by heads, the MLP by its width, the head by the vocabulary,
the KV caches by kv heads. The sums after attention and MLP are xla_gpu's all_reduce.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

import xla_gpu.torch as xg

_AXIS = "tp"

_active: TensorParallel | None = None
_size: int | None = None  # of the process; None: no engine has started yet


def active() -> TensorParallel | None:
    """The devices of this process's engine; None where it has one."""
    return _active


def prepare(environ: MutableMapping[str, str], size: int) -> None:
    """Leaves torch_xla's client ``size`` devices. Comes before torch_xla is imported, and before ``start``.

    Raises:
      ValueError: an engine of this process has another number of devices.
    """
    if _size not in (None, size):
        raise ValueError(
            f"xla_gpu.vllm: --tensor-parallel-size: expected {_size}, which an engine of this process has, got {size}: "
            "start this engine in another process"
        )
    if size == 1:
        return
    if environ.get("PJRT_DEVICE", "").upper() == "CPU":
        environ.setdefault("CPU_NUM_DEVICES", str(size))
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(size)] if visible is None else visible.split(",")
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:size])


def start(size: int) -> None:
    """Makes the devices of this process one machine for SPMD. Once for a process, which keeps its number of devices.

    Raises:
      ValueError: there are not ``size`` devices.
    """
    global _active, _size
    if size > 1 and _active is None:
        _active = TensorParallel(size)
    _size = size


class Joined:
    """The outputs of a layer that vLLM joined from several, q, k and v or gate and up, each divided by itself.

    As one tensor they could be divided only by moving them between the devices. vLLM's models split them by
    ``split``, its activations by slices of the last dimension.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = tuple(parts)
        self.shape = torch.Size((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)))

    def split(self, sizes: Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
        """The parts; ``sizes`` and ``dim`` are to be theirs."""
        expected = [part.shape[-1] for part in self._parts]
        if list(sizes) != expected or dim not in (-1, len(self.shape) - 1):
            raise self._unknown(f"a split into {list(sizes)} along {dim}, where the parts are {expected} along -1")
        return self._parts

    def __getitem__(self, index: Any) -> torch.Tensor:
        """``joined[..., begin:end]`` where that is a part."""
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice):
            begin, end, step = index[1].indices(self.shape[-1])
            at = 0
            for part in self._parts:
                if (at, at + part.shape[-1], 1) == (begin, end, step):
                    return part
                at += part.shape[-1]
        raise self._unknown(f"the element {index!r}")

    def __getattr__(self, name: str) -> Any:
        raise self._unknown(f"the attribute {name}")

    def _unknown(self, what: str) -> Exception:
        kind = AttributeError if what.startswith("the attribute") else NotImplementedError
        return kind(
            f"xla_gpu.vllm: --tensor-parallel-size: this model needs {what} of a joined layer's outputs, which is not "
            "supported over several devices"
        )


class TensorParallel:
    """The devices of an engine, and how its model lies on them.

    Attributes:
      size: the number of devices.
      bytes_per_device: of the parameters and buffers placed so far.
    """

    def __init__(self, size: int) -> None:
        import numpy as np
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        runtime.use_spmd()
        there = runtime.global_runtime_device_count()
        if there != size:  # every program runs on all devices
            raise ValueError(
                f"xla_gpu.vllm: --tensor-parallel-size: expected at most the number of devices, {there}, got {size}"
                if there < size
                else f"xla_gpu.vllm: --tensor-parallel-size: expected {there}, the number of devices that this process "
                f"has started with, got {size}"
            )
        self.size = size
        self.bytes_per_device = 0
        self._mesh = spmd.Mesh(np.arange(size), (size,), (_AXIS,))
        self._group = xg.DeviceGroup(self._mesh, _AXIS)
        self._divided: dict[int, tuple[torch.Tensor, int]] = {}

    # ---- Tensors -----------------------------------------------------------------------------------------------------

    def mark(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Notes that a tensor of the device is divided along ``dim``, or whole on each device; returns it."""
        from torch_xla.distributed import spmd

        spmd.mark_sharding(tensor, self._mesh, tuple(_AXIS if i == dim else None for i in range(tensor.dim())))
        return tensor

    def mark_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes tensors whole on each device where nothing says how they are divided."""
        import torch_xla

        for tensor in tensors:
            if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
                self.mark(tensor)

    def place(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Marks ``tensor``, a parameter or buffer on the device, as ``divide`` wants its copy on the host divided."""
        dim = self._divided[id(host)][1] if id(host) in self._divided else None
        self.bytes_per_device += tensor.numel() * tensor.element_size() // (1 if dim is None else self.size)
        return self.mark(tensor, dim)

    def mark_cache(self, cache: torch.Tensor) -> torch.Tensor:
        """Divides a KV cache by its kv heads, of which K and V are neighbours; returns it."""
        return self.mark(cache, 2)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of T[size, ...], a part of which each device has."""
        total: torch.Tensor = xg.all_reduce(parts, group=self._group)
        return total

    # ---- The model ---------------------------------------------------------------------------------------------------

    def divide(self, model: nn.Module, random: bool = False) -> None:
        """Arranges a model on the host to be divided, and has its layers compute so.

        Args:
          model: whole, as for one device.
          random: its numbers are to be drawn, and do not matter here.

        Raises:
          ValueError: a layer cannot be divided.
        """
        embeddings = {
            id(module.weight)
            for module in model.modules()
            if hasattr(module, "weight") and isinstance(module, nn.Module) and _is_embedding(module)
        }
        for name, module in model.named_modules():
            if isinstance(module, ReplicatedLinear):
                continue
            if isinstance(module, ColumnParallelLinear):
                self._check_method(name, module)
                sizes = list(getattr(module, "output_sizes", None) or [module.output_size])
                self._check(name, "outputs", sizes)
                module.quant_method = _DividedOutputs(self, sizes)
                for parameter in (module.weight, getattr(module, "bias", None)):
                    if parameter is not None:
                        if not random:
                            parameter.data = _by_device(parameter.data, sizes, self.size)
                        self._divided[id(parameter)] = (parameter, 0)
            elif isinstance(module, RowParallelLinear):
                self._check_method(name, module)
                outputs, inputs = module.weight.shape
                self._check(name, "inputs", [inputs])
                module.quant_method = _DividedInputs(self)
                weight, shape = module.weight.data, (self.size, outputs, inputs // self.size)
                module.weight.data = (
                    torch.empty(shape, dtype=weight.dtype)
                    if random
                    else weight.view(outputs, self.size, -1).transpose(0, 1).contiguous()
                )
                self._divided[id(module.weight)] = (module.weight, 0)
            elif isinstance(module, ParallelLMHead) and id(module.weight) not in embeddings:
                # One that is the embedding too stays whole on each device.
                self._check_method(name, module)
                self._check(name, "rows of the vocabulary", [module.weight.shape[0]])
                module.quant_method = _DividedHead(self)
                self._divided[id(module.weight)] = (module.weight, 0)

    def _check(self, name: str, what: str, sizes: Sequence[int]) -> None:
        if any(size % self.size for size in sizes):
            raise ValueError(
                f"xla_gpu.vllm: --tensor-parallel-size: expected a number that divides {name}'s {what}, "
                f"{', '.join(map(str, sizes))}, got {self.size}"
            )

    def _check_method(self, name: str, module: Any) -> None:
        method = module.quant_method
        if not isinstance(method, UnquantizedLinearMethod) and "Unquantized" not in type(method).__name__:
            raise ValueError(
                f"xla_gpu.vllm: --tensor-parallel-size: {name}: expected weights that are not quantised, got "
                f"{type(method).__name__}"
            )


def _is_embedding(module: nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _by_device(tensor: torch.Tensor, sizes: Sequence[int], devices: int) -> torch.Tensor:
    """Rows of joined matrices so that those of a device are together: its q, its k, its v."""
    parts = [part.unflatten(0, (devices, -1)) for part in tensor.split(list(sizes))]
    return torch.cat(parts, 1).flatten(0, 1)


class _Divided(LinearMethodBase):  # type: ignore[misc]
    """Multiplies by a matrix that was loaded, and divided between the devices, before this took the layer over."""

    def __init__(self, devices: TensorParallel) -> None:
        self._devices = devices

    def create_weights(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("xla_gpu.vllm: --tensor-parallel-size: the layer has its weights already")


class _DividedOutputs(_Divided):
    """Multiplies by a matrix of which each device has the rows of its outputs."""

    def __init__(self, devices: TensorParallel, sizes: Sequence[int]) -> None:
        super().__init__(devices)
        self._sizes = list(sizes)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """T[rows, n], or Joined, from x: T[rows, k]."""
        out = F.linear(x, layer.weight, bias)
        if len(self._sizes) == 1:
            return out
        own = [size // self._devices.size for size in self._sizes]
        parts = out.view(x.shape[0], self._devices.size, -1).split(own, 2)
        return Joined([part.reshape(x.shape[0], -1) for part in parts])


class _DividedInputs(_Divided):
    """Multiplies by a matrix of which each device has the columns of its inputs, [devices, n, k / devices]."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """T[rows, n] from x: T[rows, k]."""
        divided = x.view(x.shape[0], self._devices.size, -1).transpose(0, 1)
        out = self._devices.sum(torch.bmm(divided, layer.weight.transpose(1, 2)))
        return out if bias is None else out + bias


class _DividedHead(_Divided):
    """Logits, of which each device computes those of its part of the vocabulary; all devices get all."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """T[rows, vocab_size] from x: T[rows, k]."""
        # Noted as divided first: otherwise XLA would gather the matrix, and multiply by all of it on each device.
        divided = self._devices.mark(F.linear(x, layer.weight, bias), 1)
        return self._devices.mark(divided.clone())


def pool_bytes(environ: MutableMapping[str, str]) -> int:
    """Bytes of a GPU that the client's pool takes, which torch_xla does not tell under SPMD."""
    from .._runtime import cuda_driver

    least = min(gpu.memory_bytes for gpu in cuda_driver.driver().gpus)
    return int(least * float(environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]))
