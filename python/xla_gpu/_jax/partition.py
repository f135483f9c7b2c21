"""Calls on sharded arrays under jax.jit: each device calls the handler on its shards, and nothing is gathered.

XLA cannot look into a custom call, and would gather its operands on every device. jax.experimental.custom_partitioning
tells it how the call divides: to Shardy by a rule, to GSPMD by callbacks.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning

from .._core.operator import OpCall
from .._core.partitioning import Axes, Partitioning

P = jax.sharding.PartitionSpec

# Under a mesh of explicit axes a device's program may have JAX's own operations beside a call: newer than jax 0.7.
DIVIDES_OPERATIONS = hasattr(jax.sharding, "use_abstract_mesh")


def partitioned(call: OpCall, partitioning: Partitioning, local: Callable[..., Any]) -> Callable[..., Any]:
    """A function of call's operands that divides as ``partitioning`` says.

    ``local`` computes the call's results (a tuple) from operands of any sizes: a device's shards.
    """
    identity = _identity(call)
    plan = _Plan(call, partitioning)

    def function(*arrays: Any) -> Any:
        return local(*arrays[: len(call.operands)])

    def of_a_device(*arrays: Any) -> Any:
        # Of the mesh of jax.set_mesh a device knows nothing: JAX's operations would say how their results divide.
        if not DIVIDES_OPERATIONS:
            return function(*arrays)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*arrays)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        arguments = arguments[: len(call.operands)]
        plan.check(mesh, arguments)
        operand_shardings, result_shardings = plan.shardings(mesh, arguments)
        whole = jax.sharding.NamedSharding(mesh, P())
        return mesh, of_a_device, result_shardings, (*operand_shardings, *(whole for _ in identity))

    def infer(mesh: Any, arguments: Any, results: Any) -> Any:
        return plan.shardings(mesh, arguments[: len(call.operands)])[1]

    divided: Any = custom_partitioning(function)
    divided.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        # JAX's own decoding fails without naming anybody where Shardy splits a mesh axis.
        decode_shardings=False,
        sharding_rule=sharding_rule(call, partitioning, len(identity)),
    )
    return lambda *arrays: cast(tuple[Any, ...], divided(*arrays, *identity))


def _identity(call: OpCall) -> tuple[np.uint32, ...]:
    """Numbers that differ for calls that do, which stand in the program as operands that nothing reads.

    Until a program is partitioned its text shows of a call no more than shapes and the address of a Python object.
    JAX's compilation cache on disk, told to leave out addresses (jax_remove_custom_partitioning_ptr_from_cache_key),
    would find the program of another operator or of other attributes. Scalars, since JAX may make arguments of the
    program of arrays.
    """
    text = repr((call.target, call.attributes, call.aliases)).encode()
    return tuple(np.frombuffer(hashlib.sha256(text).digest()[:16], np.uint32))


def explicit_shardings(call: OpCall, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """The results' shardings where the operands' are part of their types (AxisType.Explicit); None elsewhere.

    JAX has no rule for custom_partitioning there, and would have whole results on every device.

    Raises:
      ValueError: an operand is divided over another mesh than that of the context, or of another operand.
    """
    assert call.partitioning is not None
    mesh, of = jax.sharding.get_abstract_mesh(), "jax.set_mesh"
    arguments = [jax.typeof(array) for array in arrays]
    if mesh.empty:  # types have the meshes of arrays that were placed
        for name, argument in zip(call.operand_names, arguments, strict=True):
            if not argument.sharding.mesh.empty:
                mesh, of = argument.sharding.mesh, name
                break
    if jax.sharding.AxisType.Explicit not in (getattr(mesh, "axis_types", None) or ()):
        return None
    for name, argument in zip(call.operand_names, arguments, strict=True):
        if not {axis for entry in argument.sharding.spec for axis in _names(entry)} <= set(mesh.axis_names):
            raise ValueError(
                f"{call.name}: {name}: expected an array over the mesh of {of}, {dict(mesh.shape)}, got one "
                f"over {dict(argument.sharding.mesh.shape)}"
            )
    if not any(axis is not None for argument in arguments for axis in argument.sharding.spec):
        return None
    return _Plan(call, call.partitioning).shardings(mesh, arguments)[1]


def sharding_rule(call: OpCall, partitioning: Partitioning, scalars: int = 0) -> SdyShardingRule:
    """Shardy's rule for the call: each dimension is a factor, or two of which the axis is the major one.

    ``scalars``: operands behind those of the call.
    """
    sizes: dict[str, int] = {}
    whole_axes: set[str] = set()
    names = itertools.count()

    def dimension(axis: str | None, size: int) -> str | CompoundFactor:
        if axis is None or partitioning.sizes[axis] == 1:  # of one factor of two, Shardy refuses the size 1
            return f"x{next(names)}"  # nothing else has this dimension: nothing propagates along it
        if size == partitioning.sizes[axis]:
            whole_axes.add(axis)
            return axis
        inner = f"x{next(names)}"
        sizes[axis], sizes[inner] = partitioning.sizes[axis], size // partitioning.sizes[axis]
        return CompoundFactor(axis, inner)

    def array(axes: Axes | None, shape: tuple[int, ...]) -> ArrayMapping:
        return ArrayMapping(*(dimension(a, s) for a, s in zip(axes or (None,) * len(shape), shape, strict=True)))

    operands = tuple(
        array(partitioning.operands.get(name), spec.shape)
        for name, spec in zip(call.operand_names, call.operands, strict=True)
    )
    results = tuple(array(axes, spec.shape) for axes, spec in zip(partitioning.results, call.results, strict=True))
    # Shardy refuses the size of a factor that is a whole dimension somewhere.
    factors = {name: size for name, size in sizes.items() if name not in whole_axes}
    return SdyShardingRule((*operands, *(ArrayMapping() for _ in range(scalars))), results, **factors)


class _Plan:
    """How the operands' shardings, whatever they are, become those of one call."""

    def __init__(self, call: OpCall, partitioning: Partitioning) -> None:
        self._call, self._partitioning = call, partitioning
        # The arrays that must not move decide; the others follow.
        kept = partitioning.never_gathered
        self._order = sorted(range(len(call.operands)), key=lambda i: call.operand_names[i] not in kept)

    def check(self, mesh: Any, arguments: Any) -> None:
        """Raises ValueError for shardings under which a device would need what another one has."""
        for i, argument in enumerate(arguments):
            name = self._call.operand_names[i]
            entries = _entries(argument, mesh)
            if entries is None:
                raise ValueError(
                    f"{self._call.name}: {name}: expected shards along whole axes of a mesh of NamedShardings, got "
                    f"{argument.sharding} for {self._call.operands[i]}"
                )
            for dim, (axis, entry) in enumerate(zip(self._axes(name, len(entries)), entries, strict=True)):
                if axis is not None and self._partitioning.sizes[axis] % _shards(entry, mesh):
                    expected = f"a number of shards that divides {axis} = {self._partitioning.sizes[axis]}"
                elif axis is None and entry is not None and name in self._partitioning.never_gathered:
                    expected = "no shards of an axis that every device needs whole"
                else:
                    continue
                raise self._error(i, dim, entry, mesh, expected)

    # NOTE: never raises. GSPMD asks while it propagates shardings, and ends the process for an error.
    def shardings(self, mesh: Any, arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        call, partitioning = self._call, self._partitioning
        chosen: dict[str, Entry] = {}
        for i in self._order:
            name = call.operand_names[i]
            entries = _entries(arguments[i], mesh) or (None,) * len(arguments[i].shape)
            kept = name in partitioning.never_gathered
            for axis, entry in zip(self._axes(name, len(entries)), entries, strict=True):
                if axis is None or axis in chosen or (entry is None and not kept):
                    continue
                chosen[axis] = None if partitioning.sizes[axis] % _shards(entry, mesh) else entry
        _keep_disjoint(chosen)

        def sharding(axes: Axes) -> Any:
            return jax.sharding.NamedSharding(mesh, P(*(chosen.get(axis) if axis else None for axis in axes)))

        operands = tuple(
            sharding(self._axes(name, len(spec.shape)))
            for name, spec in zip(call.operand_names, call.operands, strict=True)
        )
        return operands, tuple(sharding(axes) for axes in partitioning.results)

    def _axes(self, name: str, rank: int) -> Axes:
        return self._partitioning.operands.get(name) or (None,) * rank

    def _error(self, index: int, dim: int, entry: Entry, mesh: Any, expected: str) -> ValueError:
        spec = self._call.operands[index]
        mesh_axes = " and ".join(map(repr, entry or ()))
        return ValueError(
            f"{self._call.name}: {self._call.operand_names[index]}: expected {expected}, got axis {dim} of {spec} in "
            f"{_shards(entry, mesh)} shards over mesh axis {mesh_axes}"
        )


def _keep_disjoint(chosen: dict[str, Entry]) -> None:
    """A mesh axis divides one axis of the call: of two that ask for it the later one goes without."""
    used: set[str] = set()
    for axis, entry in chosen.items():
        if used & set(entry or ()):
            chosen[axis] = None
        else:
            used |= set(entry or ())


# The mesh axes of a dimension, major to minor; None: unsharded.
Entry = tuple[str, ...] | None


def _entries(argument: Any, mesh: Any) -> tuple[Entry, ...] | None:
    """One entry a dimension; None where the sharding is not one along whole axes of ``mesh``."""
    shape, sharding = argument.shape, argument.sharding
    if sharding is None or sharding.is_fully_replicated:
        return (None,) * len(shape)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(mesh, jax.sharding.AbstractMesh):
        given: list[Entry] = [_names(entry) or None for entry in sharding.spec]
        return (*given, *(None,) * (len(shape) - len(given)))
    try:
        local = sharding.shard_shape(shape)
    except ValueError:  # shards of unequal sizes
        return None
    options = [_axes_of(size // shard if shard else 1, mesh) for size, shard in zip(shape, local, strict=True)]
    for entries in itertools.product(*options):
        used = [axis for entry in entries for axis in entry or ()]
        if len(used) != len(set(used)):
            continue
        if jax.sharding.NamedSharding(mesh, P(*entries)).is_equivalent_to(sharding, len(shape)):
            return entries
    return None


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_of(shards: int, mesh: Any) -> list[Entry]:
    """The ways to make so many shards of mesh axes."""
    if shards == 1:
        return [None]
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    return [
        axes
        for count in range(1, len(names) + 1)
        for axes in itertools.permutations(names, count)
        if math.prod(mesh.shape[name] for name in axes) == shards
    ]


def _shards(entry: Entry, mesh: Any) -> int:
    return math.prod(mesh.shape[name] for name in entry or ())
