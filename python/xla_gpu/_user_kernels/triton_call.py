"""Calls of Triton functions before their arguments, and the process's table of them."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core.operator import CACHED_CALLS
from ..errors import CompatibilityError


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


_MAX_WARPS = 32  # of a CTA
_SMALL = 16  # elements of an array on the host that a grid function may take numbers from


class _Entry:
    """A key. It is known as long as one of its calls lives, is among those made last, or a traced program has it."""

    def __init__(self, key: str) -> None:
        self.key, self.newest = key, None  # type: str, TritonCall | None


_KEPT = CACHED_CALLS  # calls that are known though no object holds them

_lock = threading.Lock()
_numbers = itertools.count()
_latest: dict[Any, _Entry] = {}  # the call made last at the end
_by_key: weakref.WeakValueDictionary[str, _Entry] = weakref.WeakValueDictionary()
_traced: dict[str, _Entry] = {}


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
        if name == "num_warps" and (value & (value - 1) or value > _MAX_WARPS):
            raise ValueError(f"{where}: num_warps: expected a power of 2 up to {_MAX_WARPS}, got {value}")
    if config is not None and not hasattr(config, "all_kwargs"):
        raise TypeError(f"{where}: config: expected a triton.Config, got {type(config).__name__}")
    if config is None and len(function.configs) == 1:
        (config,) = function.configs
    if config is not None and getattr(config, "pre_hook", None) is not None:
        raise ValueError(f"{where}: config: expected one without pre_hook, which would run on the host, got {config}")
    identity = (
        id(function.jit) if not hasattr(function.jit, "cache_key") else function.jit.cache_key,
        tuple(sorted(options.items())),
        tuple((name, constant_identity(where, name, value)) for name, value in sorted(constexprs.items())),
        str(config),
        tuple(map(str, function.configs)),
        tuple(
            tuple((name, _function_identity(values[name])) for name in sorted(values)) for values in function.heuristics
        ),
    )
    of_grid = (identity, _grid_identity(grid))
    with _lock:
        entry = _latest.pop(of_grid, None) or _Entry(f"{function.name}#{next(_numbers)}")
        # The newest grid: a lambda is another object each time, and may see other globals.
        call = TritonCall(entry, function, grid, dict(options), dict(constexprs), config, identity)
        entry.newest = call
        _latest[of_grid] = _by_key[entry.key] = entry
        forget_oldest(_latest, _KEPT)
    return call


def forget_oldest(table: dict[Any, Any], kept: int) -> None:
    """Leaves the ``kept`` entries that were added last."""
    while len(table) > kept:
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
    return _function_identity(grid)


def _function_identity(function: Any) -> Any:
    """What tells a grid function or a heuristic from others; a lambda is another object each time it is evaluated.

    Objects that are named by their id live as long as the call that was made with them.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return id(function)
    named = function.__kwdefaults__ or {}
    return (
        code,
        id(getattr(function, "__self__", None)),  # of a bound method
        tuple(map(_seen, function.__defaults__ or ())),
        tuple((name, _seen(value)) for name, value in named.items()),
        tuple(map(_seen_in_cell, function.__closure__ or ())),
    )


def _seen_in_cell(cell: Any) -> str:
    try:
        return _seen(cell.cell_contents)
    except ValueError:  # a variable that is assigned later
        return f"cell {id(cell)}"


def _seen(value: Any) -> str:
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


def constant_identity(where: str, name: str, value: Any) -> str:
    """What tells a constant from others. Raises TypeError for an array."""
    if hasattr(value, "cache_key"):  # another Triton function
        return str(value.cache_key)
    if hasattr(value, "shape"):
        raise TypeError(f"{where}: {name}: expected a constant, got an array: pass it among the arguments of the call")
    return f"{type(value).__name__}:{value!r}"
