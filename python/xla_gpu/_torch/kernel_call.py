"""kernel_call for tensors: users' CUDA kernels as torch.library operators, so that torch.compile sees through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._core.operator import ArraySpec, OpCall, check_inputs_requested
from .._user_kernels import launch
from .._user_kernels.cuda_kernel import CudaKernel
from .dispatch import define, fake_results, run
from .ffi_call import dtype_name, split
from .tensors import spec

_SCHEMA = (
    "(Tensor[] operands, {updated}str kernel, int[] launch, int[] arguments, float[] floats, str[] result_dtypes, "
    "int[] result_ranks, SymInt[] result_sizes, int[] aliases) -> Tensor[]"
)


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


class KernelCall:
    """What xla_gpu.torch.kernel_call returns."""

    def __init__(
        self,
        kernel: CudaKernel,
        result_shape_dtypes: Any,
        shape: launch.Geometry,
        input_output_aliases: Mapping[int, int] | None,
        in_place: bool,
    ) -> None:
        self._where = f"kernel_call: {kernel.name}"
        self._kernel, self._shape, self._in_place = kernel, shape, in_place
        self._results = Results(self._where, result_shape_dtypes)
        self._aliases = dict(input_output_aliases or {})
        if in_place and not self._aliases:
            raise ValueError(f"{self._where}: input_output_aliases: expected the operands to update, got none")

    def __call__(self, *arguments: Any) -> Any:
        """Launches the kernel."""
        aliased = list(self._aliases.values())
        results = [i for i in range(len(self._results.shapes)) if i not in aliased]
        encoded = launch.encode(self._where, self._kernel.parameters, arguments, results, is_tensor)
        if not encoded.arrays:
            raise ValueError(f"{self._where}: expected at least one tensor, whose device says where to run, got none")
        return call(
            (encoded.encoded, encoded.floats),
            encoded.arrays,
            self._results,
            self._aliases,
            self._in_place,
            torch.ops.xla_gpu.kernel_call,
            torch.ops.xla_gpu._kernel_call_,
            (self._kernel.key, self._shape.encoded()),
        )


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


def _bind(
    operands: Sequence[torch.Tensor],
    kernel: str,
    numbers: Sequence[int],
    arguments: Sequence[int],
    floats: Sequence[float],
    dtypes: Sequence[str],
    ranks: Sequence[int],
    sizes: Sequence[int],
    aliases: Sequence[int],
) -> tuple[OpCall, int]:
    results = described_results(dtypes, ranks, sizes)
    call = launch.bind(
        kernel,
        specs("kernel_call", operands),
        tuple(numbers),
        tuple(arguments),
        launch.double_bytes(floats),
        results,
        pairs(aliases),
        check_inputs_requested(),
    )
    return call, len(results)


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

    define(name, schema.format(updated=""), kernel, fake)
    define(f"_{name}_", schema.format(updated="Tensor(a!)[] updated, "), update, fake_update)


define_call("kernel_call", _SCHEMA, _bind)
