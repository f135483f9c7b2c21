"""Experts in mxfp4: vLLM's loaders hand over their tensors, and expert_products.py multiplies by them.

They stay as they are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from . import moe, mxfp4
from .quantization_config import OwnQuantization

METHOD = "mxfp4"
_NO_SCALE = 255


class Mxfp4Quantization(OwnQuantization):
    """Of a checkpoint whose experts are in mxfp4, and all else is plain."""

    multiple = mxfp4.GROUP

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Experts have the method below."""
        if isinstance(layer, FusedMoE):
            return Mxfp4MoEMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class Mxfp4MoEMethod(moe.OwnMoEMethod):
    """Experts with the checkpoint's tensors, whose rows of gate and up are brought into expert_products.py's order."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Registers parameters of vLLM's names and the checkpoint's shapes.

        Raises:
          ValueError: the experts are not gpt-oss's, or their sizes are no whole groups.
        """
        # Of vLLM's models gpt-oss alone loads the tensors of all experts at once, with the rows of gate and up in turn.
        if moe.activation_of(layer) not in moe.IN_TURN:
            raise ValueError(
                f"xla_gpu.vllm: {layer.layer_name}: mxfp4: expected gpt-oss's experts, whose activation is swigluoai, "
                f"got {moe.activation_of(layer)}"
            )
        width = intermediate_size_per_partition
        if hidden_size % mxfp4.GROUP or width % mxfp4.GROUP:
            raise ValueError(
                f"xla_gpu.vllm: mxfp4: expected experts whose sizes are multiples of {mxfp4.GROUP}, "
                f"got {hidden_size} and {width}"
            )
        # No power of two, so that a scale that the checkpoint lacks is found.
        unknown = 127 if get_current_vllm_config().load_config.load_format == "dummy" else _NO_SCALE
        for name, n, k in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
            tensors = {
                "weight": torch.zeros(num_experts, n, k // 2, dtype=torch.uint8),
                "weight_scale": torch.full((num_experts, n, k // mxfp4.GROUP), unknown, dtype=torch.uint8),
                "bias": torch.zeros(num_experts, n, dtype=params_dtype),
            }
            for kind, tensor in tensors.items():
                parameter = nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = _store
                layer.register_parameter(f"{name}_{kind}", parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Orders gate and up.

        Raises:
          ValueError: the checkpoint lacks scales.
        """
        for name in ("w13", "w2"):
            scale = getattr(layer, f"{name}_weight_scale")
            if (scale == _NO_SCALE).any():
                raise ValueError(
                    f"xla_gpu.vllm: {layer.layer_name}: expected scales of {name} in the checkpoint, got none, or NaN"
                )
        for kind in ("weight", "weight_scale", "bias"):
            part = getattr(layer, f"w13_{kind}")
            part.data = moe.in_halves(part.data)


def _store(parameter: nn.Parameter, loaded: torch.Tensor, **_: Any) -> None:
    if parameter.shape != loaded.shape:
        raise ValueError(f"xla_gpu.vllm: mxfp4: expected {list(parameter.shape)}, got {list(loaded.shape)}")
    parameter.data.copy_(loaded)
