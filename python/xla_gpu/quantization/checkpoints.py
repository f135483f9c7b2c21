"""Quantised checkpoints of Hugging Face's layouts, loaded as linear takes them: by config.json, without a tool.

| quant_method | format | tensors of a layer |
|---|---|---|
| compressed-tensors | float-quantized | weight float8_e4m3fn[n, k]; weight_scale of tensor, channels or blocks |
| compressed-tensors | int-quantized | weight int8[n, k]; weight_scale of channels |
| compressed-tensors | pack-quantized, 4 bits | weight_packed int32[n, k / 8]; weight_scale; weight_zero_point |
| fp8 | | weight float8_e4m3fn[n, k]; weight_scale_inv of blocks of 128, or weight_scale |
| awq | gemm | qweight int32[k, n / 8], qzeros, scales |
| gptq | gptq and gptq_v2 | qweight int32[k / 8, n], qzeros, scales, g_idx in order |

Groups of int4 are of a multiple of 128 values, or whole rows. Scales of activations are not used: linear's products
have x in its own dtype. Scales of int4 are stored in T; those of AWQ and GPTQ are float16, and exact where T is that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._core import packed_int4
from .._core.checks import FLOATS
from . import arrays
from .arrays import Array
from .weights import GROUP, LinearWeight

Get = Callable[[str], Array]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds column 0, 1, … of eight


class CheckpointFormat:
    """How a checkpoint stores its linear layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads the settings.

        Args:
          config: the content of config.json.

        Raises:
          ValueError: the checkpoint is quantised in a way that linear has no format for. The text names the setting.
        """
        settings = config.get("quantization_config") or config.get("compression_config")
        self.method = "none" if settings is None else str(settings.get("quant_method", "compressed-tensors"))
        self._load: Callable[[str, Get, set[str]], LinearWeight]
        if settings is None:
            self._load = _refuse_unknown
        elif self.method == "compressed-tensors":
            self._load = _compressed_tensors(settings)
        elif self.method == "fp8":
            self._load = _fp8(settings)
        elif self.method == "awq":
            self._load = _awq(settings)
        elif self.method == "gptq":
            self._load = _gptq(settings)
        else:
            raise _unsupported("quant_method", "compressed-tensors, fp8, awq or gptq", self.method)

    def load(self, layer: str, get: Get, names: set[str], dtype: Any) -> LinearWeight:
        """One layer's weight.

        Args:
          layer: the name before the last dot, "model.layers.0.self_attn.q_proj".
          get: returns a tensor of the checkpoint by name.
          names: of the checkpoint's tensors.
          dtype: T, of plain weights and of scales of int4, as the arrays' library or NumPy spells it.

        Raises:
          ValueError: the checkpoint lacks a tensor, or one has another shape or dtype than its format has.
        """
        plain = f"{layer}.weight"
        if plain in names and not names & {
            f"{plain}_scale",
            f"{plain}_scale_inv",
        }:  # not quantised, as the head often is
            weight = get(plain)
            if arrays.dtype_name(weight) not in ("float64", *FLOATS):
                raise ValueError(
                    f"{plain}: expected {' or '.join(FLOATS)} where the checkpoint has no scale for it, "
                    f"{plain}_scale or {plain}_scale_inv, got {arrays.dtype_name(weight)}"
                )
            return LinearWeight(arrays.cast(weight, dtype))
        loaded = self._load(layer, get, names)
        if arrays.dtype_name(loaded.weight) == "uint8":
            return loaded._replace(weight_scale=arrays.cast(loaded.weight_scale, dtype))
        return loaded


def _unsupported(setting: str, expected: object, got: object) -> ValueError:
    return ValueError(f"quantization_config: {setting}: expected {expected}, got {got!r}")


def _tensor(get: Get, names: set[str], name: str) -> Array:
    if name not in names:
        raise ValueError(f"the checkpoint has no tensor {name!r}, which its quantization_config asks for")
    return get(name)


def _refuse_unknown(layer: str, get: Get, names: set[str]) -> LinearWeight:
    raise ValueError(f"the checkpoint has no tensor '{layer}.weight', and config.json has no quantization_config")


# ---- float8 and int8: stored as they are -----------------------------------------------------------------------------


def _compressed_tensors(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    known = "float-quantized, int-quantized, naive-quantized or pack-quantized"
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _unsupported("config_groups", "one group", len(groups))
    transforms = ((settings.get("transform_config") or {}).get("config_groups") or {}).values()
    for location in (each.get("location") for scheme in transforms for each in scheme.get("apply") or ()):
        if not str(location).startswith("weight_"):  # those are in the stored weights; others are work of the program
            raise _unsupported("transform_config", "transforms of weights alone", location)
    weights = groups[0].get("weights") or {}
    layout = str(groups[0].get("format") or settings.get("format"))
    bits, kind, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if layout == "pack-quantized":
        if (bits, kind) != (4, "int"):
            raise _unsupported("weights", "4-bit int for pack-quantized", f"{bits}-bit {kind}")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise _unsupported("actorder", "none, weight or static", weights["actorder"])
        _check_group(weights.get("group_size") if strategy == "group" else -1)
        return _pack_quantized
    if layout not in ("float-quantized", "int-quantized", "naive-quantized"):
        raise _unsupported("format", known, layout)
    if (bits, kind) not in ((8, "float"), (8, "int")):
        raise _unsupported("weights", f"8-bit float or int for {layout}", f"{bits}-bit {kind}")
    if kind == "int" and not weights.get("symmetric", True):
        raise _unsupported("symmetric", "true for 8-bit int", False)
    if strategy == "block" and list(weights.get("block_structure") or ()) != [GROUP, GROUP]:
        raise _unsupported("block_structure", [GROUP, GROUP], weights.get("block_structure"))
    if strategy not in ("tensor", "channel", "block"):
        raise _unsupported("strategy", "tensor, channel or block", strategy)
    return lambda layer, get, names: _stored(
        _tensor(get, names, f"{layer}.weight"), _tensor(get, names, f"{layer}.weight_scale"), layer
    )


def _fp8(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    block = settings.get("weight_block_size")
    if block is not None and list(block) != [GROUP, GROUP]:
        raise _unsupported("weight_block_size", [GROUP, GROUP], block)
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fmt", "e4m3", settings["fmt"])
    # Called the inverse: what the weight was divided by.
    name = "weight_scale" if block is None else "weight_scale_inv"
    return lambda layer, get, names: _stored(
        _tensor(get, names, f"{layer}.weight"), _tensor(get, names, f"{layer}.{name}"), layer
    )


def _stored(weight: Array, scale: Array, layer: str) -> LinearWeight:
    n, k = weight.shape
    scale = arrays.cast(scale, "float32")
    size = 1
    for dimension in scale.shape:
        size *= dimension
    int8 = arrays.dtype_name(weight) == "int8"
    if tuple(scale.shape) in ((n,), (n, 1)):  # not by their number: with k = 16384 there are as many blocks as rows
        return LinearWeight(weight, scale.reshape(n))
    if size == 1:
        return LinearWeight(weight, arrays.repeat(scale.reshape(1), n, 0) if int8 else scale.reshape(1))
    if not int8 and tuple(scale.shape) == (-(-n // GROUP), -(-k // GROUP)):
        return LinearWeight(weight, scale)
    raise ValueError(
        f"{layer}.weight_scale: expected one scale, one for each of {n} rows or for each block of {GROUP}, "
        f"got shape {list(scale.shape)}"
    )


# ---- int4: repacked --------------------------------------------------------------------------------------------------


def _check_group(size: Any) -> None:
    if not isinstance(size, int) or (size != -1 and (size < 1 or size % GROUP)):
        raise _unsupported("group_size", f"a multiple of {GROUP}, or -1", size)


def _nibbles(words: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """uint8[..., 8 * m] from int32[..., m]: of each word its nibbles in that order."""
    if arrays.dtype_name(words) != "int32":
        raise ValueError(f"packed int4: expected words of int32, got {arrays.dtype_name(words)}")
    xp = arrays.library(words)
    columns = [arrays.cast((words >> (4 * nibble)) & 15, "uint8") for nibble in order]
    return xp.stack(columns, -1).reshape(*words.shape[:-1], -1)


def _int4(layer: str, values: Array, scale: Array, zero_point: Array | None) -> LinearWeight:
    """From values uint8[n, k], and a scale and zero points of any groups [n, groups], for groups of 128."""
    n, k = values.shape
    groups = scale.shape[1]
    if scale.shape[0] != n or k % (GROUP * groups):
        raise ValueError(
            f"{layer}: expected scales [{n}, groups] of groups of a multiple of {GROUP} in k = {k}, "
            f"got shape {list(scale.shape)}"
        )
    times = k // (GROUP * groups)
    scale = arrays.repeat(scale, times, 1)
    zero_point = None if zero_point is None else arrays.repeat(zero_point[:n], times, 1)
    return LinearWeight(packed_int4.pack(values), scale, zero_point)


def _pack_quantized(layer: str, get: Get, names: set[str]) -> LinearWeight:
    """compressed-tensors: values + 8 along k, zero points + 8 along n, lowest nibble first."""
    if f"{layer}.weight_g_idx" in names:
        _check_order(layer, get(f"{layer}.weight_g_idx"))
    values = _nibbles(_tensor(get, names, f"{layer}.weight_packed"))
    scale = _tensor(get, names, f"{layer}.weight_scale")
    zero_point = None
    if f"{layer}.weight_zero_point" in names:
        zero_point = _nibbles(get(f"{layer}.weight_zero_point").swapaxes(0, 1)).swapaxes(0, 1)
    return _int4(layer, values, scale, zero_point)


def _awq(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    """AutoAWQ's gemm layout: along n, nibbles in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    if settings.get("bits", settings.get("w_bit", 4)) != 4:
        raise _unsupported("bits", 4, settings.get("bits", settings.get("w_bit")))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported("version", "gemm", version)
    _check_group(settings.get("group_size", settings.get("q_group_size", GROUP)))

    def load(layer: str, get: Get, names: set[str]) -> LinearWeight:
        values, zeros = (_nibbles(_tensor(get, names, f"{layer}.{name}"), _AWQ_ORDER) for name in ("qweight", "qzeros"))
        scales = _tensor(get, names, f"{layer}.scales")
        return _int4(layer, values.swapaxes(0, 1), scales.swapaxes(0, 1), zeros.swapaxes(0, 1))

    return load


def _gptq(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    """AutoGPTQ's layout: along k, lowest nibble first; zero points along n, stored less 1 but in gptq_v2."""
    if settings.get("bits", 4) != 4:
        raise _unsupported("bits", 4, settings.get("bits"))
    _check_group(settings.get("group_size", GROUP))
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", "gptq or gptq_v2", layout)
    one = 0 if layout == "gptq_v2" else 1

    def load(layer: str, get: Get, names: set[str]) -> LinearWeight:
        if f"{layer}.g_idx" in names:
            _check_order(layer, get(f"{layer}.g_idx"))
        values = _nibbles(_tensor(get, names, f"{layer}.qweight").swapaxes(0, 1))
        zeros = _nibbles(_tensor(get, names, f"{layer}.qzeros")) + one
        scales = _tensor(get, names, f"{layer}.scales")
        return _int4(layer, values, scales.swapaxes(0, 1), zeros.swapaxes(0, 1))

    return load


def _check_order(layer: str, groups_of_k: Array) -> None:
    """Groups that lie in order. With act-order a group's values lie anywhere along k, and linear has no such format."""
    if bool((groups_of_k[1:] < groups_of_k[:-1]).any()):
        raise ValueError(f"{layer}.g_idx: expected groups in order, got act-order (desc_act), which linear cannot read")
