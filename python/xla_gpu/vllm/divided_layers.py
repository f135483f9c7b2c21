"""The layers of a model that several devices share: how their weights are divided, and what each device computes.

Attention and the matrices that are multiplied before it are divided by heads, of which there are copies where they are
fewer than the devices (repeated_kv_heads.py), the MLP and each expert by their width, the head by the vocabulary; or
each device has whole experts. The sums after attention, MLP and experts are xla_gpu's all_reduce and
all_reduce_add_rms_norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

import xla_gpu.torch as xg

from ..quantization.weights import GROUP
from . import draft_heads, moe, repeated_kv_heads
from .divided_sums import PendingSum, take_sums
from .quantization import CheckpointLinearMethod
from .tensor_parallel import TensorParallel

try:
    from vllm.model_executor.layers.attention import MLAAttention
except ImportError:  # before vLLM 0.16
    from vllm.attention.layer import MLAAttention

# What linear's kernels take: of n and k a multiple of this.
_UNIT = 16


def divide(
    devices: TensorParallel,
    model: nn.Module,
    random: bool = False,
    whole_experts: bool = False,
    head: nn.Module | None = None,
) -> None:
    """Arranges a model on the host to be divided, and has its layers compute so.

    Args:
      devices: between which it is divided.
      model: whole, as for one device, its weights in the form that they have on the device.
      random: the numbers of weights that are not quantised are to be drawn, and do not matter here.
      whole_experts: each device is to have experts of its own, instead of a part of every expert's width.
      head: one that drafts tokens, see draft_heads.py; what it shares with the model is divided once.

    Raises:
      ValueError: a layer cannot be divided.
    """
    layers = _named_layers(model, head)
    embeddings = {id(module.weight) for _, module in layers if _is_embedding(module)}
    for name, module in layers:
        repeated_kv_heads.repeat(devices.size, name, module, random)
        if head is not None and module is draft_heads.fc(head):
            # A sum more, and 1 / size of the matrix to read.
            _divide_inputs(devices, name, module, random)
            module.quant_method = _DividedInputsOfWhole(devices)
        elif isinstance(module, ReplicatedLinear) or getattr(module, "disable_tp", False):
            continue  # of latents, which all heads read, too
        elif isinstance(module, MLAAttention):
            _check(devices, name, "heads", [module.num_heads])
            for parameter in (module.key_weight, module.value_weight):
                devices.divide(parameter, 0)
        elif isinstance(module, ColumnParallelLinear):
            _divide_outputs(devices, name, module, random)
        elif isinstance(module, RowParallelLinear):
            _divide_inputs(devices, name, module, random)
        elif isinstance(module, FusedMoE):
            module.has_whole_experts = whole_experts
            if whole_experts:
                _divide_by_experts(devices, name, module)
            else:
                _divide_experts(devices, name, module, random)
        elif isinstance(module, ParallelLMHead) and id(module.weight) not in embeddings:
            # One that is the embedding too stays whole on each device.
            _is_quantised(name, module)
            _check(devices, name, "rows of the vocabulary", [module.weight.shape[0]])
            whole = module.num_embeddings_padded == module.org_vocab_size
            # vLLM leaves the logits of padding out: they would have to be moved between the devices.
            module.quant_method = _DividedHead(devices, gather=not whole)
            devices.divide(module.weight, 0)
        else:
            take_sums(module)
    devices.logits_dim = logits_dim(getattr(model, "lm_head", None))


def logits_dim(lm_head: nn.Module | None) -> int | None:
    """The dimension along which the logits of an output matrix are divided; None: each device has all."""
    method = getattr(lm_head, "quant_method", None)
    return 1 if isinstance(method, _DividedHead) and not method.gather else None


def _named_layers(model: nn.Module, head: nn.Module | None) -> list[tuple[str, Any]]:
    """The modules of both, each once, by what they are called in error texts."""
    layers: list[tuple[str, Any]] = list(model.named_modules())
    if head is not None:
        known = {module for _, module in layers}
        layers += [(f"the head's {name}", module) for name, module in head.named_modules() if module not in known]
    return layers


def _divide_outputs(devices: TensorParallel, name: str, layer: Any, random: bool) -> None:
    sizes = list(getattr(layer, "output_sizes", None) or [layer.output_size])
    drawn = random
    if _is_quantised(name, layer):
        by_blocks = layer.weight.dtype is not torch.uint8 and layer.weight_scale.dim() == 2
        _check(devices, name, "outputs", sizes, GROUP if by_blocks else _UNIT)
        layer.quant_method, drawn = _DividedQuantisedOutputs(devices, sizes), False
    else:
        _check(devices, name, "outputs", sizes)
        layer.quant_method = DividedOutputs(devices, sizes)
    for parameter, rows in repeated_kv_heads.by_outputs(layer, sum(sizes)):
        if not drawn:
            parameter.data = _by_device(parameter.data, [size // rows for size in sizes], devices.size, 0)
        devices.divide(parameter, 0)


def _divide_inputs(devices: TensorParallel, name: str, layer: Any, random: bool) -> None:
    if _is_quantised(name, layer):
        scale, packed = layer.weight_scale, layer.weight.dtype is torch.uint8
        inputs = layer.weight.shape[1] * (2 if packed else 1)
        _check(devices, name, "inputs", [inputs], GROUP if scale.dim() == 2 else _UNIT)
        layer.quant_method = _DividedQuantisedInputs(devices)
        for parameter in (layer.weight, scale, layer.weight_zero_point):
            if parameter is not None and parameter.dim() == 2:
                devices.divide(parameter, 1)
        return
    outputs, inputs = layer.weight.shape
    _check(devices, name, "inputs", [inputs])
    layer.quant_method = DividedInputs(devices)
    weight, shape = layer.weight.data, (devices.size, outputs, inputs // devices.size)
    layer.weight.data = (
        torch.empty(shape, dtype=weight.dtype)
        if random
        else weight.view(outputs, devices.size, -1).transpose(0, 1).contiguous()
    )
    devices.divide(layer.weight, 0)


def _divide_experts(devices: TensorParallel, name: str, layer: Any, random: bool) -> None:
    w13, w2 = moe.matrices(layer, "w13"), moe.matrices(layer, "w2")
    width = w13.weight.shape[1] // 2
    _check(devices, name, "width of an expert", [width], w13.group)
    for part in w13:
        if part is None:
            continue
        rows = 2 * width // part.shape[1]  # of a matrix, that one of a scale of blocks is for
        if not random:
            part.data = _by_device(part.data, [width // rows] * 2, devices.size, 1)
        devices.divide(part, 1)
    for part in w2._replace(bias=None):  # the bias is whole on each: it is added to the sum
        if part is not None and part.dim() == 3:
            devices.divide(part, 2)


def _divide_by_experts(devices: TensorParallel, name: str, layer: Any) -> None:
    w13, w2 = moe.matrices(layer, "w13"), moe.matrices(layer, "w2")
    _check(devices, name, "experts", [w13.weight.shape[0]])
    for part in (*w13, *w2._replace(bias=None)):
        if part is not None:
            devices.divide(part, 0)


def _check(devices: TensorParallel, name: str, what: str, sizes: Sequence[int], unit: int = 1) -> None:
    if any(size % (devices.size * unit) for size in sizes):
        shares = f" into multiples of {unit}," if unit > 1 else ""
        raise ValueError(
            f"xla_gpu.vllm: --tensor-parallel-size: expected a number that divides {name}'s {what}, "
            f"{', '.join(map(str, sizes))},{shares} got {devices.size}"
        )


def _is_quantised(name: str, layer: Any) -> bool:
    method = layer.quant_method
    if isinstance(method, CheckpointLinearMethod):
        return True
    if isinstance(method, UnquantizedLinearMethod) or "Unquantized" in type(method).__name__:
        return False
    raise ValueError(
        f"xla_gpu.vllm: --tensor-parallel-size: {name}: expected plain weights or those of a quantised checkpoint, got "
        f"{type(method).__name__}"
    )


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _by_device(tensor: torch.Tensor, sizes: Sequence[int], devices: int, dim: int) -> torch.Tensor:
    """Joined matrices so that what is a device's along ``dim`` is together: its q, its k, its v."""
    whole = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # float8 cannot be joined
    parts = [part.unflatten(dim, (devices, -1)) for part in whole.split(list(sizes), dim)]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1).view(tensor.dtype)


class Joined:
    """The outputs of a layer that vLLM joined from several, q, k and v or gate and up, each divided by itself.

    As one tensor they could be divided only by moving them between the devices. vLLM's models split them by
    ``split`` or ``chunk``, its activations by slices of the last dimension.
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

    def chunk(self, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """The parts, where they are as many and of one size."""
        size = self.shape[-1] // chunks
        return self.split([size] * chunks, dim)

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


class _Divided(LinearMethodBase):  # type: ignore[misc]
    """Multiplies by a matrix that was loaded, and divided between the devices, before this took the layer over."""

    def __init__(self, devices: TensorParallel) -> None:
        self._devices = devices

    def create_weights(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("xla_gpu.vllm: --tensor-parallel-size: the layer has its weights already")


class DividedOutputs(_Divided):
    """Multiplies by a matrix of which each device has the rows of its outputs."""

    def __init__(self, devices: TensorParallel, sizes: Sequence[int]) -> None:
        super().__init__(devices)
        self._sizes = list(sizes)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """T[rows, n], or Joined, from x: T[rows, k]."""
        return self.joined(self.product(layer, x, bias))

    def joined(self, out: torch.Tensor) -> Any:
        """What ``apply`` returns, from what ``product`` does."""
        if len(self._sizes) == 1:
            return out
        own = [size // self._devices.size for size in self._sizes]
        parts = out.view(out.shape[0], self._devices.size, -1).split(own, 2)
        return Joined([part.reshape(out.shape[0], -1) for part in parts])

    def by_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The outputs along a tensor's last dimension, in the order in which ``product`` has them."""
        return _by_device(tensor, self._sizes, self._devices.size, tensor.dim() - 1)

    def product(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """T[rows, n], the outputs of a device together."""
        return F.linear(x, layer.weight, bias)


class _DividedQuantisedOutputs(DividedOutputs):
    """The same with a quantised matrix."""

    def product(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """T[rows, n], the outputs of a device together."""
        return _product_on_each(self._devices, layer, x, None, 0, bias)


class DividedInputs(_Divided):
    """Multiplies by a matrix of which each device has the columns of its inputs, [devices, n, k / devices]."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> PendingSum:
        """T[rows, n] from x: T[rows, k]."""
        divided = x.view(x.shape[0], self._devices.size, -1).transpose(0, 1)
        return PendingSum(self._devices, torch.bmm(divided, layer.weight.transpose(1, 2)), bias)


class _DividedInputsOfWhole(DividedInputs):
    """The same of rows that are whole on each device, of which each takes its columns."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> PendingSum:
        """T[rows, n] from x: T[rows, k]."""
        # Noted so: otherwise XLA may divide what x is made of, and move parts of it between the devices.
        return super().apply(layer, self._devices.mark(x.clone()), bias)


class _DividedQuantisedInputs(DividedInputs):
    """Multiplies by a quantised matrix [n, k] of which each device has the columns of its inputs."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> PendingSum:
        """T[rows, n] from x: T[rows, k]."""
        return PendingSum(self._devices, _product_on_each(self._devices, layer, x, 1, 1, None), bias)


def _product_on_each(
    devices: TensorParallel, layer: Any, x: torch.Tensor, of_x: int | None, of_weight: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Products with each device's part of a quantised matrix.

    Args:
      devices: that multiply.
      layer: with what CheckpointLinearMethod leaves.
      x: T[rows, k].
      of_x: the dimension along which x is divided.
      of_weight: that of the matrix: 0 for outputs, 1 for inputs.
      bias: T[n], divided as outputs are.

    Returns:
      T[rows, n], divided as the outputs; with divided inputs T[devices, rows, n], which is to be summed.
    """
    named = {"weight": layer.weight, "weight_scale": layer.weight_scale, "weight_zero_point": layer.weight_zero_point}
    named = {name: tensor for name, tensor in {**named, "bias": bias}.items() if tensor is not None}

    def multiply(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        out = xg.linear(x, **dict(zip(named, tensors, strict=True)))
        return out[None] if of_weight == 1 else out

    def of(tensor: torch.Tensor) -> int | None:
        is_whole = tensor.shape[0] == 1 if of_weight == 0 else tensor.dim() == 1
        return None if is_whole else of_weight

    operands = [(x, of_x), *((tensor, of(tensor)) for tensor in named.values())]
    return devices.on_each(multiply, operands, 1 - of_weight)


class _DividedHead(_Divided):
    """Logits, of which each device computes those of its part of the vocabulary."""

    def __init__(self, devices: TensorParallel, gather: bool) -> None:
        """gather: all devices get all."""
        super().__init__(devices)
        self.gather = gather

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """T[rows, vocab_size] from x: T[rows, k]."""
        # Noted as divided first: otherwise XLA would gather the matrix, and multiply by all of it on each device.
        divided = self._devices.mark(F.linear(x, layer.weight, bias), 1)
        return self._devices.mark(divided.clone()) if self.gather else divided
