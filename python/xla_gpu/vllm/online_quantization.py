"""``--quantization fp8`` with a checkpoint of plain weights: they are rounded to float8 while they are loaded.

Each row of a matrix has its own scale, as ``xla_gpu.quantization.quantize`` makes it. The head, the embedding, routers
and whatever else vLLM keeps whole in every process stay plain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    WEIGHT_LOADER_V2_SUPPORTED,
    LinearBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from .. import quantization
from . import moe
from .quantization import CheckpointLinearMethod
from .quantization_config import NAME, OwnQuantization

_FORMAT = "float8"
_UNIT = 16  # linear takes multiples of it
_OF_LATENTS = ".kv_b_proj"


class OnlineFloat8(OwnQuantization):
    """Rounds linear layers and experts."""

    multiple = _UNIT

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer or of experts."""
        if isinstance(layer, FusedMoE):
            return OnlineMoEMethod(layer.moe_config)
        if not isinstance(layer, LinearBase):
            return None
        plain = isinstance(layer, ReplicatedLinear) or layer.input_size % _UNIT or layer.output_size % _UNIT
        if prefix.endswith(_OF_LATENTS) and get_current_vllm_config().model_config.use_mla:
            plain = True  # it is multiplied by in the model's dtype, see latent_attention.py
        return UnquantizedLinearMethod() if plain else OnlineLinearMethod()


def take(config: Any) -> None:
    """Has a VllmConfig with ``--quantization fp8``, of a checkpoint that is not quantised, quantise this way."""
    if type(config.quant_config) is Fp8Config and not config.quant_config.is_checkpoint_fp8_serialized:
        config.quant_config = OnlineFloat8()
        config.model_config.quantization = NAME


def _note(layer: Any) -> None:
    layer.is_random = get_current_vllm_config().load_config.load_format == "dummy"


def _rounded(layer: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 and scales float32[n] of a weight [n, k]; of "dummy" ones, which are never touched, any."""
    if layer.is_random:
        return torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.ones(weight.shape[0], dtype=torch.float32)
    made = quantization.quantize(weight, _FORMAT)
    assert made.weight_scale is not None
    return made.weight, made.weight_scale


class OnlineLinearMethod(CheckpointLinearMethod):
    """A linear layer with plain weights until they are loaded, then with rounded ones."""

    def __init__(self) -> None:
        self._plain = UnquantizedLinearMethod()

    def create_weights(self, layer: nn.Module, *arguments: Any, **attributes: Any) -> None:
        """As of a plain layer."""
        _note(layer)
        self._plain.create_weights(layer, *arguments, **attributes)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Rounds the weight."""
        weight, scale = _rounded(layer, layer.weight.data)
        del layer.weight
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        layer.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))
        layer.register_parameter("weight_zero_point", None)


WEIGHT_LOADER_V2_SUPPORTED.append(OnlineLinearMethod.__name__)


class OnlineMoEMethod(moe.OwnMoEMethod):
    """Experts with plain weights until they are loaded, then with rounded ones."""

    def create_weights(self, layer: nn.Module, *arguments: Any, **attributes: Any) -> None:
        """As of plain experts."""
        _note(layer)
        UnquantizedFusedMoEMethod(self.moe).create_weights(layer, *arguments, **attributes)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Rounds the weights."""
        moe.order_halves(layer)
        for name in ("w13_weight", "w2_weight"):
            stored = getattr(layer, name).data
            weight, scale = _rounded(layer, stored.flatten(0, 1))
            delattr(layer, name)
            parts = {name: weight.view(stored.shape), f"{name}_scale": scale.view(stored.shape[:2])}
            for part, value in parts.items():
                layer.register_parameter(part, nn.Parameter(value, requires_grad=False))
