"""Triton functions as launches of kernels: the call before its arguments, its grid, and the custom call."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core.operator import CACHED_CALLS, ArraySpec, OpCall
from ..errors import CompatibilityError
from . import launch, triton_arguments, triton_compile


@dataclass(frozen=True, eq=False)
class TritonFunction:
    """A ``@triton.jit`` function, without its decorators."""

    name: str
    jit: Any  # triton.JITFunction
    heuristics: tuple[Mapping[str, Callable[[dict[str, Any]], Any]], ...]
    configs: tuple[Any, ...]  # triton.Config of @triton.autotune; empty without it
    tuning_keys: tuple[str, ...]  # names of arguments on which the best configuration depends
    autotuner: Any = None  # triton.runtime.Autotuner, which knows what prune_configs_by leaves


@dataclass(frozen=True, eq=False)
class TritonCall:
    """What is known of a call before its arguments."""

    entry: _Entry  # of the process's table of calls
    function: TritonFunction
    grid: Any
    options: Mapping[str, int]  # num_warps, num_stages, num_ctas
    constexprs: Mapping[str, Any]
    config: Any  # the chosen one of function.configs; None: not chosen
    identity: Any  # what tells this call from others, but for its grid

    @property
    def key(self) -> str:
        """What the operators of PyTorch carry for it."""
        return self.entry.key

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

    def programs(self, meta: dict[str, Any]) -> tuple[int, ...]:
        """The grid: 1 to 3 numbers, as the caller gave them."""
        grid = self.grid(meta) if callable(self.grid) else self.grid
        return tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)

    def with_config(self, config: Any) -> TritonCall:
        """The same call with one configuration of an autotuned function."""
        return make_call(self.function, self.grid, self.options, self.constexprs, config)


_SMALL = 16  # elements of an array on the host that a grid function may take numbers from


class _Entry:
    """A key. It is known as long as one of its calls lives, is among those made last, or a traced program has it."""

    def __init__(self, key: str) -> None:
        self.key, self.newest = key, None  # type: str, TritonCall | None


_KEPT = CACHED_CALLS  # calls that are known though no object holds them, and tuned configurations

_lock = threading.Lock()
_numbers = itertools.count()
_latest: dict[Any, _Entry] = {}  # the call made last at the end
_by_key: weakref.WeakValueDictionary[str, _Entry] = weakref.WeakValueDictionary()
_traced: dict[str, _Entry] = {}
_tuned: dict[Any, Any] = {}  # tuning key: triton.Config; the latest at the end


def describe(fn: Any) -> TritonFunction:
    """The Triton function ``fn``. Raises TypeError for something else, CompatibilityError without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise CompatibilityError("triton_call needs Triton, and it is not installed: pip install 'triton>=3.5'")
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    heuristics: list[Any] = []
    configs: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()
    autotuner = None
    inner = fn
    while isinstance(inner, Autotuner | Heuristics):
        if isinstance(inner, Autotuner):
            configs, keys, autotuner = tuple(inner.configs), tuple(inner.keys), inner
        else:
            heuristics.append(inner.values)
        inner = inner.fn
    if not isinstance(inner, JITFunction):
        raise TypeError(f"triton_call: fn: expected a function of @triton.jit, got {type(fn).__name__}")
    return TritonFunction(inner.fn.__name__, inner, tuple(heuristics), configs, keys, autotuner)


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
        if name == "num_warps" and value & (value - 1):
            raise ValueError(f"{where}: num_warps: expected a power of 2, got {value}")
    if config is None and len(function.configs) == 1:
        (config,) = function.configs
    if config is not None and getattr(config, "pre_hook", None) is not None:
        raise ValueError(f"{where}: config: expected one without pre_hook, which would run on the host, got {config}")
    identity = (
        id(function.jit) if not hasattr(function.jit, "cache_key") else function.jit.cache_key,
        tuple(sorted(options.items())),
        tuple((name, _constant_identity(where, name, value)) for name, value in sorted(constexprs.items())),
        str(config),
        tuple(map(str, function.configs)),
        tuple(tuple(sorted(map(str, values))) for values in function.heuristics),
    )
    of_grid = (identity, _grid_identity(grid))
    with _lock:
        entry = _latest.pop(of_grid, None) or _Entry(f"{function.name}#{next(_numbers)}")
        # The newest grid: a lambda is another object each time, and may see other globals.
        call = TritonCall(entry, function, grid, dict(options), dict(constexprs), config, identity)
        entry.newest = call
        _latest[of_grid] = _by_key[entry.key] = entry
        _forget_oldest(_latest)
    return call


def _forget_oldest(table: dict[Any, Any]) -> None:
    while len(table) > _KEPT:
        del table[next(iter(table))]


def keep(key: str) -> None:
    """Makes the call of that key known as long as the process: a traced program has the key alone."""
    _traced[key] = by_key(key).entry


def by_key(key: str) -> TritonCall:
    """The call of that key, which this process must have made."""
    entry = _by_key.get(key)
    call = None if entry is None else entry.newest
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
    cells = tuple(_seen_by_grid(cell.cell_contents) for cell in grid.__closure__ or ())
    return code, tuple(map(_seen_by_grid, grid.__defaults__ or ())), cells


def _seen_by_grid(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        text = f"{type(value).__name__}{tuple(value.shape)}:{value.dtype}"
        # Elsewhere the values would wait for the GPU, or are too many to be numbers of programs.
        return text + repr(value.tolist()) if _is_small_on_host(value) else text
    return repr(value)


def _is_small_on_host(array: Any) -> bool:
    if isinstance(array, np.ndarray | np.generic):
        return array.size <= _SMALL
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and type(array) is torch.Tensor  # no fake one
    return is_tensor and array.device.type == "cpu" and array.numel() <= _SMALL


def _constant_identity(where: str, name: str, value: Any) -> str:
    if hasattr(value, "cache_key"):  # another Triton function
        return str(value.cache_key)
    if hasattr(value, "shape"):
        raise TypeError(f"{where}: {name}: expected a constant, got an array: pass it among the arguments of the call")
    return f"{type(value).__name__}:{value!r}"


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
    bound, meta = prepare(call, operands, encoded, floats, results)
    constants = {name: meta[name] for name in bound.function.jit.arg_names if name not in set(bound.parameters())}
    identity = tuple((name, _constant_identity(bound.where, name, value)) for name, value in sorted(constants.items()))
    return _bind(
        _Key(bound.key, identity, constants),
        operands,
        bound.programs(meta),
        tuple(encoded),
        launch.double_bytes(floats),
        results,
        aliases,
        check_inputs,
    )


def prepare(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> tuple[TritonCall, dict[str, Any]]:
    """The call with its configuration, and all of the function's arguments by name, as a grid function takes them."""
    bound = _with_tuned_config(call, operands, encoded, floats, results)
    return bound, _meta(bound, operands, encoded, floats, results)


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
    names = call.parameters()
    given = triton_arguments.values(
        encoded,
        floats,
        [triton_arguments.Described(*x) for x in operands],
        [triton_arguments.Described(*x) for x in results],
    )
    constants = {each.name for each in call.function.jit.params if each.is_constexpr}
    if by_name := [name for name in names if name in constants]:
        raise TypeError(
            f"{call.where}: expected values of {', '.join(by_name)} by name, as triton_call's own arguments, since "
            "they are tl.constexpr"
        )
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
    """On what the best configuration of an autotuned function depends, as in Triton: some arguments, and all dtypes.

    Not on the grid, whose function may hold numbers that differ from call to call.
    """
    given = triton_arguments.values(encoded, floats, list(operands), list(results))
    named = dict(zip(call.parameters(), given, strict=False))
    chosen = tuple(str(named.get(name, call.constexprs.get(name))) for name in call.function.tuning_keys)
    return call.identity, chosen, tuple(spec.dtype for spec in (*operands, *results))


def configs_to_time(
    call: TritonCall, encoded: Sequence[int], floats: Sequence[float], arrays: Sequence[Any], results: Any
) -> list[Any]:
    """The configurations that ``prune_configs_by`` of ``@triton.autotune`` leaves for these arguments; may be none."""
    autotuner = call.function.autotuner
    described = [triton_arguments.Described(result.shape, result.dtype) for result in results]
    given = triton_arguments.values(encoded, floats, arrays, described)
    with _lock:  # it reads the arguments from itself
        autotuner.nargs = dict(zip(call.parameters(), given, strict=False))
        try:
            return list(autotuner.prune_configs(dict(call.constexprs)))
        except Exception as error:
            if type(error).__name__ != "AutotunerError":  # Triton 3.9, where none is left; earlier ones return none
                raise
            return []
        finally:
            autotuner.nargs = None


def remember_config(key: Any, config: Any) -> None:
    """Makes ``config`` the one for calls of this tuning key."""
    with _lock:
        _tuned[key] = config
        _forget_oldest(_tuned)


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


@functools.lru_cache(maxsize=CACHED_CALLS)
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
    options = dict(call.options)
    if call.config is not None:
        names = call.function.jit.arg_names
        options.update({name: value for name, value in call.config.all_kwargs().items() if name not in names})
    compiled = triton_compile.compile_function(
        *(call.function.jit, call.where, options, call.parameters(), key.constants, operands, encoded, results)
    )
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
