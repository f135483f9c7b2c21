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

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._core import packed_int4
from .._core.checks import FLOATS
from . import arrays
from .arrays import Array
from .weights import GROUP, LinearWeight

Get = Callable[[str], Array]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds column 0, 1, … of eight


class CheckpointFormat:
    """How a checkpoint stores its linear layers: as they are, or quantised by one of the methods that ``linear`` takes.

    Attributes:
      method: ``"none"``, ``"compressed-tensors"``, ``"fp8"``, ``"awq"`` or ``"gptq"``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads the settings.

        Args:
          config: the content of config.json. Where it describes a model with images, quantization_config may stand in
            its text_config.

        Raises:
          TypeError: config, or what it has for quantization_config, is no dict.
          ValueError: the checkpoint is quantised in a way that linear has no format for. The text names the setting.
            Or config is what config.json has for quantization_config.
        """
        settings = _settings(_mapping("config", config))
        if settings is None and config.get("text_config") is not None:
            settings = _settings(_mapping("text_config", config["text_config"]))
        if settings is None and "quant_method" in config:  # else the checkpoint would be taken for a plain one
            raise ValueError("CheckpointFormat: config: expected all of config.json, got its quantization_config alone")
        settings = None if settings is None else _mapping("quantization_config", settings)
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

        Returns:
          The weight [out_features, in_features], on the device of the checkpoint's tensors.

        Raises:
          ValueError: the checkpoint lacks a tensor, or one has another shape or dtype than its format has.
        """
        plain = f"{layer}.weight"
        has_scale = f"{plain}_scale" in names or f"{plain}_scale_inv" in names
        if plain in names and not has_scale:  # not quantised, as the head often is
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


def _settings(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"CheckpointFormat: {where}: expected a dict, got {type(value).__name__}")
    return value


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A dict among the settings; empty where there is none."""
    return _mapping(name, settings.get(name) or {})


def _check_block(setting: str, block: Any) -> None:
    if not isinstance(block, Sequence) or list(block) != [GROUP, GROUP]:
        raise _unsupported(setting, [GROUP, GROUP], block)


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
    groups = list(_part(settings, "config_groups").values())
    if len(groups) != 1:
        raise _unsupported("config_groups", "one group", len(groups))
    transforms = _part(_part(settings, "transform_config"), "config_groups").values()
    for location in (each.get("location") for scheme in transforms for each in scheme.get("apply") or ()):
        if not str(location).startswith("weight_"):  # those are in the stored weights; others are work of the program
            raise _unsupported("transform_config", "transforms of weights alone", location)
    sparsity = _part(settings, "sparsity_config").get("format", "dense")
    if sparsity != "dense":  # others leave zeros out of the files
        raise _unsupported("sparsity_config", "dense", sparsity)
    weights = _part(_mapping("config_groups", groups[0]), "weights")
    layout = str(groups[0].get("format") or settings.get("format"))
    bits, kind, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if layout == "pack-quantized":
        if (bits, kind) != (4, "int"):
            raise _unsupported("weights", "4-bit int for pack-quantized", f"{bits}-bit {kind}")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise _unsupported("actorder", "none, weight or static", weights["actorder"])
        size = _group_size(weights.get("group_size") if strategy in ("group", None) else -1)
        has_zero_points = not weights.get("symmetric", True)
        return lambda layer, get, names: _pack_quantized(layer, get, names, size, has_zero_points)
    if layout not in ("float-quantized", "int-quantized", "naive-quantized"):
        raise _unsupported("format", known, layout)
    if (bits, kind) not in ((8, "float"), (8, "int")):
        raise _unsupported("weights", f"8-bit float or int for {layout}", f"{bits}-bit {kind}")
    if kind == "int" and not weights.get("symmetric", True):
        raise _unsupported("symmetric", "true for 8-bit int", False)
    if strategy == "block":
        _check_block("block_structure", weights.get("block_structure"))
    if strategy not in ("tensor", "channel", "block"):
        raise _unsupported("strategy", "tensor, channel or block", strategy)
    dtype = "int8" if kind == "int" else "float8_e4m3fn"
    return lambda layer, get, names: _stored(layer, "weight_scale", get, names, dtype, strategy == "block")


def _fp8(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    block = settings.get("weight_block_size")
    if block is not None:
        _check_block("weight_block_size", block)
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fmt", "e4m3", settings["fmt"])

    def load(layer: str, get: Get, names: set[str]) -> LinearWeight:
        # Called the inverse: what the weight was divided by. Mistral's have it without blocks, too.
        inverse = block is not None or f"{layer}.weight_scale_inv" in names
        name = "weight_scale_inv" if inverse else "weight_scale"
        return _stored(layer, name, get, names, "float8_e4m3fn", block is not None)

    return load


def _stored(layer: str, scale_name: str, get: Get, names: set[str], dtype: str, has_blocks: bool) -> LinearWeight:
    weight, scale = (_tensor(get, names, f"{layer}.{name}") for name in ("weight", scale_name))
    if arrays.dtype_name(weight) != dtype or len(weight.shape) != 2:
        raise ValueError(f"{layer}.weight: expected {dtype}[n, k] as its scale says, got {_text(weight)}")
    n, k = weight.shape
    scale = arrays.cast(scale, "float32")
    size = math.prod(scale.shape)
    int8 = dtype == "int8"
    blocks = (-(-n // GROUP), -(-k // GROUP))
    if tuple(scale.shape) in ((n,), (n, 1)):  # not by their number: with k = 16384 there are as many blocks as rows
        return LinearWeight(weight, scale.reshape(n))
    if size == 1 and (not has_blocks or blocks == (1, 1)):
        return LinearWeight(weight, arrays.repeat(scale.reshape(1), n, 0) if int8 else scale.reshape(1))
    if not int8 and tuple(scale.shape) == blocks:
        return LinearWeight(weight, scale)
    one = "" if has_blocks else "one scale, "
    raise ValueError(
        f"{layer}.{scale_name}: expected {one}one for each of {n} rows or for each block of {GROUP}, "
        f"got shape {list(scale.shape)}"
    )


# ---- int4: repacked --------------------------------------------------------------------------------------------------


def _group_size(size: Any) -> int:
    """Values of k that share a scale; -1: all of them."""
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and (size < 1 or size % GROUP)):
        raise _unsupported("group_size", f"a multiple of {GROUP}, or -1", size)
    return size


def _nibbles(name: str, words: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """uint8[m, 8 * w] from int32[m, w]: of each word its nibbles in that order."""
    if arrays.dtype_name(words) != "int32" or len(words.shape) != 2:
        raise ValueError(f"{name}: expected packed int4, words of int32 in two dimensions, got {_text(words)}")
    xp = arrays.library(words)
    columns = [arrays.cast((words >> (4 * nibble)) & 15, "uint8") for nibble in order]
    return xp.stack(columns, -1).reshape(words.shape[0], -1)


def _turned(array: Array) -> Array:
    """The transpose of a matrix; what is none stays, for _nibbles to refuse."""
    return array.swapaxes(0, 1) if len(array.shape) == 2 else array


def _text(array: Array) -> str:
    return f"{arrays.dtype_name(array)}{list(array.shape)}"


class _Int4(NamedTuple):
    """The names of a layer's tensors, and its values with n first: what they are stored as differs."""

    layer: str
    scale_name: str
    zero_point_name: str
    values: Array  # uint8[n, k]
    size: int  # of a group; -1: k

    def weight(self, scale: Array, zero_point: Array | None, transposed: bool) -> LinearWeight:
        """From scales [n, groups] and zero points [n rounded up to words, groups], or [groups, n]: groups of 128."""
        n, k = self.values.shape
        size = k if self.size == -1 else self.size
        if k % GROUP or k % size:
            raise ValueError(f"{self.layer}: expected k of a multiple of {max(size, GROUP)}, as its groups, got {k}")
        self._check(self.scale_name, scale, n, k // size, transposed)
        if arrays.dtype_name(scale) not in ("float64", *FLOATS):
            raise ValueError(f"{self.layer}.{self.scale_name}: expected {' or '.join(FLOATS)}, got {_text(scale)}")
        if zero_point is not None:
            self._check(self.zero_point_name, zero_point, -(-n // 8) * 8, k // size, transposed)
        times = size // GROUP
        scale, zero_point = (None if x is None else x.swapaxes(0, 1) if transposed else x for x in (scale, zero_point))
        zero_point = None if zero_point is None else arrays.repeat(zero_point[:n], times, 1)
        return LinearWeight(packed_int4.pack(self.values), arrays.repeat(scale, times, 1), zero_point)

    def _check(self, name: str, array: Array, n: int, groups: int, transposed: bool) -> None:
        expected = (groups, n) if transposed else (n, groups)
        if tuple(array.shape) != expected:
            where = f"{self.layer}.{name}: expected {groups} groups of {n} outputs, [{expected[0]}, {expected[1]}]"
            raise ValueError(f"{where}, as the values and group_size {self.size} say, got shape {list(array.shape)}")


def _pack_quantized(layer: str, get: Get, names: set[str], size: int, has_zero_points: bool) -> LinearWeight:
    """compressed-tensors: values + 8 along k, zero points + 8 along n, lowest nibble first."""
    packed = f"{layer}.weight_packed"
    values = _nibbles(packed, _tensor(get, names, packed))
    if f"{layer}.weight_g_idx" in names:
        _check_order(f"{layer}.weight_g_idx", get(f"{layer}.weight_g_idx"), values.shape[1], size)
    scale = _tensor(get, names, f"{layer}.weight_scale")
    zero_point, name = None, f"{layer}.weight_zero_point"
    if has_zero_points or name in names:
        zero_point = _nibbles(name, _turned(_tensor(get, names, name))).swapaxes(0, 1)
    made = _Int4(layer, "weight_scale", "weight_zero_point", values, size)
    return made.weight(scale, zero_point, transposed=False)


def _awq(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    """AutoAWQ's gemm layout: along n, nibbles in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    if settings.get("bits", settings.get("w_bit", 4)) != 4:
        raise _unsupported("bits", 4, settings.get("bits", settings.get("w_bit")))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported("version", "gemm", version)
    size = _group_size(settings.get("group_size", settings.get("q_group_size", GROUP)))

    def load(layer: str, get: Get, names: set[str]) -> LinearWeight:
        values, zeros = (
            _nibbles(name, _tensor(get, names, name), _AWQ_ORDER) for name in (f"{layer}.qweight", f"{layer}.qzeros")
        )
        made = _Int4(layer, "scales", "qzeros", values.swapaxes(0, 1), size)
        return made.weight(_tensor(get, names, f"{layer}.scales"), zeros, transposed=True)

    return load


def _gptq(settings: Mapping[str, Any]) -> Callable[[str, Get, set[str]], LinearWeight]:
    """AutoGPTQ's layout: along k, lowest nibble first; zero points along n, stored less 1 but in gptq_v2."""
    if settings.get("bits", 4) != 4:
        raise _unsupported("bits", 4, settings.get("bits"))
    size = _group_size(settings.get("group_size", GROUP))
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", "gptq or gptq_v2", layout)
    one = 0 if layout == "gptq_v2" else 1
    act_order = settings.get("desc_act") is True

    def load(layer: str, get: Get, names: set[str]) -> LinearWeight:
        weight, zeros, order = (f"{layer}.{name}" for name in ("qweight", "qzeros", "g_idx"))
        values = _nibbles(weight, _turned(_tensor(get, names, weight)))
        if act_order or order in names:
            _check_order(order, _tensor(get, names, order), values.shape[1], size)
        made = _Int4(layer, "scales", "qzeros", values, size)
        zero_point = _nibbles(zeros, _tensor(get, names, zeros)) + one
        return made.weight(_tensor(get, names, f"{layer}.scales"), zero_point, transposed=True)

    return load


def _check_order(name: str, groups_of_k: Array, k: int, size: int) -> None:
    """Groups that lie in order. With act-order a group's values lie anywhere along k, and linear has no such format.

    The first may be any: a device's part of a layer has the later ones. All the same says nothing about an order.
    """
    if tuple(groups_of_k.shape) != (k,):
        raise ValueError(f"{name}: expected the group of each of {k} values, got shape {list(groups_of_k.shape)}")
    xp = arrays.library(groups_of_k)
    if size == -1 or bool((groups_of_k == groups_of_k[:1]).all()):
        return
    if bool((groups_of_k[1:] < groups_of_k[:-1]).any()):
        raise ValueError(f"{name}: expected groups in order, got act-order (desc_act), which linear cannot read")
    in_order = xp.arange(k) // size
    if xp.__name__ == "torch":
        in_order = in_order.to(groups_of_k.device)
    if bool((groups_of_k - groups_of_k[:1] != in_order).any()):
        raise ValueError(f"{name}: expected groups of {size} values as group_size says, got others")
