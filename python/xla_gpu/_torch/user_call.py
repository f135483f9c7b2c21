"""What kernel_call and triton_call for tensors share: torch.library operators, so that torch.compile sees through them.

Eager calls with arguments that were seen before go past PyTorch's dispatcher: their custom call is remembered.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from .._core.operator import ArraySpec, OpCall, check_alias_types, check_inputs_requested
from .._user_kernels.launch import Arguments, Result, Scratch
from .dispatch import LIBRARY, define, fake_results, run
from .ffi_call import dtype_name, split
from .tensors import spec


def is_tensor(value: Any) -> bool:
    """Whether a kernel's argument is an operand, and no number."""
    return isinstance(value, torch.Tensor)


class Results:
    """The results that a caller described: NumPy's names of dtypes, shapes, and the container to return them in."""

    def __init__(self, where: str, result_shape_dtypes: Any) -> None:
        # NOTE: torch.compile traces through here, and through isinstance with a tuple, but not with a union.
        several = isinstance(result_shape_dtypes, (list, tuple)) and not hasattr(result_shape_dtypes, "dtype")
        results = result_shape_dtypes if several else [result_shape_dtypes]
        self._container: Any = None if not several else tuple if isinstance(result_shape_dtypes, tuple) else list
        self.dtypes = [dtype_name(where, i, result) for i, result in enumerate(results)]
        self.shapes = [list(result.shape) for result in results]

    def encoded(self) -> tuple[list[str], list[int], list[Any]]:
        """The operators' arguments result_dtypes, result_ranks and result_sizes."""
        return self.dtypes, [len(shape) for shape in self.shapes], [size for shape in self.shapes for size in shape]

    def pack(self, results: Sequence[torch.Tensor]) -> Any:
        """``results`` in the container that the caller used."""
        return results[0] if self._container is None else self._container(results)


class UserCall:
    """A call of a user's kernel before its arguments: what kernel_call and triton_call of xla_gpu.torch return."""

    # The operators below, functional and mutating, and their arguments between the operands and the numbers.
    _functional: Any
    _mutating: Any
    _leading: tuple[Any, ...]

    def __init__(
        self, where: str, result_shape_dtypes: Any, input_output_aliases: Mapping[int, int] | None, in_place: bool
    ) -> None:
        self._where, self._in_place = where, in_place
        self._results = Results(where, result_shape_dtypes)
        check_alias_types(where, input_output_aliases)
        self._aliases = dict(input_output_aliases or {})
        if in_place and not self._aliases:
            raise ValueError(f"{where}: input_output_aliases: expected the operands to update, got none")
        self._direct: dict[Any, Direct] = {}

    def _encode(self, arguments: Sequence[Any], results: Sequence[int]) -> Arguments:
        """The arguments as lists of numbers."""
        raise NotImplementedError

    def _bind(self, encoded: Arguments) -> Direct:
        """The custom call for eager tensors."""
        raise NotImplementedError

    def _prepare(self, encoded: Arguments) -> None:
        """What must happen before a call that is not traced."""

    def __call__(self, *arguments: Any) -> Any:
        """Launches the kernel."""
        key = None if torch.compiler.is_compiling() else _direct_key(arguments)
        if key is not None:
            known = self._direct.get(key)
            if known is not None and known.is_current():
                return self._run_directly(known.call, [x for x in arguments if isinstance(x, torch.Tensor)])
        aliased = list(self._aliases.values())
        results = [i for i in range(len(self._results.shapes)) if i not in aliased]
        encoded = self._encode(arguments, results)
        if not encoded.arrays:
            raise ValueError(f"{self._where}: expected at least one tensor, whose device says where to run, got none")
        if not torch.compiler.is_compiling():
            self._prepare(encoded)
        if key is not None:
            if len(self._direct) >= _MAX_DIRECT:
                self._direct.clear()
            self._direct[key] = known = self._bind(encoded)
            return self._run_directly(known.call, encoded.arrays)
        return call(
            (encoded.encoded, encoded.floats),
            encoded.arrays,
            self._results,
            self._aliases,
            self._in_place,
            self._functional,
            self._mutating,
            self._leading,
        )

    def _run_directly(self, bound: OpCall, operands: list[torch.Tensor]) -> Any:
        """Runs a bound call on eager tensors, without PyTorch's dispatcher and what it asks of each argument."""
        out = list(run(bound, operands, self._in_place)[: len(self._results.shapes)])
        if self._in_place:
            for operand, result in self._aliases.items():
                out[result] = target = operands[operand]
                if not target.is_inference():  # those have no version counter
                    torch.autograd.graph.increment_version(target)
        return self._results.pack(out)


class Direct(NamedTuple):
    """A bound call for arguments that were seen before."""

    call: OpCall
    is_current: Callable[[], bool]  # whether binding them again would give the same


_MAX_DIRECT = 256  # calls that each UserCall remembers


def _direct_key(arguments: Sequence[Any]) -> Any:
    """By what a call of eager tensors is known; None where tracing, gradients or a mode need PyTorch's dispatcher."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    gradients = torch.is_grad_enabled()
    key: list[Any] = [check_inputs_requested()]
    for value in arguments:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.device.type not in ("cuda", "cpu") or (gradients and value.requires_grad):
                return None
            key += (value.shape, value.dtype, value.device)
        elif kind is float:
            key.append(struct.pack("d", value))  # 0.0 is not -0.0
        elif isinstance(value, np.generic):
            key += (value.dtype, value.tobytes())
        elif kind in _PLAIN:
            key += (kind, value)
        else:
            return None
    return tuple(key)


_PLAIN = frozenset((int, bool, type(None), Result, Scratch))


def call(
    numbers: tuple[list[int], list[float]],
    operands: list[torch.Tensor],
    results: Results,
    aliases: dict[int, int],
    in_place: bool,
    functional: Any,
    mutating: Any,
    leading: tuple[Any, ...],
) -> Any:
    """Calls an operator of the schema above, or its mutating form, and packs what it returns.

    In place, ``aliases`` name operands that are to hold their results. On XLA that is the functional operator and a
    copy_ into a donated buffer, of which XLA makes an update in place; see dispatch.py.
    """
    described = results.encoded()
    flat = [index for pair in aliases.items() for index in pair]
    if not in_place:
        return results.pack(functional(operands, *leading, *numbers, *described, flat))
    if operands[0].device.type == "xla":
        for index in aliases:
            torch.ops.xla.dynamo_set_buffer_donor_(operands[index], True)
        out = list(functional(operands, *leading, *numbers, *described, flat))
        for index, result in aliases.items():
            out[result] = operands[index].copy_(out[result])
        return results.pack(out)
    own = iter(mutating(operands, [operands[i] for i in aliases], *leading, *numbers, *described, flat))
    updated = {result: operands[index] for index, result in aliases.items()}
    return results.pack([updated[i] if i in updated else next(own) for i in range(len(results.shapes))])


# ---- The operators ---------------------------------------------------------------------------------------------------


def specs(where: str, operands: Sequence[torch.Tensor]) -> tuple[ArraySpec, ...]:
    """The operands' shapes and dtypes."""
    return tuple(spec(f"{where}: operand {i}", operand) for i, operand in enumerate(operands))


def described_results(dtypes: Sequence[str], ranks: Sequence[int], sizes: Sequence[int]) -> tuple[ArraySpec, ...]:
    """The results from the arguments result_dtypes, result_ranks and result_sizes."""
    return tuple(ArraySpec(shape, dtype) for shape, dtype in zip(split(sizes, ranks), dtypes, strict=True))


def pairs(aliases: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The argument aliases as pairs of an operand and a result."""
    return tuple(zip(aliases[::2], aliases[1::2], strict=True))


def define_call(name: str, schema: str, bind: Any) -> None:
    """Defines torch.ops.xla_gpu.<name> and ._<name>_, which updates operands.

    ``bind(operands, *arguments)`` returns the custom call and the number of results that the caller gets. ``schema``
    has a place {updated} for the operands that the second form updates, and ends with the aliases.
    """

    def kernel(operands: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
        call, count = bind(operands, *rest)
        return list(run(call, operands)[:count])

    def fake(operands: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
        call, count = bind(operands, *rest)
        return list(fake_results(call, operands)[:count])

    def own(call: OpCall, count: int, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        aliased = {result for _, result in call.aliases}
        return [result for i, result in enumerate(results[:count]) if i not in aliased]

    def update(operands: list[torch.Tensor], updated: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
        call, count = bind(operands, *rest)
        # After functionalization the updated tensors are others than the operands of that place.
        given = list(operands)
        for (index, _), tensor in zip(call.aliases, updated, strict=True):
            given[index] = tensor
        if given[0].device.type == "xla":  # a graph that was traced with CUDA tensors (_torch_xla/compile_backend.py)
            results = list(run(call, given))
            for (_, result), tensor in zip(call.aliases, updated, strict=True):
                tensor.copy_(results[result])
            return own(call, count, results)
        results = own(call, count, run(call, given, in_place=True))
        for tensor in updated:
            if not tensor.is_inference():  # those have no version counter
                torch.autograd.graph.increment_version(tensor)
        return results

    def fake_update(operands: list[torch.Tensor], updated: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
        call, count = bind(operands, *rest)
        return own(call, count, fake_results(call, operands))

    def each_of_a_batch(info: Any, in_dims: Any, operands: list[torch.Tensor], *rest: Any) -> Any:
        """torch.vmap's rule: one launch after the other, as JAX's."""
        operator = getattr(torch.ops.xla_gpu, name)
        if info.batch_size == 0:
            raise ValueError(f"{name}: torch.vmap: expected a batch of 1 or more, got 0")
        outs = []
        for i in range(info.batch_size):
            batched = zip(operands, in_dims[0], strict=True)
            outs.append(operator([x if dim is None else x.select(dim, i) for x, dim in batched], *rest))
        stacked = [torch.stack(results) for results in zip(*outs, strict=True)]
        return stacked, [0] * len(stacked)

    def refuse_batch(*_: Any) -> Any:
        raise RuntimeError(f"{name}_ cannot run under torch.vmap, which would update a batch in place: use {name}")

    define(name, schema.format(updated=""), kernel, fake)
    torch.library.register_vmap(f"xla_gpu::{name}", each_of_a_batch, lib=LIBRARY)
    define(f"_{name}_", schema.format(updated="Tensor(a!)[] updated, "), update, fake_update)
    LIBRARY.impl(f"_{name}_", refuse_batch, "FuncTorchBatched")
