"""kernel_call and triton_call for JAX: users' kernels as jax.ffi calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec, OpCall, check_alias_types, check_inputs_requested, check_sizes
from .._user_kernels import launch, triton_arguments, triton_bind, triton_call
from .._user_kernels.cuda_kernel import CudaKernel
from .call import _run, as_array


def is_array(value: Any) -> bool:
    """Whether a kernel's argument is an operand, and no number."""
    return isinstance(value, jax.Array | np.ndarray)


def specs(where: str, result_shape_dtypes: Any) -> tuple[tuple[ArraySpec, ...], Any]:
    """The results that a caller described, and what makes a list of results into the same container."""
    several = isinstance(result_shape_dtypes, list | tuple)
    found = []
    for i, result in enumerate(result_shape_dtypes if several else [result_shape_dtypes]):
        if not hasattr(result, "shape") or not hasattr(result, "dtype"):
            raise TypeError(
                f"{where}: result {i}: expected an object with shape and dtype, got {type(result).__name__}"
            )
        check_sizes(where, i, result.shape)
        dtype = np.dtype(result.dtype).name
        if dtype not in DTYPES:
            raise TypeError(f"{where}: result {i}: expected a dtype that XLA knows, got {dtype}")
        found.append(ArraySpec(tuple(result.shape), dtype))
    container = (tuple if isinstance(result_shape_dtypes, tuple) else list) if several else lambda results: results[0]
    return tuple(found), container


def _kept(where: str, value: Any) -> Any:
    """The array. The kernel reads its memory, so JAX must not make it one of another dtype."""
    array = as_array(where, value)
    if array.dtype != value.dtype:
        raise TypeError(
            f"{where}: expected an array of a dtype that JAX keeps, got {value.dtype}, which becomes {array.dtype}: "
            "set jax_enable_x64, or convert it"
        )
    return array


class UserCall:
    """A call of a user's kernel before its arguments: what kernel_call and triton_call of xla_gpu.jax return."""

    def __init__(self, where: str, result_shape_dtypes: Any, input_output_aliases: Mapping[int, int] | None) -> None:
        self._where = where
        self._results, self._container = specs(where, result_shape_dtypes)
        check_alias_types(where, input_output_aliases)
        self._aliases = tuple((input_output_aliases or {}).items())

    def _encode(self, arguments: Sequence[Any], results: Sequence[int]) -> launch.Arguments:
        """The arguments as lists of numbers."""
        raise NotImplementedError

    def _bind(self, operands: tuple[ArraySpec, ...], encoded: launch.Arguments) -> OpCall:
        """The custom call."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> Any:
        """Launches the kernel."""
        aliased = {result for _, result in self._aliases}
        encoded = self._encode(arguments, [i for i in range(len(self._results)) if i not in aliased])
        arrays = [_kept(f"{self._where}: operand {i}", array) for i, array in enumerate(encoded.arrays)]
        operands = tuple(ArraySpec(tuple(array.shape), array.dtype.name) for array in arrays)
        outs = _run(self._bind(operands, encoded), arrays)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return self._container(list(outs[: len(self._results)]))  # scratch memory left out


class KernelCall(UserCall):
    """What xla_gpu.jax.kernel_call returns."""

    def __init__(
        self,
        kernel: CudaKernel,
        result_shape_dtypes: Any,
        shape: launch.Geometry,
        input_output_aliases: Mapping[int, int] | None,
    ) -> None:
        super().__init__(f"kernel_call: {kernel.name}", result_shape_dtypes, input_output_aliases)
        self._kernel, self._shape = kernel, tuple(shape.encoded())

    def _encode(self, arguments: Sequence[Any], results: Sequence[int]) -> launch.Arguments:
        return launch.encode(self._where, self._kernel.parameters, arguments, results, is_array)

    def _bind(self, operands: tuple[ArraySpec, ...], encoded: launch.Arguments) -> OpCall:
        numbers = (tuple(encoded.encoded), launch.double_bytes(encoded.floats))
        results = (self._results, self._aliases)
        return launch.bind(self._kernel.key, operands, self._shape, *numbers, *results, check_inputs_requested())


class TritonCall(UserCall):
    """What xla_gpu.jax.triton_call returns."""

    def __init__(
        self,
        bound: triton_call.TritonCall,
        result_shape_dtypes: Any,
        input_output_aliases: Mapping[int, int] | None,
    ) -> None:
        super().__init__(bound.where, result_shape_dtypes, input_output_aliases)
        self._bound = bound

    def _encode(self, arguments: Sequence[Any], results: Sequence[int]) -> launch.Arguments:
        return triton_arguments.encode(self._where, arguments, results, is_array)

    def _bind(self, operands: tuple[ArraySpec, ...], encoded: launch.Arguments) -> OpCall:
        numbers = (encoded.encoded, encoded.floats)
        return triton_bind.bind(self._bound, operands, *numbers, self._results, self._aliases, check_inputs_requested())
