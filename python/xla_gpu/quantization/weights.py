"""Weights in linear's formats: packing, quantising, joining."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._core import packed_int4
from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec
from ..ops import linear
from . import arrays
from .arrays import Array

GROUP = 128  # values of k that share a scale of packed int4, and a side of a float8 block
FORMATS = ("float8", "int8", "int4")

_FLOAT8_MAX = 448.0


class LinearWeight(NamedTuple):
    """A weight as ``linear`` takes it: ``linear(x, **weight.arguments())``.

    Attributes:
      weight: T, float8_e4m3fn or int8 [n, k], or uint8[n, k / 2] that ``pack_weight`` made. T is float32, float16 or
        bfloat16.
      weight_scale: of the shapes that ``linear`` names for each of them; None with T.
      weight_zero_point: uint8[n, k / 128] with uint8, or None, which means 8.
    """

    weight: Array
    weight_scale: Array | None = None
    weight_zero_point: Array | None = None

    def arguments(self) -> dict[str, Array]:
        """The arguments that are not None, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def pack_weight(values: Array) -> Array:
    """Packs unsigned int4 values for linear.

    Four bytes hold eight neighbouring values of k: byte 0 holds values 0 (low nibble) and 2 (high nibble), byte 1
    values 4 and 6, byte 2 values 1 and 3, byte 3 values 5 and 7.

    Args:
      values: uint8[n, k] of 0 to 15, that is the signed value plus the zero point (8 where none is given to linear).
        k is a multiple of 128.

    Returns:
      uint8[n, k / 2].

    Raises:
      TypeError: values are of another dtype.
      ValueError: values are of another shape, or one of them is above 15. Inside jax.jit, torch.compile and vmap, and
        of torch_xla's tensors, values are not looked at.
    """
    _check_uint8("pack_weight", "values", values, GROUP)
    largest = arrays.largest(values)
    if largest is not None and largest > 15:
        raise ValueError(f"pack_weight: values: expected values of 0 to 15, got {largest}")
    return packed_int4.pack(values)


def unpack_weight(packed: Array) -> Array:
    """The inverse of pack_weight.

    Args:
      packed: uint8[n, k / 2].

    Returns:
      uint8[n, k] of 0 to 15.

    Raises:
      TypeError: packed is of another dtype.
      ValueError: packed is of another shape.
    """
    _check_uint8("unpack_weight", "packed", packed, GROUP // 2)
    return packed_int4.unpack(packed, arrays.library(packed).stack)


def _check_uint8(function: str, name: str, array: Array, multiple: int) -> None:
    arrays.library(array, f"{function}: {name}")
    shape, dtype = list(array.shape), arrays.dtype_name(array)
    if dtype != "uint8":
        raise TypeError(f"{function}: {name}: expected dtype uint8, got {dtype}{shape}")
    if len(shape) != 2 or shape[1] % multiple:
        raise ValueError(f"{function}: {name}: expected rank 2, rows of a multiple of {multiple}, got shape {shape}")


def quantize(weight: Array, weight_format: str) -> LinearWeight:
    """Quantises a weight by rounding to nearest, without data.

    | format | scale | values |
    |---|---|---|
    | float8 | of each row: its largest magnitude / 448 | float8_e4m3fn |
    | int8 | of each row: its largest magnitude / 127 | -127 to 127 |
    | int4 | of each group of 128 along k: the value of the largest magnitude / -8 | -8 to 7, packed |

    A row or group with NaN or an infinity has the scale NaN.

    Args:
      weight: T[n, k], T float32, float16 or bfloat16; for int4 k is a multiple of 128. It may be a parameter of a
        PyTorch model.
      weight_format: "float8", "int8" or "int4".

    Returns:
      The weight as linear takes it, without a gradient.

    Raises:
      TypeError: weight is no array, or has another dtype.
      ValueError: weight_format is another string, or weight has another shape.
    """
    if weight_format not in FORMATS:
        raise ValueError(f"quantize: weight_format: expected {' or '.join(FORMATS)}, got {weight_format!r}")
    xp = arrays.library(weight, "quantize: weight")
    dtype = arrays.dtype_name(weight)
    if dtype not in FLOATS:
        raise TypeError(f"quantize: weight: expected dtype {' or '.join(FLOATS)}, got {dtype}{list(weight.shape)}")
    if len(weight.shape) != 2 or 0 in weight.shape or (weight_format == "int4" and weight.shape[1] % GROUP):
        multiple = f", k a multiple of {GROUP}" if weight_format == "int4" else ""
        raise ValueError(
            f"quantize: weight: expected shape [n, k] with n and k from 1{multiple}, got {list(weight.shape)}"
        )
    weight = arrays.detached(weight)
    wide = arrays.cast(weight, "float32")
    if weight_format == "int4":
        groups = wide.reshape(weight.shape[0], -1, GROUP)
        high, low = xp.amax(groups, -1), xp.amin(groups, -1)
        scale = arrays.cast(xp.where(high > -low, high, low) / -8, weight.dtype)  # may round to 0
        scale = _usable(xp, scale, groups)
        values = xp.round(groups / arrays.cast(scale, "float32")[:, :, None]) + 8
        return LinearWeight(packed_int4.pack(arrays.cast(values.clip(0, 15), "uint8").reshape(weight.shape)), scale)
    largest = 127.0 if weight_format == "int8" else _FLOAT8_MAX
    scale = _usable(xp, xp.amax(xp.abs(wide), -1) / largest, wide)
    values = (wide / scale[:, None]).clip(-largest, largest)
    if weight_format == "int8":
        return LinearWeight(arrays.cast(xp.round(values), "int8"), scale)
    return LinearWeight(arrays.cast(values, "float8_e4m3fn"), scale)


def _usable(xp: Any, scale: Array, values: Array) -> Array:
    """Scales of rows or groups: of zeros any but 0, by which they would be divided; with NaN or an infinity NaN.

    The largest number may be another one than NaN where XLA finds it. An infinite scale would make NaN of zeros alone.
    """
    scale = xp.where(scale == 0, xp.ones_like(scale), scale)
    return xp.where((~xp.isfinite(values)).any(-1), xp.full_like(scale, math.nan), scale)


def dequantize(weight: LinearWeight) -> Array:
    """The numbers that a weight stands for, ``(stored - zero_point) * scale``.

    Args:
      weight: in any format of ``linear``.

    Returns:
      float32[n, k].

    Raises:
      TypeError: weight is no LinearWeight, or holds no arrays, or arrays of dtypes that linear does not take.
      ValueError: they have other shapes than linear takes, or a scale is missing.
    """
    if not isinstance(weight, LinearWeight):
        raise TypeError(f"dequantize: weight: expected a LinearWeight, got {type(weight).__name__}")
    _check_scales("dequantize", weight)
    stored, scale, zero_point = weight
    values = unpack_weight(stored) if arrays.dtype_name(stored) == "uint8" else stored
    n, columns = values.shape
    values = arrays.cast(values, "float32")
    if scale is None:
        return values
    wide = arrays.cast(scale, "float32")
    if arrays.dtype_name(stored) == "uint8":
        offset = 8.0 if zero_point is None else arrays.cast(zero_point, "float32")[:, :, None]
        return ((values.reshape(n, -1, GROUP) - offset) * wide[:, :, None]).reshape(n, columns)
    if len(scale.shape) == 1:
        return values * wide[:, None]
    return values * arrays.repeat(arrays.repeat(wide, GROUP, 0)[:n], GROUP, 1)[:, :columns]


def _check_scales(where: str, weight: LinearWeight) -> None:
    """Raises where scales are not what linear takes: rows would have those of others. ``where`` begins error texts."""
    specs = {}
    for name, array in weight.arguments().items():
        arrays.library(array, f"{where}: {name}")
        specs[name] = ArraySpec(tuple(array.shape), arrays.dtype_name(array))
    stored, scale = specs["weight"], specs.get("weight_scale")
    check = Checks(where)
    check.dtype("weight", stored, (*FLOATS, "float8_e4m3fn", "int8", "uint8"))
    n, columns = check.rank("weight", stored, "n, k / 2" if stored.dtype == "uint8" else "n, k")
    dtype = stored.dtype if stored.dtype in FLOATS else "float32"  # of the rows that it is for
    if stored.dtype == "uint8" and scale is not None and scale.dtype in FLOATS:
        dtype = scale.dtype
    k = 2 * columns if stored.dtype == "uint8" else columns
    linear.check_scale(check, ArraySpec((), dtype), stored, n, k, scale, specs.get("weight_zero_point"))


def concatenate(parts: Iterable[LinearWeight]) -> LinearWeight:
    """Joins weights of one format along n, as q, k and v or gate and up that are multiplied together.

    Args:
      parts: one or more weights [n_i, k] of one format and k.

    Returns:
      The weight [sum of n_i, k].

    Raises:
      TypeError: parts are not several, one is no LinearWeight, or holds something else than arrays of dtypes that
        linear takes.
      ValueError: there is no part, the libraries of arrays, the formats or k differ, a part has not the scales that
        linear takes, or blocks of float8 scales do not end where a part does.
    """
    if isinstance(parts, LinearWeight):  # itself a tuple
        raise TypeError("concatenate: parts: expected LinearWeights, got one of them alone")
    if not isinstance(parts, Iterable):
        raise TypeError(f"concatenate: parts: expected LinearWeights, got {type(parts).__name__}")
    parts = list(parts)
    for part in parts:
        if not isinstance(part, LinearWeight):
            raise TypeError(f"concatenate: parts: expected LinearWeights, got {type(part).__name__}")
        for name, array in part.arguments().items():
            arrays.library(array, f"concatenate: {name}")
    if not parts:
        raise ValueError("concatenate: parts: expected one or more, got none")
    _check_same("library of arrays", [arrays.library(part.weight).__name__ for part in parts])
    _check_same("dtype", [arrays.dtype_name(part.weight) for part in parts])
    is_int4 = arrays.dtype_name(parts[0].weight) == "uint8"
    _check_same("rank", [len(part.weight.shape) for part in parts])
    _check_same("k", [part.weight.shape[-1] * (2 if is_int4 else 1) for part in parts])
    scales: list[Array] = [part.weight_scale for part in parts]
    _check_same("kind of scale", [None if scale is None else f"rank {len(scale.shape)}" for scale in scales])
    if scales[0] is not None:
        _check_same("dtype of scales", [arrays.dtype_name(scale) for scale in scales])
    for part in parts:
        _check_scales("concatenate", part)
    if len(parts) == 1:
        return parts[0]
    weight = arrays.concatenate([part.weight for part in parts])
    if scales[0] is None:
        return LinearWeight(weight)
    if len(scales[0].shape) == 1:  # one scale for a whole part becomes one for each of its rows
        scales = [
            arrays.repeat(scale, part.weight.shape[0], 0) if scale.shape[0] == 1 else scale
            for part, scale in zip(parts, scales, strict=True)
        ]
    elif not is_int4 and any(part.weight.shape[0] % GROUP for part in parts[:-1]):
        raise ValueError(f"concatenate: parts: expected a multiple of {GROUP} rows in each, since scales are of blocks")
    zero_points = [part.weight_zero_point for part in parts]
    zero_point = None
    if any(z is not None for z in zero_points):
        eights = [arrays.library(s).full_like(s, 8) for s in scales]
        zero_point = arrays.concatenate(
            [arrays.cast(eight, "uint8") if z is None else z for z, eight in zip(zero_points, eights, strict=True)]
        )
    return LinearWeight(weight, arrays.concatenate(scales), zero_point)


def _check_same(what: str, found: Sequence[object]) -> None:
    if len(set(found)) != 1:
        raise ValueError(f"concatenate: parts: expected one {what}, got {', '.join(sorted(map(str, set(found))))}")
