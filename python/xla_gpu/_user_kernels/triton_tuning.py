"""Autotuned Triton functions: which configurations are timed, and which one the process found for a tuning key."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .._core.operator import CACHED_CALLS, ArraySpec
from . import triton_arguments
from .triton_call import TritonCall, forget_oldest

_KEPT = CACHED_CALLS

_lock = threading.Lock()
_tuned: dict[Any, Any] = {}  # tuning key: triton.Config; the latest at the end


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
        forget_oldest(_tuned, _KEPT)


def is_tuned(call: TritonCall, key: Any) -> bool:
    """Whether a call of this tuning key needs no tuning."""
    return call.config is not None or not call.function.configs or key in _tuned


def with_tuned_config(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> TritonCall:
    """The call with the configuration that was found for these arguments. Raises ValueError where there is none."""
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
