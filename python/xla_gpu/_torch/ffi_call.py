"""ffi_call for tensors: any FFI target as one generic torch.library operator, so that torch.compile sees through it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._core.attribute_text import attribute_text, parse_attribute
from .._core.dtypes import DTYPES
from .._core.operator import CACHED_CALLS, ArraySpec, Layout, OpCall, check_alias_types, check_sizes
from .dispatch import LIBRARY, define, fake_results, run
from .tensors import spec

# Nothing but tensors, numbers and strings passes through torch.compile and torch.export, and no nested lists: shapes
# and layouts are strung together.
_SCHEMA = (
    "(Tensor[] operands, str target, str[] result_dtypes, int[] result_ranks, SymInt[] result_sizes, "
    "str[] attribute_names, str[] attribute_values, int[] operand_layouts, int[] result_layouts, int[] aliases) "
    "-> Tensor[]"
)


class FfiCall:
    """What xla_gpu.torch.ffi_call returns."""

    def __init__(
        self,
        target_name: str,
        result_shape_dtypes: Any,
        has_side_effect: bool = False,
        input_layouts: Sequence[Sequence[int] | None] | None = None,
        output_layouts: Sequence[Any] | None = None,
        input_output_aliases: dict[int, int] | None = None,
        bound: dict[str, str] | None = None,
    ) -> None:
        # NOTE: torch.compile traces through here, and through isinstance with a tuple, but not with a union.
        if not isinstance(target_name, str):
            raise TypeError(f"ffi_call: target_name: expected a str, got {type(target_name).__name__}")
        check_alias_types(target_name, input_output_aliases)
        several = isinstance(result_shape_dtypes, (list, tuple)) and not hasattr(result_shape_dtypes, "dtype")
        results = result_shape_dtypes if several else [result_shape_dtypes]
        self._arguments = (
            *(target_name, result_shape_dtypes, has_side_effect),
            *(input_layouts, output_layouts, input_output_aliases),
        )
        self._target = target_name
        self._container: Any = None if not several else tuple if isinstance(result_shape_dtypes, tuple) else list
        self._dtypes = [dtype_name(target_name, i, result) for i, result in enumerate(results)]
        self._shapes = [list(result.shape) for result in results]
        self._op = torch.ops.xla_gpu.ffi_call_with_side_effect if has_side_effect else torch.ops.xla_gpu.ffi_call
        self._input_layouts = input_layouts
        self._output_layouts = output_layouts if several or output_layouts is None else [output_layouts]
        self._aliases = input_output_aliases or {}
        self._bound = bound or {}

    def bind(self, **attributes: Any) -> FfiCall:
        """The same call with these attributes given already, for use inside torch.compile."""
        return FfiCall(*self._arguments, bound={**self._bound, **self._texts(attributes)})

    def __call__(self, *tensors: torch.Tensor, **attributes: Any) -> Any:
        """Calls the target."""
        if not tensors:
            raise ValueError(f"{self._target}: expected at least one operand, whose device says where to run, got none")
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{self._target}: operand {i}: expected a tensor, got {type(tensor).__name__}")
        texts = {**self._bound, **self._texts(attributes)} if attributes else self._bound
        results = self._op(
            list(tensors),
            self._target,
            self._dtypes,
            [len(shape) for shape in self._shapes],
            [size for shape in self._shapes for size in shape],
            list(texts.keys()),
            list(texts.values()),
            _flat_layouts(self._target, "input_layouts", self._input_layouts, [tensor.dim() for tensor in tensors]),
            _flat_layouts(self._target, "output_layouts", self._output_layouts, [len(shape) for shape in self._shapes]),
            [index for pair in self._aliases.items() for index in pair],
        )
        return results[0] if self._container is None else self._container(results)

    def _texts(self, attributes: dict[str, Any]) -> dict[str, str]:
        if torch.compiler.is_dynamo_compiling():
            return {name: _constant_text(self._target, name, attributes[name]) for name in sorted(attributes)}
        return {name: attribute_text(self._target, name, attributes[name]) for name in sorted(attributes)}


def _traced_text(target: str, name: str, value: Any) -> str:
    """attribute_text for torch.compile, which runs this while it traces."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{target}: attribute {name}: torch.compile makes a tensor of a NumPy value, and attributes are constants; "
            f"outside of the compiled function call ffi_call(...).bind({name}=...), inside of it what that returned"
        )
    return attribute_text(target, name, value)


_constant_text = torch.compiler.assume_constant_result(_traced_text)


def dtype_name(target: str, index: int, result: Any) -> str:
    """NumPy's name of the dtype of ``result``, the description of result ``index`` of ``target``."""
    if not hasattr(result, "shape") or not hasattr(result, "dtype"):
        raise TypeError(
            f"{target}: result {index}: expected an object with shape and dtype, got {type(result).__name__}"
        )
    check_sizes(target, index, result.shape)
    dtype = result.dtype
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if name not in DTYPES:
        raise TypeError(f"{target}: result {index}: expected a dtype that XLA knows, got {name}")
    return name


def _flat_layouts(target: str, which: str, layouts: Sequence[Any] | None, ranks: Sequence[int]) -> list[int]:
    """All layouts in one list; empty where all are row-major."""
    if layouts is None:
        return []
    if len(layouts) != len(ranks):
        raise ValueError(f"{target}: {which}: expected {len(ranks)} layouts, got {len(layouts)}")
    flat: list[int] = []
    for i, (layout, rank) in enumerate(zip(layouts, ranks, strict=True)):
        axes = list(range(rank)) if layout is None else list(layout) if hasattr(layout, "__iter__") else [layout]
        # NOTE: torch.compile traces isinstance with a tuple, but not with a union.
        is_ints = all(isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) for axis in axes)
        if not is_ints or sorted(axes) != list(range(rank)):
            raise ValueError(f"{target}: {which}: {i}: expected an order of {rank} axes, got {axes}")
        flat.extend(map(int, axes))
    return flat


# ---- The operators ---------------------------------------------------------------------------------------------------


def _bind(
    has_side_effect: bool,
    operands: tuple[ArraySpec, ...],
    target: str,
    result_dtypes: tuple[str, ...],
    result_ranks: tuple[int, ...],
    result_sizes: tuple[int, ...],
    attribute_names: tuple[str, ...],
    attribute_values: tuple[str, ...],
    operand_layouts: tuple[int, ...],
    result_layouts: tuple[int, ...],
    aliases: tuple[int, ...],
) -> OpCall:
    shapes = split(result_sizes, result_ranks)
    results = tuple(ArraySpec(shape, dtype) for shape, dtype in zip(shapes, result_dtypes, strict=True))
    attributes = tuple(
        sorted(
            (name, parse_attribute(target, name, value))
            for name, value in zip(attribute_names, attribute_values, strict=True)
        )
    )
    call = OpCall(
        name=target,
        target=target,
        operand_names=tuple(f"operand {i}" for i in range(len(operands))),
        operands=operands,
        results=results,
        attributes=attributes,
        aliases=tuple(zip(aliases[::2], aliases[1::2], strict=True)),
        operand_layouts=_layouts(operand_layouts, [len(operand.shape) for operand in operands]),
        result_layouts=_layouts(result_layouts, result_ranks),
        has_side_effect=has_side_effect,
    )
    _check_aliases(call)
    return call


_cached_bind = functools.lru_cache(maxsize=CACHED_CALLS)(_bind)


def split(values: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """``values`` in parts of these lengths."""
    parts, start = [], 0
    for length in lengths:
        parts.append(tuple(values[start : start + length]))
        start += length
    return parts


def _layouts(flat: Sequence[int], ranks: Sequence[int]) -> tuple[Layout, ...]:
    return tuple(split(flat, ranks)) if flat else ()


def _check_aliases(call: OpCall) -> None:
    for operand, result in call.aliases:
        where = f"{call.name}: input_output_aliases: {operand}: {result}"
        if not 0 <= operand < len(call.operands) or not 0 <= result < len(call.results):
            raise ValueError(
                f"{where}: expected an operand below {len(call.operands)} and a result below {len(call.results)}"
            )
        if call.operands[operand] != call.results[result]:
            raise ValueError(
                f"{where}: expected one shape and dtype, "
                f"got operand {call.operands[operand]} and result {call.results[result]}"
            )
        if call.operand_layout(operand) != call.result_layout(result):
            raise ValueError(
                f"{where}: expected one layout, got {call.operand_layout(operand)} and {call.result_layout(result)}"
            )
    for side in (0, 1):
        if len({pair[side] for pair in call.aliases}) != len(call.aliases):
            raise ValueError(f"{call.name}: input_output_aliases: expected every index once, got {call.aliases}")


def _define(name: str, has_side_effect: bool) -> None:
    def specs(operands: Sequence[torch.Tensor], target: str) -> tuple[ArraySpec, ...]:
        return tuple(spec(f"{target}: operand {i}", operand) for i, operand in enumerate(operands))

    def kernel(operands: list[torch.Tensor], target: str, *rest: Sequence[Any]) -> list[torch.Tensor]:
        call = _cached_bind(has_side_effect, specs(operands, target), target, *map(tuple, rest))
        return list(run(call, operands))

    def fake(operands: list[torch.Tensor], target: str, *rest: Sequence[Any]) -> list[torch.Tensor]:
        call = _bind(has_side_effect, specs(operands, target), target, *map(tuple, rest))
        return list(fake_results(call, operands))

    def refuse_batch(operands: list[torch.Tensor], target: str, *_: Any) -> Any:
        raise RuntimeError(
            f"{target}: ffi_call cannot run under torch.vmap: only the handler knows where a batch may stand; call it "
            "with the batch, or once for each element"
        )

    define(name, _SCHEMA, kernel, fake)
    LIBRARY.impl(name, refuse_batch, "FuncTorchBatched")


_define("ffi_call", has_side_effect=False)
_define("ffi_call_with_side_effect", has_side_effect=True)
# Else torch.export drops calls whose results are not used.
torch.fx.node.has_side_effect(torch.ops.xla_gpu.ffi_call_with_side_effect.default)
