"""Along which dimensions a call divides over devices without communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# One entry a dimension: the independent axis that it belongs to, or None where every device needs all of it.
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Partitioning:
    """The independent axes of a call: a device that holds a share of an axis computes that share of the results.

    A dimension of an axis may be longer than the axis by a constant factor: with "heads" of size num_kv_heads, query's
    dimension num_heads and a cache's 2 * num_kv_heads both divide by kv heads.
    """

    operands: Mapping[str, Axes]  # by argument
    results: tuple[Axes, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)  # of each axis: what a number of shards must divide
    # Operands that are too large to be gathered: a sharding that would need it is an error.
    never_gathered: tuple[str, ...] = ()


def elementwise(argument_ranks: Mapping[str, int], shape: tuple[int, ...], results: int = 1) -> Partitioning:
    """Every dimension is an axis of its own, shared by all operands of that rank and all results."""
    axes: Axes = tuple(f"d{i}" for i in range(len(shape)))
    return Partitioning(
        {name: axes for name, rank in argument_ranks.items() if rank == len(shape)},
        (axes,) * results,
        {axis: size for axis, size in zip(axes, shape, strict=True) if axis is not None},
    )
