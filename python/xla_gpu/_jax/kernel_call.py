"""kernel_call and triton_call for JAX: users' kernels as jax.ffi calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec, OpCall, check_inputs_requested
from .._user_kernels import launch, triton_call
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
        dtype = np.dtype(result.dtype).name
        if dtype not in DTYPES:
            raise TypeError(f"{where}: result {i}: expected a dtype that XLA knows, got {dtype}")
        found.append(ArraySpec(tuple(result.shape), dtype))
    container = (tuple if isinstance(result_shape_dtypes, tuple) else list) if several else lambda results: results[0]
    return tuple(found), container


class KernelCall:
    """What xla_gpu.jax.kernel_call returns."""

    def __init__(
        self,
        kernel: CudaKernel,
        result_shape_dtypes: Any,
        shape: launch.Geometry,
        input_output_aliases: Mapping[int, int] | None,
    ) -> None:
        self._kernel, self._shape = kernel, shape
        self._results, self._container = specs(f"kernel_call: {kernel.name}", result_shape_dtypes)
        self._aliases = tuple((input_output_aliases or {}).items())

    def __call__(self, *arguments: Any) -> Any:
        """Launches the kernel."""
        where = f"kernel_call: {self._kernel.name}"
        aliased = {result for _, result in self._aliases}
        results = [i for i in range(len(self._results)) if i not in aliased]
        encoded = launch.encode(where, self._kernel.parameters, arguments, results, is_array)
        arrays = [as_array(f"{where}: operand {i}", array) for i, array in enumerate(encoded.arrays)]
        call = launch.bind(
            self._kernel.key,
            tuple(ArraySpec(tuple(array.shape), array.dtype.name) for array in arrays),
            tuple(self._shape.encoded()),
            tuple(encoded.encoded),
            launch.double_bytes(encoded.floats),
            self._results,
            self._aliases,
            check_inputs_requested(),
        )
        return _results(call, arrays, len(self._results), self._container)


class TritonCall:
    """What xla_gpu.jax.triton_call returns."""

    def __init__(
        self,
        bound: triton_call.TritonCall,
        result_shape_dtypes: Any,
        input_output_aliases: Mapping[int, int] | None,
    ) -> None:
        self._bound = bound
        self._results, self._container = specs(bound.where, result_shape_dtypes)
        self._aliases = tuple((input_output_aliases or {}).items())

    def __call__(self, *arguments: Any) -> Any:
        """Launches the function."""
        where = self._bound.where
        aliased = {result for _, result in self._aliases}
        results = [i for i in range(len(self._results)) if i not in aliased]
        encoded = triton_call.encode(where, arguments, results, is_array)
        arrays = [as_array(f"{where}: operand {i}", array) for i, array in enumerate(encoded.arrays)]
        call = triton_call.bind(
            self._bound,
            tuple(ArraySpec(tuple(array.shape), array.dtype.name) for array in arrays),
            encoded.encoded,
            encoded.floats,
            self._results,
            self._aliases,
            check_inputs_requested(),
        )
        return _results(call, arrays, len(self._results), self._container)


def _results(call: OpCall, arrays: list[Any], count: int, container: Any) -> Any:
    """The results of a call, scratch memory left out."""
    outs = _run(call, arrays)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return container(list(outs[:count]))
