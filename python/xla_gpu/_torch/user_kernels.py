"""The functions of xla_gpu.torch for users' kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._core.docstrings import docstring
from .._user_kernels import docstrings as _docstrings
from .._user_kernels import triton_call as _triton_call
from .._user_kernels import tvm_ffi as _tvm_ffi
from .._user_kernels.cuda_kernel import CudaKernel, where
from .._user_kernels.launch import geometry
from .kernel_call import KernelCall
from .triton_call import TritonCall

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
    """Returns a function that launches a CUDA kernel on torch_xla tensors or on eager CUDA tensors.

    The caller's operands keep their values: where an aliased one is needed later, and for eager tensors, the kernel
    gets a copy of it. ``kernel_call_`` updates them in place.
    """
    shape = geometry(where(kernel), grid, block, cluster, shared, cooperative, pdl)
    return KernelCall(kernel, result_shape_dtypes, shape, input_output_aliases, in_place=False)


@docstring(_docstrings.KERNEL_CALL)
def kernel_call_(
    kernel: CudaKernel,
    result_shape_dtypes: Any,
    *,
    grid: _Triple,
    block: _Triple,
    shared: int = 0,
    cluster: _Triple = 1,
    cooperative: bool = False,
    pdl: bool = False,
    input_output_aliases: Mapping[int, int],
) -> KernelCall:
    """Returns kernel_call's function, which here updates the aliased operands in place and returns them as results.

    Eager tensors: the kernel writes into them, so they must be row-major, aligned to 16 bytes, and share no memory with
    the other operands. XLA tensors: their buffers are donated to the program, as reshape_and_cache_ does it.
    """
    shape = geometry(where(kernel), grid, block, cluster, shared, cooperative, pdl)
    return KernelCall(kernel, result_shape_dtypes, shape, input_output_aliases, in_place=True)


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
    """Returns a function that launches a Triton function on torch_xla tensors or on eager CUDA tensors.

    Call triton_call outside of a compiled function, and what it returned inside. The caller's operands keep their
    values: where an aliased one is needed later, and for eager tensors, the kernel gets a copy of it. ``triton_call_``
    updates them in place.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
    call = _triton_call.make_call(_triton_call.describe(fn), grid, options, constexprs, config)
    return TritonCall(call, result_shape_dtypes, input_output_aliases, in_place=False)


@docstring(_docstrings.TRITON_CALL)
def triton_call_(
    fn: Any,
    result_shape_dtypes: Any,
    *,
    grid: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    num_ctas: int = 1,
    input_output_aliases: Mapping[int, int],
    config: Any = None,
    **constexprs: Any,
) -> TritonCall:
    """Returns triton_call's function, which here updates the aliased operands in place and returns them as results.

    Operands are as those of ``kernel_call_``.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
    call = _triton_call.make_call(_triton_call.describe(fn), grid, options, constexprs, config)
    return TritonCall(call, result_shape_dtypes, input_output_aliases, in_place=True)


@docstring(_docstrings.REGISTER_TVM_FFI_TARGET)
def register_tvm_ffi_target(
    name: str,
    function: Any,
    *,
    platform: str = "CUDA",
    arguments: Sequence[str] = ("args", "rets"),
    allow_capture: bool = False,
) -> None:
    """Makes a tvm-ffi function a target of ``ffi_call``, for torch_xla and eager tensors."""
    _tvm_ffi.register(name, function, platform, arguments, allow_capture)
