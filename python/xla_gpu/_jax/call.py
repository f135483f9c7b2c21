"""The JAX front end: an operator's declaration as a jax.ffi.ffi_call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from .._core.attributes import numpy_value
from .._core.checks import Checks, type_name
from .._core.docstrings import docstring
from .._core.operator import CACHED_CALLS, ArraySpec, IntOperand, OpCall, Operator, check_inputs_requested
from .._runtime import library, targets
from .._runtime.scratch import all_results
from ..errors import LibraryError, TargetError
from ..ops import ragged_paged_attention
from . import reference
from .gradients import with_derivative
from .partition import explicit_shardings, partitioned

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Run = Callable[[OpCall, list[Any], dict[str, Any]], Any]

# What a comparison of symbolic sizes raises; JAX 0.7 has it in jax.core alone.
_InconclusiveError: type[Exception] = (
    getattr(jax.errors, "InconclusiveDimensionOperation", None) or jax.core.InconclusiveDimensionOperation
)


def call(operator: Operator, *, reduced_axes: frozenset[str] = frozenset(), **arguments: Any) -> Any:
    """The results of ``operator``; arguments by the names of its declaration."""
    return _run(*_bind(operator, arguments), reduced_axes)


def check(operator: Operator, **arguments: Any) -> None:
    """Raises what ``call`` would raise for these arguments."""
    _bind(operator, arguments)


def function(operator: Operator, run_call: _Run | None = None) -> Callable[[_Function], _Function]:
    """Makes a function that calls ``operator`` of a declaration: a signature and a docstring.

    ``run_call(call, arrays, arguments)``, if given, makes the results.
    """

    def decorate(declaration: _Function) -> _Function:
        signature = inspect.signature(declaration)

        @functools.wraps(declaration)
        def function(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{operator.name}: {error}") from None
            bound.apply_defaults()
            arguments = bound.arguments
            axes = _make_rows(operator, arguments) if operator.rows else None
            op_call, arrays = _bind(operator, arguments)
            results = _run(op_call, arrays) if run_call is None else run_call(op_call, arrays, arguments)
            return results if axes is None else results.reshape(*axes, results.shape[-1])

        return docstring(operator.docstring)(function)  # type: ignore[return-value]

    return decorate


def _make_rows(operator: Operator, arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """Makes operator.rows [rows, n]; returns the axes that stood in the place of rows, if not one."""
    if getattr(_array_of(arguments[operator.rows[0]]), "ndim", 0) in (0, 2):
        return None
    given = {
        name: as_array(f"{operator.name}: {name}", value)
        for name in operator.rows
        if (value := arguments[name]) is not None
    }
    specs = {name: ArraySpec(tuple(array.shape), array.dtype.name) for name, array in given.items()}
    axes = operator.axes_of_rows(**specs)
    arguments.update({name: array.reshape(math.prod(axes), array.shape[-1]) for name, array in given.items()})
    return axes


def ragged(call: OpCall, arrays: list[Any], arguments: dict[str, Any]) -> Any:
    """ragged_paged_attention: numbers where paged_attention takes arrays."""
    k_scale, v_scale = (ragged_paged_attention.number(name, arguments[name]) for name in ("k_scale", "v_scale"))
    if not arguments["use_kernel"]:
        return reference.ragged_paged_attention(
            *arrays,
            sm_scale=arguments["sm_scale"],
            sliding_window=arguments["sliding_window"],
            soft_cap=arguments["soft_cap"],
            k_scale=k_scale,
            v_scale=v_scale,
        )
    if call.operands[len(arrays) :]:  # a float8 cache: the handler applies the scales
        return _run(call, [*arrays, *(jnp.full((1,), scale, jnp.float32) for scale in (k_scale, v_scale))])
    out = _run(call, arrays)  # k_scale is a factor of scale already
    return out if v_scale == 1.0 else (out.astype(jnp.float32) * v_scale).astype(out.dtype)


def _int32(operator: Operator, operand: IntOperand, arguments: dict[str, Any]) -> Any:
    """The argument for ``operand``, where it is an int or an array without axes as int32[1]."""
    value = arguments[operand.name]
    if isinstance(value, jax.Array | np.ndarray) and value.shape == ():  # an int that jax.jit was given
        return value.reshape(1)
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return value
    bounding_shape = np.shape(arguments[operand.bounded_by])
    return jnp.full((1,), Checks(operator.name).int_operand(operand, value, bounding_shape), jnp.int32)


def _bind(operator: Operator, arguments: dict[str, Any]) -> tuple[OpCall, list[Any]]:
    arrays, values = [], dict(arguments)
    for operand in operator.int_operands:
        values[operand.name] = _int32(operator, operand, arguments)
    for name in operator.operands:
        value = values.get(name)
        if value is not None:
            array = as_array(f"{operator.name}: {name}", value)
            arrays.append(array)
            if operator.has_scratch and not all(isinstance(size, int) for size in array.shape):
                raise ValueError(
                    f"{operator.name}: {name}: expected known sizes, on which its scratch memory depends, got "
                    f"{array.dtype.name}{list(array.shape)}"
                )
            values[name] = ArraySpec(tuple(array.shape), array.dtype.name)
    try:
        return operator.bind(**values, check_inputs=check_inputs_requested()), arrays
    except _InconclusiveError as error:
        specs = {name: spec for name in operator.operands if (spec := values.get(name)) is not None}
        raise ValueError(
            f"{operator.name}: expected known sizes where checks compare them, got "
            f"{', '.join(f'{name} {spec}' for name, spec in specs.items())}: {str(error).partition('.')[0]}"
        ) from None


def _run(call: OpCall, arrays: list[Any], reduced_axes: frozenset[str] = frozenset()) -> Any:
    """``reduced_axes``: mesh axes along which the results are the same, whatever the operands are."""
    axes = varying_axes(arrays) - reduced_axes
    if axes or reduced_axes:  # inside jax.shard_map: the arrays are a device's own
        # What says over which mesh the results vary must not outlive that mesh's context.
        function = _function.__wrapped__(call, axes)
    elif not any(isinstance(array, jax.core.Tracer) for array in arrays):
        # A program of its own: JAX would trace the function anew for each call, and not look at shardings.
        function = _program(call, _explicit_shardings(call, arrays))
    else:
        function = _divided(call, _explicit_shardings(call, arrays))
    results = function(*arrays)[: len(call.results)]
    return results[0] if len(results) == 1 else tuple(results)


def _explicit_shardings(call: OpCall, arrays: list[Any]) -> tuple[Any, ...] | None:
    return None if call.partitioning is None else explicit_shardings(call, arrays)


def _divided(call: OpCall, shardings: tuple[Any, ...] | None) -> Callable[..., Any]:
    """``call`` as a function of its operands; shardings: of its results, where types have them."""
    if call.partitioning is None:
        return _function(call, frozenset())
    function = _partitioned(call)
    return function if shardings is None else jax.sharding.auto_axes(function, out_sharding=shardings)


@functools.lru_cache(maxsize=CACHED_CALLS)
def _program(call: OpCall, shardings: tuple[Any, ...] | None) -> Callable[..., Any]:
    return program(call, _divided(call, shardings))


def program(call: OpCall, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of call's operands as a compiled program."""

    def program(*arrays: Any) -> Any:
        return function(*arrays)

    # As JAX's errors name them: arrays on several devices, for example.
    program.__name__ = program.__qualname__ = call.name
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name if name.isidentifier() else f"operand_{i}" for i, name in enumerate(call.operand_names)]
    parameters = [inspect.Parameter(name, kind) for name in names]  # those of users' kernels have no names
    program.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return cast(Callable[..., Any], jax.jit(program))


@functools.lru_cache(maxsize=CACHED_CALLS)
def _partitioned(call: OpCall) -> Callable[..., Any]:
    """``call`` as a function of its operands that divides over devices; a device's call is bound to its shards."""
    partitioning, with_operands = call.partitioning, call.with_operands
    assert partitioning is not None and with_operands is not None

    def local(*arrays: Any) -> tuple[Any, ...]:
        specs = [ArraySpec(tuple(array.shape), array.dtype.name) for array in arrays]
        shard = with_operands(dict(zip(call.operand_names, specs, strict=True)))
        return tuple(_target(shard, frozenset())(*arrays)[: len(shard.results)])

    # custom_partitioning has no rule for vmap.
    return with_derivative(call, sequential_vmap(partitioned(call, partitioning, local)))


def as_array(where: str, value: Any) -> Any:
    given, value = value, _array_of(value)
    if not _is_array(value):
        raise TypeError(f"{where}: expected a JAX or NumPy array, got {type_name(given)}")
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted():
        raise ValueError(
            f"{where}: expected an array with memory, got {_described(value)}, donated to an earlier call or deleted"
        )
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):  # objects, texts, bytes in the other order, masked arrays
        raise TypeError(
            f"{where}: expected an array that JAX takes, got {_described(value)} of type {type(value).__name__}"
        ) from None
    if array.dtype != value.dtype and value.dtype.kind in "iu" and value.size:
        _check_kept(where, value, np.iinfo(array.dtype))
    return array


def _array_of(value: Any) -> Any:
    """The array that something stands for, such as flax.nnx.Param; else the value."""
    made = None if _is_array(value) else getattr(value, "__jax_array__", None)
    return value if made is None else made()


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)  # tracers are jax.Arrays too


def _described(value: Any) -> str:
    dtype = value.dtype.str if isinstance(value, np.ndarray) else value.dtype.name  # "<f4", with the order of bytes
    return f"{dtype}{list(value.shape)}"


def _check_kept(where: str, value: Any, limits: np.iinfo) -> None:
    """Raises where JAX, which cuts integers to 32 bits without a word, made other numbers of them."""
    for number in (int(value.min()), int(value.max())):
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{where}: expected integers of {limits.dtype}, since JAX has no {value.dtype} unless jax_enable_x64 "
                f"is set, got {number}"
            )


@functools.lru_cache(maxsize=CACHED_CALLS)
def _function(call: OpCall, varying_axes: frozenset[str]) -> Callable[..., Any]:
    return with_derivative(call, _target(call, varying_axes))


def _target(call: OpCall, varying_axes: frozenset[str]) -> Callable[..., Any]:
    """The custom call alone; its results as a list, scratch included."""
    _register()
    results = [
        jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), **_varying(varying_axes)) for spec in all_results(call)
    ]
    attributes = {name: numpy_value(attribute) for name, attribute in call.attributes}
    target = jax.ffi.ffi_call(
        call.target,
        results,
        vmap_method="sequential",
        input_output_aliases=dict(call.aliases) or None,
    )
    return lambda *arrays: target(*arrays, **attributes)


def varying_axes(arrays: list[Any]) -> frozenset[str]:
    """The mesh axes over which the arrays vary inside jax.shard_map, which results then do too."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        type_ = jax.typeof(array)
        # jax 0.10 put what was `vma` into a type of its own.
        manual = getattr(type_, "manual_axis_type", None)
        axes |= manual.varying if manual is not None else getattr(type_, "vma", axes)
    return axes


def _varying(axes: frozenset[str]) -> dict[str, Any]:
    """The arguments of jax.ShapeDtypeStruct that say so."""
    if not axes:
        return {}
    if "manual_axis_type" not in jax.ShapeDtypeStruct.__slots__:
        return {"vma": axes}
    mesh = jax.sharding.get_abstract_mesh()
    return {
        "manual_axis_type": jax.sharding.ManualAxisType(varying=axes),
        "sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
    }


@functools.cache
def _register() -> None:
    """Registers the library's handlers with JAX; those of a platform that starts later wait in JAX's own queue."""
    for handler in library.load().handlers():
        platform = "cpu" if handler.platform == "Host" else handler.platform
        try:
            jax.ffi.register_ffi_target(handler.target, targets.capsule(handler.execute), platform=platform)
        except RuntimeError as error:
            raise TargetError(
                f"FFI target {handler.target!r} was refused by JAX's {platform} runtime: {error}. If the name is "
                "taken, something else in this process registered it first: a second copy of the library, or other code"
            ) from error


# At import, so that a program from jax.export or from a compilation cache finds its targets. What is wrong with the
# library or with a name is raised by the first call.
with contextlib.suppress(LibraryError, TargetError):
    _register()
