"""Triton functions as launches of kernels: signature, specialisation, compilation by Triton's own compiler."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec, OpCall
from ..errors import CompatibilityError
from . import cuda_kernel, launch
from .launch import Arguments, Result

# Kinds of arguments in their encoded form, which passes through torch.compile: kind and value of each.
_OPERAND, _RESULT, _INT, _FLOAT, _BOOL, _NONE, _NUMPY = range(7)  # _NUMPY + i: a scalar of dtype _SCALARS[i]

# Triton's names of dtypes.
_TYPES = {
    "bool": "i1",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
_SCALARS = tuple(name for name in _TYPES if not name.startswith("float8"))
_ALIGNED = 16  # bytes: what the front ends promise for operands and results, and Triton specialises on


class Described(NamedTuple):
    """An array as grids and heuristics see it."""

    shape: tuple[int, ...]
    dtype: str  # NumPy's name

    def numel(self) -> int:
        """Its elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class TritonFunction:
    """A ``@triton.jit`` function, without its decorators."""

    name: str
    jit: Any  # triton.JITFunction
    heuristics: tuple[Mapping[str, Callable[[dict[str, Any]], Any]], ...]
    configs: tuple[Any, ...]  # triton.Config of @triton.autotune; empty without it
    tuning_keys: tuple[str, ...]  # names of arguments on which the best configuration depends


@dataclass(frozen=True, eq=False)
class TritonCall:
    """What is known of a call before its arguments."""

    key: str  # of the process's table of calls
    function: TritonFunction
    grid: Any
    options: Mapping[str, int]  # num_warps, num_stages, num_ctas
    constexprs: Mapping[str, Any]
    config: Any  # the chosen one of function.configs; None: not chosen

    @property
    def where(self) -> str:
        """How error texts begin."""
        return f"triton_call: {self.function.name}"

    def parameters(self) -> list[str]:
        """The function's parameters that are given by the call's arguments and results."""
        fixed = {*self.constexprs, *(name for values in self.function.heuristics for name in values)}
        if self.function.configs:
            fixed |= set((self.config or self.function.configs[0]).kwargs)
        return [
            parameter.name
            for parameter in self.function.jit.params
            if parameter.name not in fixed and not (parameter.is_constexpr and parameter.has_default)
        ]

    def with_config(self, config: Any) -> TritonCall:
        """The same call with one configuration of an autotuned function."""
        return make_call(self.function, self.grid, self.options, self.constexprs, config)


_lock = threading.Lock()
_calls: dict[Any, TritonCall] = {}
_by_key: dict[str, TritonCall] = {}
_tuned: dict[Any, Any] = {}  # (call's key, tuning key): triton.Config


def describe(fn: Any) -> TritonFunction:
    """The Triton function ``fn``. Raises TypeError for something else, CompatibilityError without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise CompatibilityError("triton_call needs Triton, and it is not installed: pip install 'triton>=3.5'")
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    heuristics: list[Any] = []
    configs: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()
    inner = fn
    while isinstance(inner, Autotuner | Heuristics):
        if isinstance(inner, Autotuner):
            configs, keys = tuple(inner.configs), tuple(inner.keys)
        else:
            heuristics.append(inner.values)
        inner = inner.fn
    if not isinstance(inner, JITFunction):
        raise TypeError(f"triton_call: fn: expected a function of @triton.jit, got {type(fn).__name__}")
    return TritonFunction(inner.fn.__name__, inner, tuple(heuristics), configs, keys)


def make_call(
    function: TritonFunction, grid: Any, options: Mapping[str, int], constexprs: Mapping[str, Any], config: Any
) -> TritonCall:
    """A call, the same object for the same arguments. Raises TypeError and ValueError."""
    where = f"triton_call: {function.name}"
    names = function.jit.arg_names
    if unknown := sorted(set(constexprs) - set(names)):
        raise TypeError(
            f"{where}: expected constants among the parameters {', '.join(names)}, got {', '.join(unknown)}"
        )
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {name}: expected a positive int, got {value!r}")
    if config is not None and getattr(config, "pre_hook", None) is not None:
        raise ValueError(f"{where}: config: expected one without pre_hook, which would run on the host, got {config}")
    if config is None and len(function.configs) == 1:
        (config,) = function.configs
    identity = (
        id(function.jit) if not hasattr(function.jit, "cache_key") else function.jit.cache_key,
        _grid_identity(grid),
        tuple(sorted(options.items())),
        tuple((name, _constant_identity(where, name, value)) for name, value in sorted(constexprs.items())),
        str(config),
        tuple(map(str, function.configs)),
        tuple(tuple(sorted(map(str, values))) for values in function.heuristics),
    )
    with _lock:
        known = _calls.get(identity)
        key = known.key if known is not None else f"{function.name}#{len(_calls)}"
        # The newest grid: a lambda is another object each time, and may see other globals.
        call = TritonCall(key, function, grid, dict(options), dict(constexprs), config)
        _calls[identity] = _by_key[key] = call
    return call


def by_key(key: str) -> TritonCall:
    """The call of that key, which this process must have made."""
    call = _by_key.get(key)
    if call is None:
        raise ValueError(
            f"triton_call: call: expected one that this process made by triton_call, got the key {key!r}; a program "
            "that holds the kernel itself is the one that torch_xla's or JAX's export makes"
        )
    return call


def _grid_identity(grid: Any) -> Any:
    if not callable(grid):
        return tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    code = getattr(grid, "__code__", None)
    if code is None:
        return id(grid)
    cells = tuple(repr(cell.cell_contents) for cell in grid.__closure__ or ())
    return code, repr(grid.__defaults__), cells


def _constant_identity(where: str, name: str, value: Any) -> str:
    if hasattr(value, "cache_key"):  # another Triton function
        return str(value.cache_key)
    if hasattr(value, "shape"):
        raise TypeError(f"{where}: {name}: expected a constant, got an array: pass it among the arguments of the call")
    return f"{type(value).__name__}:{value!r}"


# ---- Arguments -------------------------------------------------------------------------------------------------------


def encode(where: str, arguments: Sequence[Any], results: Sequence[int], is_array: Callable[[Any], bool]) -> Arguments:
    """The arguments as numbers; see launch.encode. Their meaning is left to ``bind``."""
    encoded: list[int] = []
    floats: list[float] = []
    arrays: list[Any] = []
    placed: list[int] = []
    for i, value in enumerate(arguments):
        if is_array(value):
            encoded += [_OPERAND, len(arrays)]
            arrays.append(value)
        elif isinstance(value, Result):
            encoded += [_RESULT, value.index]
            placed.append(value.index)
        elif value is None:
            encoded += [_NONE, 0]
        elif isinstance(value, np.generic):
            encoded += _encoded_scalar(f"{where}: argument {i}", value)
        elif isinstance(value, bool):
            encoded += [_BOOL, int(value)]
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{where}: argument {i}: expected an integer of 64 bits, got {value}")
            encoded += [_INT, value]
        elif isinstance(value, float):
            encoded += [_FLOAT, len(floats)]
            floats.append(value)
        else:
            raise TypeError(
                f"{where}: argument {i}: expected an array, a number, None or Result, got {type(value).__name__}; "
                "constants are given to triton_call by their names"
            )
    if not placed:
        for index in results:
            encoded += [_RESULT, index]
    elif sorted(placed) != list(results):
        raise ValueError(f"{where}: arguments: expected Result of each of {list(results)} once, got {sorted(placed)}")
    return Arguments(encoded, floats, arrays)


def _encoded_scalar(where: str, value: np.generic) -> list[int]:
    if value.dtype.name not in _SCALARS:
        raise TypeError(f"{where}: expected a number that Triton knows, got {value.dtype.name}")
    bits = int.from_bytes(value.tobytes().ljust(8, b"\0"), "little", signed=True)
    return [_NUMPY + _SCALARS.index(value.dtype.name), bits]


def values(encoded: Sequence[int], floats: Sequence[float], arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The arguments as Python values, results included, as grids and heuristics see them."""
    found: list[Any] = []
    for kind, value in zip(encoded[::2], encoded[1::2], strict=True):
        if kind == _OPERAND:
            found.append(arrays[value])
        elif kind == _RESULT:
            found.append(results[value])
        elif kind == _FLOAT:
            found.append(floats[value])
        elif kind >= _NUMPY:
            found.append(_numpy_value(kind, value).item())
        else:
            found.append(None if kind == _NONE else bool(value) if kind == _BOOL else value)
    return found


def _numpy_value(kind: int, bits: int) -> Any:
    name = _SCALARS[kind - _NUMPY]
    if name == "bfloat16":  # which NumPy has not by itself
        return np.frombuffer((bits << 16 & 0xFFFFFFFF).to_bytes(4, "little"), np.float32)[0]
    dtype = np.dtype(name)
    return np.frombuffer((bits & (2**64 - 1)).to_bytes(8, "little")[: dtype.itemsize], dtype)[0]


# ---- From a call to a custom call ------------------------------------------------------------------------------------


def bind(
    call: TritonCall,
    operands: tuple[ArraySpec, ...],
    encoded: Sequence[int],
    floats: Sequence[float],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    """The custom call that launches the compiled function; scratch memory follows its results. Cached.

    Raises:
      ValueError, TypeError: the arguments do not fit the function.
    """
    bound = _with_tuned_config(call, operands, encoded, floats, results)
    meta = _meta(bound, operands, encoded, floats, results)
    grid = bound.grid(meta) if callable(bound.grid) else bound.grid
    constants = {name: meta[name] for name in bound.function.jit.arg_names if name not in set(bound.parameters())}
    launched = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    identity = tuple((name, _constant_identity(bound.where, name, value)) for name, value in sorted(constants.items()))
    return _bind(
        _Key(bound.key, identity, constants),
        operands,
        launched,
        tuple(encoded),
        launch.double_bytes(floats),
        results,
        aliases,
        check_inputs,
    )


class _Key:
    """A call and its constants, compared by what they are and not by identity."""

    def __init__(self, key: str, identity: Any, constants: Mapping[str, Any]) -> None:
        self.key, self.identity, self.constants = key, identity, constants

    def __hash__(self) -> int:
        return hash((self.key, self.identity))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.key, self.identity) == (other.key, other.identity)


def _meta(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> dict[str, Any]:
    """All of the function's arguments by name, as a grid function takes them."""
    names = call.parameters()
    given = values(encoded, floats, [Described(*x) for x in operands], [Described(*x) for x in results])
    if len(given) != len(names):
        raise ValueError(
            f"{call.where}: arguments: expected {len(names)} ({', '.join(names)}), results included, got {len(given)}"
        )
    defaults = {each.name: each.default for each in call.function.jit.params if each.is_constexpr and each.has_default}
    meta: dict[str, Any] = {**call.options, **defaults, **dict(zip(names, given, strict=True)), **call.constexprs}
    if call.config is not None:
        meta.update(call.config.all_kwargs())
    for heuristics in call.function.heuristics:
        for name, heuristic in heuristics.items():
            meta[name] = heuristic(meta)
    if missing := [name for name in call.function.jit.arg_names if name not in meta]:
        raise TypeError(f"{call.where}: expected values of {', '.join(missing)}, got none")
    return meta


def tuning_key(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> Any:
    """On what the best configuration of an autotuned function depends, as in Triton: some arguments, and all dtypes."""
    given = values(encoded, floats, list(operands), list(results))
    named = dict(zip(call.parameters(), given, strict=False))
    chosen = tuple(str(named.get(name, call.constexprs.get(name))) for name in call.function.tuning_keys)
    return call.key, chosen, tuple(spec.dtype for spec in (*operands, *results))


def remember_config(key: Any, config: Any) -> None:
    """Makes ``config`` the one for calls of this tuning key."""
    _tuned[key] = config


def is_tuned(call: TritonCall, key: Any) -> bool:
    """Whether a call of this tuning key needs no tuning."""
    return call.config is not None or not call.function.configs or key in _tuned


def _with_tuned_config(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> TritonCall:
    if call.config is not None or not call.function.configs:
        return call
    config = _tuned.get(tuning_key(call, operands, encoded, floats, results))
    if config is None:
        raise ValueError(
            f"{call.where}: config: expected one of the function's {len(call.function.configs)} configurations, since "
            "it is autotuned and a traced program cannot be timed; pass config=, or call it once on eager CUDA tensors "
            "with arguments of the same tuning key"
        )
    return call.with_config(config)


@functools.lru_cache(maxsize=4096)
def _bind(
    key: _Key,
    operands: tuple[ArraySpec, ...],
    grid: tuple[int, ...],
    encoded: tuple[int, ...],
    floats: tuple[bytes, ...],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    call = by_key(key.key)
    compiled = _compile(call, key.constants, operands, encoded, results)
    metadata, kernel = compiled.metadata, compiled.kernel
    num_ctas = metadata.num_ctas
    # Triton 3.5 had cluster dimensions for each axis; later ones put all CTAs of a cluster side by side.
    cluster = tuple(getattr(metadata, "cluster_dims", (num_ctas, 1, 1)))
    ctas = [*grid, 1, 1][:3]
    if num_ctas > 1:
        ctas = [size * of for size, of in zip(ctas, cluster, strict=True)]
    shape = launch.geometry(
        call.where,
        tuple(ctas),
        32 * metadata.num_warps,
        cluster if num_ctas > 1 else 1,
        metadata.shared,
        bool(getattr(metadata, "launch_cooperative_grid", False)),
        bool(getattr(metadata, "launch_pdl", False)),
    )
    arguments = list(compiled.arguments)
    programs = int(np.prod([*grid, 1], dtype=np.int64))
    for size in (getattr(metadata, f"{which}_scratch_size", 0) or 0 for which in ("global", "profile")):
        # A parameter of its own, also where nothing is needed. Kernels of other versions than are known may have none.
        if kernel.parameters is not None and len(arguments) // 3 >= len(kernel.parameters):
            break
        total = size * programs * num_ctas
        arguments += [launch.SCRATCH, total, 0] if total else [launch.BITS, 0, 8]
    return launch.make_call(kernel, operands, shape, arguments, floats, results, aliases, check_inputs)


class _Compiled(NamedTuple):
    kernel: cuda_kernel.CudaKernel
    metadata: Any
    arguments: tuple[int, ...]  # as launch.make_call takes them


def _compile(
    call: TritonCall,
    constants: Mapping[str, Any],
    operands: Sequence[ArraySpec],
    encoded: Sequence[int],
    results: Sequence[ArraySpec],
) -> _Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    jit = call.function.jit
    given = dict(zip(call.parameters(), zip(encoded[::2], encoded[1::2], strict=True), strict=True))
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    arguments: list[int] = []
    for i, parameter in enumerate(jit.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(i,)] = constants[name]
            continue
        kind, value = given[name]
        where = f"{call.where}: {name}"
        if parameter.is_constexpr:
            raise TypeError(f"{where}: expected a constant, by its name, since it is a tl.constexpr; got an argument")
        type_, divisible, argument = _parameter(where, parameter, kind, value, operands, results)
        if argument is None:
            signature[name] = "constexpr"
            constexprs[(i,)] = None if kind == _NONE else 1
            continue
        signature[name] = type_
        if divisible:
            attributes[(i,)] = [["tt.divisibility", _ALIGNED]]
        arguments += argument
    options = dict(call.options)
    if call.config is not None:
        names = jit.arg_names
        options.update({name: value for name, value in call.config.all_kwargs().items() if name not in names})
    arch = cuda_kernel.default_arch()
    capability = int(re.sub(r"\D", "", arch))
    source = ASTSource(jit, signature, constexprs, attributes)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except triton.TritonError as error:
        raise ValueError(
            f"{call.where}: Triton does not compile it for compute capability {capability}:\n{error}"
        ) from error
    metadata = compiled.metadata
    kernel = cuda_kernel.from_cubin(compiled.asm["cubin"], call.function.name, metadata.name, arch)
    return _Compiled(kernel, metadata, tuple(arguments))


def _parameter(
    where: str, parameter: Any, kind: int, value: int, operands: Sequence[ArraySpec], results: Sequence[ArraySpec]
) -> tuple[str, bool, list[int] | None]:
    """A parameter's Triton type, whether it is divisible by 16, and its argument for the launch.

    None stands for an argument that Triton compiles in: None, and 1. These are Triton's rules (runtime/jit.py).
    """
    specialize = not parameter.do_not_specialize
    aligned = specialize and not parameter.do_not_specialize_on_alignment
    annotated = parameter.annotation_type or None
    if kind in (_OPERAND, _RESULT):
        specs, launched = (operands, launch.OPERAND) if kind == _OPERAND else (results, launch.RESULT)
        if value >= len(specs):
            raise ValueError(f"{where}: expected a Result below {len(specs)}, got {value}")
        dtype = specs[value].dtype
        if dtype not in _TYPES:
            raise TypeError(f"{where}: expected a dtype that Triton knows, got {dtype}")
        constant = "k" if parameter.is_const else ""
        # The launch checks the alignment that is claimed here.
        return f"*{constant}{_TYPES[dtype]}", aligned, [launched, value, _ALIGNED if aligned else 0]
    if kind == _NONE:
        return "constexpr", False, None
    if kind == _BOOL:
        return "u1", False, [launch.BITS, value, 1]
    if kind == _FLOAT:
        type_ = annotated if annotated in ("fp16", "bf16", "fp32", "fp64") else "fp32"
        if type_ in ("fp16", "bf16"):
            raise TypeError(f"{where}: expected a NumPy or ml_dtypes scalar of {type_}, got a float")
        return type_, False, [launch.FLOAT, value, 8 if type_ == "fp64" else 4]
    if kind >= _NUMPY:
        name = _SCALARS[kind - _NUMPY]
        is_integer = "int" in name
        divisible = aligned and is_integer and value % _ALIGNED == 0
        type_ = "u1" if name == "bool" else _TYPES[name]
        if annotated is not None and annotated != type_:
            raise TypeError(f"{where}: expected a number of type {annotated}, as it is annotated, got {name}")
        return type_, divisible, [launch.BITS, value, DTYPES[name].itemsize]
    if value == 1 and specialize and annotated is None:
        return "constexpr", False, None
    type_ = annotated or ("i32" if -(2**31) <= value < 2**31 else "i64")
    bits = re.fullmatch(r"[iu](\d+)", type_)
    if bits is None:
        raise TypeError(f"{where}: expected a number of type {type_}, as it is annotated, got an int")
    size = max(int(bits[1]) // 8, 1)
    if not -(2 ** (8 * size - 1)) <= value < 2 ** (8 * size):
        raise ValueError(f"{where}: expected an integer of type {type_}, as it is annotated, got {value}")
    return type_, aligned and value % _ALIGNED == 0, [launch.BITS, value, size]
