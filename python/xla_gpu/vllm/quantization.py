"""Quantised checkpoints: vLLM loads their tensors, and ``xla_gpu.torch.linear`` multiplies by them.

A layer that vLLM joins from several, as q, k and v, has the tensors of one layer of the checkpoint's format, longer
along n. So what ``xla_gpu.quantization`` reads from a checkpoint it reads from vLLM's layers after they are loaded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import (
    WEIGHT_LOADER_V2_SUPPORTED,
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)
from vllm.transformers_utils.config import get_safetensors_params_metadata

import xla_gpu.torch as xg

from ..quantization import CheckpointFormat
from ..quantization.weights import GROUP
from . import mxfp4_experts
from .quantization_config import NAME, OwnQuantization
from .quantized_experts import CheckpointMoEMethod

try:
    from vllm.model_executor.layers.attention import Attention
except ImportError:  # before vLLM 0.16
    from vllm.attention.layer import Attention

# What config.json calls the methods that are taken.
METHODS = ("compressed-tensors", "fp8", "awq", "gptq", mxfp4_experts.METHOD)

_PER_WORD = 8  # int4 values in an int32

# Without them the stored values have no meaning.
_SCALES = ("weight_scale", "weight_scale_inv", "scales")

# What the tensors of a quantised layer, and of no other, are called; dtypes of plain weights, as safetensors says them.
_QUANTISED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_PLAIN = ("F64", "F32", "F16", "BF16")

# Layers over the vocabulary.
_ALWAYS_PLAIN = ("lm_head", "embed_tokens")


@register_quantization_config(NAME)
class CheckpointQuantization(OwnQuantization):
    """The quantisation that a checkpoint's config.json describes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Raises ValueError for settings that ``linear`` has no format for."""
        super().__init__()
        self.settings = settings
        self.format = CheckpointFormat({"quantization_config": settings})
        self.has_cache_scales = False
        self.is_quantised: dict[str, bool] = {}  # of the layers in the checkpoint's files; empty: not known

    def __reduce__(self) -> Any:  # for vLLM's other processes; the format holds functions
        return _restored, (self.settings, self.packed_modules_mapping, self.is_quantised)

    def maybe_update_config(self, model_name: str) -> None:
        """Notes which layers of a checkpoint are quantised: its settings need not say it, or not by their names.

        Raises:
          ValueError: the head or the embedding is.
        """
        tensors = get_safetensors_params_metadata(model_name)
        plain = {name for name, tensor in tensors.items() if name.endswith(".weight") and tensor["dtype"] in _PLAIN}
        quantised = {name for name in tensors if name.endswith(_QUANTISED)}
        self.is_quantised = {name.rpartition(".")[0]: False for name in sorted(plain)}
        self.is_quantised |= {name.rpartition(".")[0]: True for name in sorted(quantised)}
        for layer, is_quantised in self.is_quantised.items():
            if is_quantised and layer.rpartition(".")[2] in _ALWAYS_PLAIN:
                text = f"{layer}: expected plain weights, got quantised ones"
                raise ValueError(f"xla_gpu.vllm: this checkpoint is not supported: {text}")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames the layers that the checkpoint names as vLLM's model names them."""
        for quantised in (False, True):
            layers = [layer for layer, has in self.is_quantised.items() if has is quantised]
            self.is_quantised |= dict.fromkeys(hf_to_vllm_mapper.apply_list(layers), quantised)
        for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
            if names := self.settings.get(key):
                self.settings = {**self.settings, key: hf_to_vllm_mapper.apply_list(names)}

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> str | None:
        """Takes what it can in the place of vLLM's own methods, which are for CUDA tensors.

        Where --quantization names another method than the checkpoint's, vLLM says so. Its names of a method may be
        longer, as awq_marlin.
        """
        method = hf_quant_cfg.get("quant_method")
        named = user_quant is None or user_quant == NAME or user_quant.startswith(str(method))
        return NAME if method in METHODS and named else None

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Where settings stand if not in config.json."""
        return ["quantize_config.json", "quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OwnQuantization:
        """Raises ValueError for settings that ``linear`` has no format for."""
        if config.get("quant_method") == mxfp4_experts.METHOD:
            return mxfp4_experts.Mxfp4Quantization()
        try:
            return cls(config)
        except ValueError as error:
            raise ValueError(f"xla_gpu.vllm: this checkpoint is not supported: {error}") from None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer or of experts; of attention that of its cache's scales, if it is float8."""
        if isinstance(layer, Attention):
            # vLLM takes no scales with e5m2. Its method reads float8_e4m3 ones, and notes them on the layer.
            self.has_cache_scales = layer.kv_cache_dtype != "fp8_e5m2"
            return BaseKVCacheMethod(self) if self.has_cache_scales else None
        if isinstance(layer, FusedMoE):
            if self._is_plain(prefix):
                return None
            return CheckpointMoEMethod(self.settings, self.format, layer.moe_config)
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if self._is_plain(prefix) else CheckpointLinearMethod(self)

    def get_cache_scale(self, name: str) -> str | None:
        """VLLM's name of a scale of the KV cache that a checkpoint names as a layer's output; None: it is none."""
        if self.has_cache_scales and name.endswith(".output_scale"):
            for part in ("k", "v"):
                if name.endswith(f".{part}_proj.output_scale"):
                    return name.replace(f".{part}_proj.output_scale", f".attn.{part}_scale")
        return None

    def _is_plain(self, prefix: str) -> bool:
        settings, joined = self.settings, self.packed_modules_mapping
        if (known := self._is_plain_in_files(prefix)) is not None:
            return known
        if self.format.method == "compressed-tensors":
            return bool(should_ignore_layer(prefix, ignore=settings.get("ignore") or [], fused_mapping=joined))
        names = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or []
        return bool(is_layer_skipped(prefix, names, joined, skip_with_substr=self.format.method == "awq"))

    def _is_plain_in_files(self, prefix: str) -> bool | None:
        """None where the files have no such layer, or are not known."""
        parent, _, last = prefix.rpartition(".")
        parts = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(last, [last])]
        # Of experts the files have what is below them.
        found = [
            {self.is_quantised[part]}
            if part in self.is_quantised
            else {has for layer, has in self.is_quantised.items() if layer.startswith(f"{part}.")}
            for part in parts
        ]
        quantised = {True in has for has in found if has}
        if len(quantised) > 1:
            raise ValueError(
                f"xla_gpu.vllm: {prefix}: expected {', '.join(parts)} all quantised or none: they are multiplied as one"
            )
        return not quantised.pop() if quantised else None


def _restored(settings: dict[str, Any], joined: dict[str, list[str]], known: dict[str, bool]) -> CheckpointQuantization:
    config = CheckpointQuantization(settings)
    config.packed_modules_mapping, config.is_quantised = joined, known
    return config


class CheckpointLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer with the checkpoint's tensors until they are loaded, then with those of ``linear``."""

    def __init__(self, config: CheckpointQuantization) -> None:
        self._config = config

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Registers parameters of the checkpoint's names and shapes, which vLLM's loaders fill."""
        k, n, method = input_size_per_partition, sum(output_partition_sizes), self._config.format.method
        tensors = _Tensors(layer, attributes.get("weight_loader"))
        layer.output_sizes_of_parts = list(output_partition_sizes)
        layer.params_dtype = params_dtype
        layer.is_random = get_current_vllm_config().load_config.load_format == "dummy"
        if method in ("awq", "gptq"):
            self._create_int4(tensors, n, k, params_dtype)
        elif method == "fp8":
            block = self._config.settings.get("weight_block_size")
            self._create_stored(
                tensors, n, k, torch.float8_e4m3fn, "block" if block else "tensor", len(output_partition_sizes)
            )
            if self._config.settings.get("activation_scheme") == "static":
                tensors.add("input_scale", PerTensorScaleParameter, (len(output_partition_sizes),), torch.float32)
        else:
            self._create_compressed(tensors, n, k, params_dtype, len(output_partition_sizes))

    def _create_int4(self, tensors: _Tensors, n: int, k: int, dtype: torch.dtype) -> None:
        settings = self._config.settings
        size = settings.get("group_size", settings.get("q_group_size", GROUP))
        groups = 1 if size == -1 else k // size
        if self._config.format.method == "awq":
            tensors.packed("qweight", (k, n // _PER_WORD), input_dim=0, output_dim=1, packed_dim=1)
        else:
            tensors.packed("qweight", (k // _PER_WORD, n), input_dim=0, output_dim=1, packed_dim=0)
            tensors.add("g_idx", RowvLLMParameter, (k,), torch.int32, input_dim=0)
        tensors.packed("qzeros", (groups, n // _PER_WORD), input_dim=0, output_dim=1, packed_dim=1)
        tensors.add("scales", GroupQuantScaleParameter, (groups, n), dtype, input_dim=0, output_dim=1)

    def _create_stored(self, tensors: _Tensors, n: int, k: int, dtype: torch.dtype, strategy: str, parts: int) -> None:
        tensors.add("weight", ModelWeightParameter, (n, k), dtype, input_dim=1, output_dim=0)
        if strategy == "tensor":
            tensors.add("weight_scale", PerTensorScaleParameter, (parts,), torch.float32)
        elif strategy == "channel":
            tensors.add("weight_scale", ChannelQuantScaleParameter, (n, 1), torch.float32, output_dim=0)
        else:
            sizes = tensors.layer.output_sizes_of_parts
            if any(size % GROUP for size in sizes[:-1]):
                raise ValueError(
                    "xla_gpu.vllm: scales of blocks: expected layers that vLLM joins to have multiples of "
                    f"{GROUP} outputs, got {sizes}"
                )
            tensors.layer.weight_block_size = [GROUP, GROUP]  # vLLM's loaders ask for it
            name = "weight_scale_inv" if self._config.format.method == "fp8" else "weight_scale"
            shape = (-(-n // GROUP), -(-k // GROUP))
            tensors.add(name, BlockQuantScaleParameter, shape, torch.float32, input_dim=1, output_dim=0)

    def _create_compressed(self, tensors: _Tensors, n: int, k: int, dtype: torch.dtype, parts: int) -> None:
        (group,) = self._config.settings["config_groups"].values()
        weights, inputs = group["weights"], group.get("input_activations") or {}
        if weights["num_bits"] == 8:
            stored = torch.float8_e4m3fn if weights["type"] == "float" else torch.int8
            self._create_stored(tensors, n, k, stored, weights["strategy"], parts)
            if inputs and not inputs.get("dynamic"):
                tensors.add("input_scale", PerTensorScaleParameter, (parts,), torch.float32)
            return
        groups = k // weights["group_size"] if weights["strategy"] == "group" else 1
        tensors.packed("weight_packed", (n, k // _PER_WORD), input_dim=1, output_dim=0, packed_dim=1)
        tensors.add("weight_scale", GroupQuantScaleParameter, (n, groups), dtype, input_dim=1, output_dim=0)
        tensors.add("weight_shape", BasevLLMParameter, (2,), torch.int64)
        if not weights.get("symmetric", True):
            tensors.packed("weight_zero_point", (n // _PER_WORD, groups), input_dim=1, output_dim=0, packed_dim=0)
        if weights.get("actorder"):
            tensors.add("weight_g_idx", RowvLLMParameter, (k,), torch.int32, input_dim=0)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the checkpoint's tensors by those of ``linear``."""
        tensors = {f"layer.{name}": parameter.data for name, parameter in layer.named_parameters(recurse=False)}
        tensors.pop("layer.bias", None)
        for name in _SCALES:
            if not layer.is_random and f"layer.{name}" in tensors and tensors[f"layer.{name}"].isnan().any():
                raise ValueError(f"xla_gpu.vllm: {layer.prefix}: expected {name} in the checkpoint, got none, or NaN")
        scale = tensors.get("layer.weight_scale")
        parts = layer.output_sizes_of_parts
        if scale is not None and scale.shape == (len(parts),) and len(parts) > 1:
            # One scale for each of the layers that vLLM joined becomes one for each of their rows.
            tensors["layer.weight_scale"] = scale.repeat_interleave(torch.tensor(parts))
        made = self._config.format.load("layer", tensors.__getitem__, set(tensors), layer.params_dtype)
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        for name in ("weight", "weight_scale", "weight_zero_point"):
            value = getattr(made, name)
            layer.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """T[..., n] from x: T[..., k]."""
        out = xg.linear(
            x.reshape(-1, x.shape[-1]),
            layer.weight,
            weight_scale=layer.weight_scale,
            weight_zero_point=layer.weight_zero_point,
            bias=bias,
        )
        return out.reshape(*x.shape[:-1], out.shape[-1])


WEIGHT_LOADER_V2_SUPPORTED.append(CheckpointLinearMethod.__name__)


class _Tensors:
    """Adds parameters to a layer."""

    def __init__(self, layer: nn.Module, loader: Any) -> None:
        self.layer, self._loader = layer, loader

    def add(self, name: str, kind: Any, shape: tuple[int, ...], dtype: torch.dtype, **dims: int) -> None:
        # vLLM does not see to it that all parameters are loaded where a checkpoint is quantised.
        is_expected = name in _SCALES and not self.layer.is_random
        data = torch.full(shape, math.nan if is_expected else 0, dtype=dtype)
        self.layer.register_parameter(name, kind(data=data, weight_loader=self._loader, **dims))

    def packed(self, name: str, shape: tuple[int, ...], **dims: int) -> None:
        self.add(name, PackedvLLMParameter, shape, torch.int32, packed_factor=_PER_WORD, **dims)
