"""Quantised experts: vLLM's loaders hand over their tensors, and expert_products.py multiplies by them.

The gates of all experts, or their down projections, are one layer of the checkpoint's format, longer along n. So what
``xla_gpu.quantization`` reads from a checkpoint it reads from them when all are there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from .. import quantization
from ..quantization import CheckpointFormat, LinearWeight
from ..quantization.weights import GROUP
from . import moe

# Along which dimension a checkpoint's tensors are joined along n; None: those that all experts have alike, or nobody
# needs.
_ALONG_N = {
    "weight": 0,
    "weight_scale": 0,
    "weight_scale_inv": 0,
    "weight_packed": 0,
    "weight_zero_point": 0,
    "qweight": 1,
    "qzeros": 1,
    "scales": 1,
    "g_idx": None,
    "weight_g_idx": None,
    "weight_shape": None,
    "input_scale": None,
}

# vLLM's names of the gate, up and down projections, by the matrix that they are in.
_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}

_Stored = dict[tuple[str, int], torch.Tensor]  # by shard and expert


class CheckpointMoEMethod(moe.OwnMoEMethod):
    """Experts with the checkpoint's tensors until they are loaded, then with those that ``linear`` would take."""

    def __init__(self, settings: dict[str, Any], layout: CheckpointFormat, experts: FusedMoEConfig) -> None:
        """settings: the checkpoint's quantization_config, of which ``layout`` is made."""
        super().__init__(experts)
        self._format = layout
        groups: list[dict[str, Any]] = list((settings.get("config_groups") or {}).values())
        self._weights: dict[str, Any] = groups[0]["weights"] if groups else {}
        self._has_blocks = bool(settings.get("weight_block_size")) or self._weights.get("strategy") == "block"

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Registers parameters of the checkpoint's names, empty, whose loader keeps what comes.

        Raises:
          ValueError: the experts have biases, or their rows of gate and up come in turn.
        """
        if self.moe.has_bias or moe.activation_of(layer) in moe.IN_TURN:
            raise ValueError(
                f"xla_gpu.vllm: {layer.layer_name}: {self._format.method}: expected experts without biases whose "
                f"activation is silu or gelu, got {'biases and ' * self.moe.has_bias}{moe.activation_of(layer)}"
            )
        layer.params_dtype = params_dtype
        layer.shapes_of_matrices = {
            "w13": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        layer.stored_tensors = {}
        layer.is_random = get_current_vllm_config().load_config.load_format == "dummy"
        for name in [f"{matrix}_{kind}" for matrix in _SHARDS for kind in _ALONG_N]:
            parameter = nn.Parameter(torch.empty(0), requires_grad=False)
            parameter.weight_loader = functools.partial(_keep, layer.stored_tensors.setdefault(name, {}))
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the checkpoint's tensors.

        Raises:
          ValueError: an expert lacks a tensor, or one has another shape than its format has.
        """
        for name in layer.stored_tensors:  # not the router's bias, which is the layer's too
            delattr(layer, name)
        for matrix, shape in layer.shapes_of_matrices.items():
            made = self._random(shape, layer.params_dtype) if layer.is_random else self._loaded(layer, matrix, shape)
            for part, value in made._asdict().items():
                if value is not None:
                    layer.register_parameter(f"{matrix}_{part}", nn.Parameter(value, requires_grad=False))
        del layer.stored_tensors

    def _loaded(self, layer: Any, matrix: str, shape: tuple[int, int, int]) -> LinearWeight:
        num_experts, n, k = shape
        keys = [(shard, expert) for expert in range(num_experts) for shard in _SHARDS[matrix]]
        joined = {}
        for kind, dim in _ALONG_N.items():
            stored: _Stored = layer.stored_tensors.pop(f"{matrix}_{kind}")
            if not stored:
                continue
            if missing := [key for key in keys if key not in stored]:
                shard, expert = missing[0]
                raise ValueError(
                    f"xla_gpu.vllm: {layer.layer_name}: expected {kind} of {shard} of {num_experts} experts in the "
                    f"checkpoint, got none of expert {expert}"
                )
            joined[f"experts.{kind}"] = _join(f"{layer.layer_name}.{kind}", [stored[key] for key in keys], dim)
        rows_of_one = n // len(_SHARDS[matrix])
        if self._has_blocks and rows_of_one % GROUP:
            raise ValueError(
                f"xla_gpu.vllm: {layer.layer_name}: scales of blocks: expected experts with a multiple of {GROUP} "
                f"outputs, got {rows_of_one}"
            )
        scale = joined.get("experts.weight_scale")
        if scale is not None and scale.numel() == len(keys):
            # One scale for each matrix becomes one for each of its rows.
            joined["experts.weight_scale"] = scale.reshape(-1).repeat_interleave(rows_of_one)
        made = self._format.load("experts", joined.__getitem__, set(joined), layer.params_dtype)
        rows, columns = made.weight.shape
        columns *= 2 if made.weight.dtype is torch.uint8 else 1
        if (rows, columns) != (num_experts * n, k):
            got = [rows // num_experts, columns]
            raise ValueError(
                f"xla_gpu.vllm: {layer.layer_name}: {matrix}: expected {num_experts} experts of shape {[n, k]}, "
                f"got {got}"
            )
        return LinearWeight(*(None if part is None else part.unflatten(0, (num_experts, -1)) for part in made))

    def _random(self, shape: tuple[int, int, int], dtype: torch.dtype) -> LinearWeight:
        """In the checkpoint's format, of any numbers, for vLLM's load format "dummy"."""
        num_experts, n, k = shape
        if self._format.method in ("awq", "gptq") or self._weights.get("num_bits") == 4:
            one = quantization.quantize(torch.zeros(n, k, dtype=dtype), "int4")
        else:
            one = quantization.quantize(torch.zeros(n, k), "int8" if self._weights.get("type") == "int" else "float8")
            if self._has_blocks:
                one = one._replace(weight_scale=torch.ones(-(-n // GROUP), -(-k // GROUP)))
        return LinearWeight(*(None if part is None else part.expand(num_experts, *part.shape) for part in one))


def _keep(
    stored: _Stored,
    parameter: nn.Parameter,
    loaded: torch.Tensor,
    name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    stored[shard_id, expert_id] = loaded
    return True if return_success else None


def _join(name: str, tensors: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    """Tensors of all experts as those of one layer."""
    first = tensors[0]
    if dim is None:
        if name.endswith("g_idx") and any(not torch.equal(first, other) for other in tensors[1:]):
            raise ValueError(
                f"xla_gpu.vllm: {name}: expected groups in order, got act-order (desc_act), which linear cannot read"
            )
        return first
    if first.dim() == 0:
        return torch.stack(tensors)
    # float8 cannot be joined.
    bits = torch.cat([t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors], dim)
    return bits.view(first.dtype)
