"""Operators and their calls, before any framework: shapes, dtypes, attributes, aliases, scratch memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .attributes import Attributes, attributes
from .dtypes import FLOATS
from .environment import switch
from .partitioning import Partitioning

# Bound calls that an operator keeps, and what a front end keeps of each. Calls are compared as objects, so that a front
# end finds nothing again of a call that is not kept here.
CACHED_CALLS = 4096


def check_sizes(where: str, index: int, shape: Iterable[Any]) -> None:
    """Raises ValueError for a described result with a negative size or one past 64 bits, TypeError for no int."""
    sizes = tuple(shape)
    # NOTE: torch.compile traces isinstance with a tuple, but not with a union.
    if any(isinstance(size, (bool, float, str)) or size is None for size in sizes):
        raise TypeError(f"{where}: result {index}: expected sizes that are ints, got {sizes}")
    if any(type(size) is int and size >= 2**63 for size in sizes):
        raise ValueError(f"{where}: result {index}: expected sizes of 64 bits, got {sizes}")
    if any(type(size) is int and size < 0 for size in sizes):  # not of symbolic sizes, which are 0 or more
        raise ValueError(f"{where}: result {index}: expected sizes of 0 or more, got {sizes}")


def check_alias_types(where: str, aliases: Any) -> None:
    """Raises TypeError for what is neither None nor a dict of ints: input_output_aliases of a user's call."""
    where = f"{where}: input_output_aliases: expected a dict of an operand's index to a result's"
    if aliases is None:
        return
    if not hasattr(aliases, "items"):
        raise TypeError(f"{where}, got {type(aliases).__name__}")
    for pair in aliases.items():
        if not all(isinstance(index, (int, np.integer)) and not isinstance(index, bool) for index in pair):
            raise TypeError(f"{where}, got {aliases}")


class ArraySpec(NamedTuple):
    """Shape and dtype of an operand or a result. Hashable, unless a dimension is a symbol of a tracer."""

    shape: tuple[int, ...]
    dtype: str  # NumPy's name, see _core/dtypes.py

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


# Axes from major to minor, as jax.ffi takes them; None is row-major.
Layout = tuple[int, ...] | None


@dataclass(frozen=True, eq=False)  # eq=False: compared and hashed as an object, since calls are made once and cached
class OpCall:
    """One custom call, complete but for the arrays. Every front end lowers the same OpCall."""

    name: str  # of the operator, which begins its error texts
    target: str
    operand_names: tuple[str, ...]
    operands: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]  # what the caller gets
    attributes: Attributes = ()
    aliases: tuple[tuple[int, int], ...] = ()  # (operand, result) that share one buffer
    has_scratch: bool = False  # the target takes scratch memory as one more, last result; see _runtime/scratch.py
    operand_layouts: tuple[Layout, ...] = ()  # empty: all row-major
    result_layouts: tuple[Layout, ...] = ()
    has_side_effect: bool = False
    partitioning: Partitioning | None = None
    differentiable: frozenset[str] = frozenset()  # the operands that have a gradient
    # The same call on operands of other shapes: a device's shards. By name; extra operands are left out.
    with_operands: Callable[[Mapping[str, ArraySpec]], OpCall] | None = None

    def operand_layout(self, index: int) -> tuple[int, ...]:
        return _layout(self.operand_layouts, index, len(self.operands[index].shape))

    def result_layout(self, index: int) -> tuple[int, ...]:
        is_scratch = index == len(self.results)
        return _layout(self.result_layouts, index, 1 if is_scratch else len(self.results[index].shape))


def _layout(layouts: tuple[Layout, ...], index: int, rank: int) -> tuple[int, ...]:
    layout = layouts[index] if index < len(layouts) else None
    return tuple(range(rank)) if layout is None else layout


@dataclass(frozen=True)
class Signature:
    """What follows from the arguments of one kind of call, once they are checked."""

    results: tuple[ArraySpec, ...]  # what the caller gets; scratch memory is left out
    attributes: Mapping[str, Any] = field(default_factory=dict)  # NumPy scalars of the handler's types
    extra_operands: Mapping[str, ArraySpec] = field(default_factory=dict)  # which front ends add after the arguments
    partitioning: Partitioning | None = None  # over devices; None: the call needs all of its operands


class IntOperand(NamedTuple):
    """An operand int32[1] that the front ends' functions take as an int too."""

    name: str
    bounded_by: str  # the array [n + others] whose n is the largest value
    others: int = 0


_ARGUMENT = re.compile(r"(?P<type>\w+)\??(?:\[\])? (?P<name>\w+)(?:=[^,)]*)?(?=[,)])")


@dataclass(frozen=True, eq=False)
class Operator:
    """The declaration of one operator, from which every front end is made.

    Args:
      name: of the operator.
      schema: of torch.library, without the name: "(Tensor a, Tensor b) -> Tensor". Its tensors, in their order, are the
        operands of the custom call; optional ones that are None are left out.
      signature: takes the schema's arguments by name, arrays as ArraySpec, and ``check_inputs``. Checks them, raises
        ValueError or TypeError, and returns the call's Signature.
      docstring: Args, Returns and Raises, which every front end shows.
      in_place: the operand whose memory the last result replaces. The custom call aliases the two, and PyTorch gets
        ``<name>_``, which updates that operand, and returns it or, if there are two results, the first.
      has_scratch: the target takes scratch memory as a last result, of the size that its handler table row computes.
      int_operands: the operands that may be ints.
      rows: the operands [rows, n] that may have any other number of axes before the last in the public functions, which
        make one of them, and give the result theirs. The first one is the schema's first argument, which has them
        always; others are optional.
      differentiable: the operands that have a gradient where they are float32, float16 or bfloat16. Front ends have it
        in their framework's own operations (_torch/gradients.py, _jax/gradients.py).
      target: of the handler; by default ``xla_gpu_<name>``.
    """

    name: str
    schema: str
    signature: Callable[..., Signature]
    docstring: str = ""
    in_place: str | None = None
    has_scratch: bool = False
    int_operands: tuple[IntOperand, ...] = ()
    rows: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    target: str = ""

    def __post_init__(self) -> None:
        if not self.target:
            object.__setattr__(self, "target", f"xla_gpu_{self.name}")
        results = ("-> Tensor", "-> (Tensor, Tensor)")
        if self.in_place is not None and (self.in_place not in self.operands or not self.schema.endswith(results)):
            raise ValueError(
                f"{self.name}: in_place: expected an operand of a schema with one or two results, got "
                f"{self.in_place!r} for {self.schema}"
            )

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The schema's arguments, in their order."""
        return tuple(match["name"] for match in _ARGUMENT.finditer(self.schema))

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The arguments that are arrays, in the order of the custom call."""
        return tuple(match["name"] for match in _ARGUMENT.finditer(self.schema) if match["type"] == "Tensor")

    @functools.cached_property
    def plain_values(self) -> tuple[tuple[str, str], ...]:
        """The arguments that are numbers or bools, and what error texts call such a one."""
        kinds = {"int": "an int", "float": "a number", "bool": "a bool"}
        return tuple((m["name"], kinds[m["type"]]) for m in _ARGUMENT.finditer(self.schema) if m["type"] in kinds)

    def axes_of_rows(self, **operands: ArraySpec) -> tuple[int, ...]:
        """The axes before the last, which those of ``rows`` that are given share.

        Raises:
          ValueError: they do not.
        """
        first, *others = self.rows
        axes = operands[first].shape[:-1]
        for name in others:
            if name in operands and (not operands[name].shape or operands[name].shape[:-1] != axes):
                expected = ", ".join(map(str, (*axes, "out_features")))
                raise ValueError(
                    f"{self.name}: {name}: expected shape [{expected}] (rows as {first}), got {operands[name]}"
                )
        return axes

    def bind(self, **arguments: Any) -> OpCall:
        """The custom call for these arguments, arrays as ArraySpec. Cached.

        Raises:
          TypeError, ValueError: what ``signature`` raises.
        """
        try:
            return self._cached_bind(**arguments)
        except TypeError:  # an argument cannot be hashed (a symbolic size above all), or is refused with a text
            return self._bind(**arguments)

    @functools.cached_property
    def _cached_bind(self) -> Callable[..., OpCall]:
        # typed: True, 1 and 1.0 are equal, and only one of them is a window.
        return functools.lru_cache(maxsize=CACHED_CALLS, typed=True)(self._bind)

    def _bind(self, **arguments: Any) -> OpCall:
        signature = self.signature(**arguments)
        given = {name: arguments[name] for name in self.operands if arguments.get(name) is not None}
        taken = frozenset(given)
        given.update(signature.extra_operands)
        names = tuple(given)
        return OpCall(
            name=self.name,
            target=self.target,
            operand_names=names,
            operands=tuple(given.values()),
            results=signature.results,
            attributes=attributes(self.name, signature.attributes),
            aliases=() if self.in_place is None else ((names.index(self.in_place), len(signature.results) - 1),),
            has_scratch=self.has_scratch,
            partitioning=signature.partitioning,
            differentiable=frozenset(n for n in self.differentiable if n in given and given[n].dtype in FLOATS),
            with_operands=lambda specs: self.bind(**{**arguments, **{n: s for n, s in specs.items() if n in taken}}),
        )


def check_inputs_requested() -> bool:
    """Whether handlers on CUDA may look at the metadata and return errors. Read anew for every traced call.

    Raises:
      ValueError: XLA_GPU_CHECK_INPUTS is neither 0 nor 1.
    """
    return switch("XLA_GPU_CHECK_INPUTS", False)
