"""A launch of a kernel: its geometry, its arguments in the form that passes through tracers, and the custom call."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core.attributes import attributes
from .._core.operator import CACHED_CALLS, ArraySpec, OpCall
from .cuda_kernel import CudaKernel, by_key

TARGET = "xla_gpu_kernel_call"

# Kinds of arguments. The first three are those of the handler (ffi/user_kernels/kernel_call_ffi.cc).
OPERAND, RESULT, BITS, FLOAT, SCRATCH = range(5)

_LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64), "cluster": (16, 16, 16)}


@dataclass(frozen=True)
class Result:
    """Stands among a kernel's arguments for the pointer of result ``index``."""

    index: int


@dataclass(frozen=True)
class Scratch:
    """Stands among a kernel's arguments for a pointer to ``num_bytes`` of memory that the kernel alone uses."""

    num_bytes: int


@dataclass(frozen=True)
class Arguments:
    """A kernel's arguments as lists of numbers, the only form that passes through torch.compile unharmed."""

    encoded: list[int]  # kind, value and size of each
    floats: list[float]  # those that Python wrote as float: their bits depend on the parameter's size
    arrays: list[Any]  # the operands


def encode(
    name: str,
    sizes: tuple[int, ...] | None,
    arguments: Sequence[Any],
    results: Sequence[int],
    is_array: Callable[[Any], bool],
) -> Arguments:
    """The arguments of kernel ``name``, whose parameters have ``sizes``.

    ``results`` are those that no operand is aliased to. Where no argument is a ``Result``, they follow the arguments.
    """
    encoded: list[int] = []
    floats: list[float] = []
    arrays: list[Any] = []
    placed: list[int] = []
    for i, value in enumerate(arguments):
        size = sizes[i] if sizes is not None and i < len(sizes) else 0
        if is_array(value):
            encoded += [OPERAND, len(arrays), 0]
            arrays.append(value)
        elif isinstance(value, Result):
            encoded += [RESULT, value.index, 0]
            placed.append(value.index)
        elif isinstance(value, Scratch):
            encoded += [SCRATCH, _int(f"{name}: argument {i}: Scratch", value.num_bytes), 0]
        elif value is None:
            encoded += [BITS, 0, 8]
        elif isinstance(value, np.generic):
            encoded += [BITS, _bits(f"{name}: argument {i}", value), value.itemsize]
        elif isinstance(value, bool):
            encoded += [BITS, int(value), size or 1]
        elif isinstance(value, int):
            encoded += [BITS, _fitting(f"{name}: argument {i}", value, size or 4), size or 4]
        elif isinstance(value, float):
            encoded += [FLOAT, len(floats), size or 4]
            floats.append(value)
        else:
            raise TypeError(
                f"{name}: argument {i}: expected an array, a number, None, Result or Scratch, "
                f"got {type(value).__name__}"
            )
    if not placed:
        for index in results:
            encoded += [RESULT, index, 0]
    elif sorted(placed) != list(results):
        raise ValueError(f"{name}: arguments: expected Result of each of {list(results)} once, got {sorted(placed)}")
    return Arguments(encoded, floats, arrays)


def _bits(where: str, value: np.generic) -> int:
    if value.dtype.kind not in "biufV" or value.itemsize > 8:  # V: ml_dtypes' types
        raise TypeError(f"{where}: expected a number of up to 64 bits, got {value.dtype.name}")
    return int.from_bytes(value.tobytes().ljust(8, b"\0"), "little", signed=True)


def _fitting(where: str, value: int, size: int) -> int:
    """``value`` as the signed number of 64 bits whose low ``size`` bytes are it."""
    if not -(2 ** (8 * size - 1)) <= value < 2 ** (8 * size):
        raise ValueError(f"{where}: expected an integer of {8 * size} bits, as the kernel's parameter, got {value}")
    return value - 2**64 if value >= 2**63 else value


@dataclass(frozen=True)
class Geometry:
    """How a kernel is launched, checked against what every GPU has as limits."""

    grid: tuple[int, int, int]  # CTAs
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    cooperative: bool
    pdl: bool

    def encoded(self) -> list[int]:
        """As numbers."""
        return [*self.grid, *self.block, *self.cluster, self.shared, int(self.cooperative), int(self.pdl)]

    @staticmethod
    def decoded(numbers: Sequence[int]) -> Geometry:
        """What ``encoded`` made into ``numbers``."""
        x, y, z, bx, by, bz, cx, cy, cz, shared, cooperative, pdl = numbers
        return Geometry((x, y, z), (bx, by, bz), (cx, cy, cz), shared, bool(cooperative), bool(pdl))


def geometry(
    name: str, grid: Any, block: Any, cluster: Any = 1, shared: int = 0, cooperative: bool = False, pdl: bool = False
) -> Geometry:
    """The geometry of a launch of kernel ``name``. Raises TypeError and ValueError."""
    checked = Geometry(
        _triple(name, "grid", grid),
        _triple(name, "block", block),
        _triple(name, "cluster", cluster),
        _int(f"{name}: shared", shared),
        bool(cooperative),
        bool(pdl),
    )
    threads = checked.block[0] * checked.block[1] * checked.block[2]
    if threads > 1024:
        raise ValueError(f"{name}: block: expected at most 1024 threads in all, got {checked.block}")
    if any(size % of for size, of in zip(checked.grid, checked.cluster, strict=True)):
        raise ValueError(f"{name}: grid: expected whole clusters of {checked.cluster} CTAs, got {checked.grid}")
    if checked.shared < 0:
        raise ValueError(f"{name}: shared: expected 0 or more bytes, got {shared}")
    return checked


def _triple(name: str, which: str, value: Any) -> tuple[int, int, int]:
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{name}: {which}: expected an int or up to three, got {value!r}")
    x, y, z = (*(_int(f"{name}: {which}", size) for size in sizes), 1, 1)[:3]
    limits = _LIMITS[which]
    if not (1 <= x <= limits[0] and 1 <= y <= limits[1] and 1 <= z <= limits[2]):
        raise ValueError(f"{name}: {which}: expected 1 to {limits}, got {(x, y, z)}")
    return x, y, z


def _int(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: expected an int, got {type(value).__name__}")
    return int(value)


def bind(
    kernel: str,
    operands: tuple[ArraySpec, ...],
    numbers: tuple[int, ...],
    encoded: tuple[int, ...],
    floats: tuple[bytes, ...],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    """The custom call that launches the kernel of that key; scratch memory follows its results. Cached.

    ``floats`` are the bytes of doubles, so that 0.0 and -0.0 are told apart.

    Raises:
      ValueError: the arguments do not fit the kernel's parameters, or aliases do not fit the arrays.
    """
    arguments = (kernel, operands, numbers, encoded, floats, results, aliases, check_inputs)
    try:
        return _bind(*arguments)
    except TypeError:  # a symbolic size cannot be hashed, or an argument is refused with a text
        return _bind.__wrapped__(*arguments)


def double_bytes(values: Sequence[float]) -> tuple[bytes, ...]:
    """``values`` as ``bind`` takes them."""
    return tuple(struct.pack("<d", value) for value in values)


@functools.lru_cache(maxsize=CACHED_CALLS)
def _bind(
    key: str,
    operands: tuple[ArraySpec, ...],
    numbers: tuple[int, ...],
    encoded: tuple[int, ...],
    floats: tuple[bytes, ...],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    return make_call(by_key(key), operands, Geometry.decoded(numbers), encoded, floats, results, aliases, check_inputs)


def make_call(
    kernel: CudaKernel,
    operands: tuple[ArraySpec, ...],
    shape: Geometry,
    encoded: Sequence[int],
    floats: Sequence[bytes],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    """The custom call; see ``bind``."""
    where = f"kernel_call: {kernel.name}"
    check_aliases(where, operands, results, aliases)
    scratch: list[ArraySpec] = []
    parameters: list[int] = []
    for i in range(0, len(encoded), 3):
        kind, value, size = encoded[i : i + 3]
        argument = f"{where}: argument {i // 3}"
        if kind == SCRATCH:
            if value < 1:
                raise ValueError(f"{argument}: expected Scratch of 1 byte or more, got {value}")
            kind, value, size = RESULT, len(results) + len(scratch), 0
            scratch.append(ArraySpec((encoded[i + 1],), "uint8"))
        elif kind == FLOAT:
            kind, value = BITS, _float_bits(argument, struct.unpack("<d", floats[value])[0], size)
        elif kind == RESULT and not 0 <= value < len(results):
            raise ValueError(f"{argument}: expected a Result below {len(results)}, got {value}")
        parameters += [kind, value, size]
    _check_sizes(where, kernel, parameters)
    return OpCall(
        name="kernel_call",
        target=TARGET,
        operand_names=tuple(f"{kernel.name}: operand {i}" for i in range(len(operands))),
        operands=operands,
        results=(*results, *scratch),
        attributes=attributes(
            where,
            {
                "arch": kernel.arch,
                "block": np.array(shape.block, np.int64),
                "check_inputs": check_inputs,
                "cluster": np.array(shape.cluster, np.int64),
                "cooperative": shape.cooperative,
                "cubin": np.frombuffer(kernel.cubin, np.uint8),
                "grid": np.array(shape.grid, np.int64),
                "name": kernel.symbol,
                "parameters": np.array([len(parameters) // 3, *parameters], np.int64),
                "pdl": shape.pdl,
                "shared": shape.shared,
            },
        ),
        aliases=aliases,
    )


def _float_bits(where: str, value: float, size: int) -> int:
    formats = {4: "<f", 8: "<d"}
    if size not in formats:
        raise ValueError(
            f"{where}: expected a number of {size} bytes, as the kernel's parameter, got a float; pass a NumPy or "
            "ml_dtypes scalar of the parameter's type"
        )
    try:
        return int.from_bytes(struct.pack(formats[size], value), "little", signed=size == 8)
    except OverflowError:  # beyond float32, where C has an infinity
        return int.from_bytes(struct.pack("<f", np.inf if value > 0 else -np.inf), "little")


def _check_sizes(where: str, kernel: CudaKernel, parameters: Sequence[int]) -> None:
    if kernel.parameters is None:
        return
    given = [size if kind == BITS else 8 for kind, size in zip(parameters[::3], parameters[2::3], strict=True)]
    expected = list(kernel.parameters)
    if len(given) != len(expected):
        raise ValueError(
            f"{where}: arguments: expected {len(expected)}, as the kernel has parameters (of {_sizes(expected)} "
            f"bytes), got {len(given)}, results included (of {_sizes(given)} bytes)"
        )
    for i, (size, wanted) in enumerate(zip(given, expected, strict=True)):
        if size != wanted:
            what = "a pointer" if parameters[3 * i] != BITS else "a number"
            raise ValueError(
                f"{where}: argument {i}: expected {wanted} bytes, as the kernel's parameter, got {what} of {size}"
            )


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"


def check_aliases(
    where: str, operands: Sequence[ArraySpec], results: Sequence[ArraySpec], aliases: Sequence[tuple[int, int]]
) -> None:
    """Raises ValueError for aliases that do not fit the arrays."""
    for operand, result in aliases:
        pair = f"{where}: input_output_aliases: {operand}: {result}"
        if not 0 <= operand < len(operands) or not 0 <= result < len(results):
            raise ValueError(f"{pair}: expected an operand below {len(operands)} and a result below {len(results)}")
        if operands[operand] != results[result]:
            raise ValueError(
                f"{pair}: expected one shape and dtype, got operand {operands[operand]} and result {results[result]}"
            )
    for side in (0, 1):
        if len({pair[side] for pair in aliases}) != len(aliases):
            raise ValueError(f"{where}: input_output_aliases: expected every index once, got {list(aliases)}")
