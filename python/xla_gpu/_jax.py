"""The JAX door: an operator's declaration as a jax.ffi.ffi_call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _library, _targets
from ._attributes import numpy_value
from ._signature import ArraySpec, OpCall, Operator, check_inputs_requested


def call(operator: Operator, **arguments: Any) -> Any:
    """The results of ``operator``; arguments by the names of its declaration."""
    arrays = []
    for name in operator.operands:
        value = arguments.get(name)
        if value is not None:
            array = _array(f"{operator.name}: {name}", value)
            arrays.append(array)
            arguments[name] = ArraySpec(tuple(array.shape), array.dtype.name)
    bound = _bound(operator)(**arguments, check_inputs=check_inputs_requested())
    results = _function(bound, _varying_axes(arrays))(*arrays)[: len(bound.results)]
    return results[0] if len(results) == 1 else tuple(results)


def _array(where: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):  # tracers are jax.Arrays too
        return jnp.asarray(value)
    raise TypeError(f"{where}: expected a JAX or NumPy array, got {type(value).__name__}")


@functools.cache
def _bound(operator: Operator) -> Callable[..., OpCall]:
    # typed: True, 1 and 1.0 are equal, and only one of them is a window.
    cached = functools.lru_cache(maxsize=4096, typed=True)(operator.bind)

    def bind(**arguments: Any) -> OpCall:
        try:
            return cached(**arguments)
        except TypeError:  # an argument that cannot be hashed, or that bind refuses: it says which
            return operator.bind(**arguments)

    return bind


@functools.lru_cache(maxsize=4096)
def _function(call: OpCall, varying_axes: frozenset[str]) -> Callable[..., Any]:
    _register()
    extra = {"vma": varying_axes} if varying_axes else {}
    results = [jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), **extra) for spec in call.all_results]
    attributes = {name: numpy_value(attribute) for name, attribute in call.attributes}
    target = jax.ffi.ffi_call(
        call.target,
        results,
        vmap_method="sequential",
        input_output_aliases=dict(call.aliases) or None,
    )

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        return target(*arrays, **attributes)

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise ValueError(f"{call.name} has no gradient; jax.lax.stop_gradient its arguments where none is wanted")

    return function


def _varying_axes(arrays: list[Any]) -> frozenset[str]:
    """The mesh axes over which the arrays vary inside jax.shard_map, which results then do too."""
    return frozenset().union(*(getattr(jax.typeof(array), "vma", None) or () for array in arrays))


@functools.cache
def _register() -> None:
    """Registers the library's handlers with JAX; those of a platform that starts later wait in JAX's own queue."""
    for handler in _library.load().handlers():
        platform = "cpu" if handler.platform == "Host" else handler.platform
        jax.ffi.register_ffi_target(handler.target, _targets.capsule(handler.address), platform=platform)
