"""The functions of xla_gpu.jax for users' kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._core.docstrings import docstring
from .._runtime import targets
from .._user_kernels import docstrings as _docstrings
from .._user_kernels import triton_call as _triton_call
from .._user_kernels import tvm_ffi as _tvm_ffi
from .._user_kernels.cuda_kernel import CudaKernel, where
from .._user_kernels.launch import geometry
from .kernel_call import KernelCall, TritonCall

_Triple = int | Sequence[int]


@docstring(_docstrings.KERNEL_CALL)
def kernel_call(
    kernel: CudaKernel,
    result_shape_dtypes: Any,
    *,
    grid: _Triple,
    block: _Triple,
    shared: int = 0,
    cluster: _Triple = 1,
    cooperative: bool = False,
    pdl: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> KernelCall:
    """Returns a function that launches a CUDA kernel on JAX arrays, also under jax.jit.

    An aliased operand is updated without a copy where it is donated, or not needed any more.
    """
    shape = geometry(where(kernel), grid, block, cluster, shared, cooperative, pdl)
    return KernelCall(kernel, result_shape_dtypes, shape, input_output_aliases)


@docstring(_docstrings.TRITON_CALL)
def triton_call(
    fn: Any,
    result_shape_dtypes: Any,
    *,
    grid: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    num_ctas: int = 1,
    input_output_aliases: Mapping[int, int] | None = None,
    config: Any = None,
    **constexprs: Any,
) -> TritonCall:
    """Returns a function that launches a Triton function on JAX arrays, also under jax.jit.

    An aliased operand is updated without a copy where it is donated, or not needed any more.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
    call = _triton_call.make_call(_triton_call.describe(fn), grid, options, constexprs, config)
    return TritonCall(call, result_shape_dtypes, input_output_aliases)


@docstring(_docstrings.REGISTER_TVM_FFI_TARGET)
def register_tvm_ffi_target(
    name: str,
    function: Any,
    *,
    platform: str = "CUDA",
    arguments: Sequence[str] = ("args", "rets"),
    allow_capture: bool = False,
) -> None:
    """Makes a tvm-ffi function a target of ``jax.ffi.ffi_call``."""
    address = _tvm_ffi.register(name, function, platform, arguments, allow_capture)
    jax.ffi.register_ffi_target(name, targets.capsule(address), platform=platform)
