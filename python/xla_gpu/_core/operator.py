"""What a call of an FFI target is, before any framework: shapes, dtypes, attributes, aliases."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .attributes import Attributes


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
    """One custom call, complete but for the arrays. Every door turns the same OpCall into its own kind of call."""

    name: str  # of the operator, which begins its error texts
    target: str
    operand_names: tuple[str, ...]
    operands: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]  # what the caller gets
    attributes: Attributes = ()
    aliases: tuple[tuple[int, int], ...] = ()  # (operand, result) that share one buffer
    # Bytes of the scratch memory that the target takes as one more, last result. A function, since the answer needs the
    # library and plain numbers, and a traced call with symbolic sizes has neither.
    scratch: Callable[[], int] | None = None
    operand_layouts: tuple[Layout, ...] = ()  # empty: all row-major
    result_layouts: tuple[Layout, ...] = ()
    has_side_effect: bool = False

    @functools.cached_property
    def all_results(self) -> tuple[ArraySpec, ...]:
        """The results of the custom call, scratch included."""
        if self.scratch is None:
            return self.results
        return (*self.results, ArraySpec((self.scratch(),), "uint8"))

    def operand_layout(self, index: int) -> tuple[int, ...]:
        return _layout(self.operand_layouts, self.operands, index)

    def result_layout(self, index: int) -> tuple[int, ...]:
        return _layout(self.result_layouts, self.all_results, index)


def _layout(layouts: tuple[Layout, ...], specs: tuple[ArraySpec, ...], index: int) -> tuple[int, ...]:
    layout = layouts[index] if index < len(layouts) else None
    return tuple(range(len(specs[index].shape))) if layout is None else layout


@dataclass(frozen=True)
class Operator:
    """The declaration of one operator, from which every door is made."""

    name: str
    schema: str  # of torch.library, without the name: "(Tensor a, Tensor b) -> Tensor"
    operands: tuple[str, ...]  # the array arguments in the order of the custom call; absent optional ones are left out
    # Takes the schema's arguments by name, arrays as ArraySpec, and `check_inputs`; raises ValueError or TypeError.
    bind: Callable[..., OpCall]


def check_inputs_requested() -> bool:
    """Whether handlers on CUDA may look at the metadata and return errors. Read anew for every traced call."""
    return os.environ.get("XLA_GPU_CHECK_INPUTS", "0") not in ("", "0")
