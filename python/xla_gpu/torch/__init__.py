"""The operators for PyTorch: torch_xla tensors (lazy and under torch.compile), and eager CPU and CUDA tensors.

Importing this module defines the operators ``torch.ops.xla_gpu.*``. The functions here call them, carry their
documentation, and take num_seqs as a Python int too. All of them share these rules:

* All operands are on one device. While gradients are recorded, operands that require one are those of rms_norm,
  rotary_embedding, silu_and_mul, gelu_and_mul, simple_add, linear and gated_mlp, which have gradients of all operands
  but the scales of weights. Otherwise ValueError.
* Eager tensors are used without a copy, on PyTorch's current stream. Operands that are not row-major, or not aligned to
  16 bytes, are copied first. An operand that is updated in place must be both; otherwise ValueError.
* Errors of the kernels: for eager tensors the call raises them, as ValueError for values that the operator excludes and
  as ``xla_gpu.errors.HandlerError`` for everything else. For XLA tensors they are a RuntimeError, raised where the
  result is first waited for; torch_xla raises the same error once more at the next step, or in
  ``torch_xla.core.xla_model.wait_device_ops()``.
"""

from __future__ import annotations

from .. import _torch  # noqa: F401 - first: it says which torch is needed

# isort: split
from .._torch.user_kernels import (
    kernel_call,
    kernel_call_,
    register_tvm_ffi_target,
    triton_call,
    triton_call_,
)
from .._torch_xla import compile_backend
from .._torch_xla.device_group import DeviceGroup
from .._torch_xla.functions import openxla, register_targets, to_cuda, to_xla
from .._user_kernels.cuda_kernel import CudaKernel, cuda_kernel
from .._user_kernels.launch import Result, Scratch
from ._attention import (
    bidirectional_attention,
    concat_and_cache_mla,
    concat_and_cache_mla_,
    merge_attention_states,
    mla_attention,
    mla_attention_with_lse,
    paged_attention,
    paged_attention_with_lse,
    ragged_paged_attention,
    reshape_and_cache,
    reshape_and_cache_,
)
from ._collectives import all_reduce, all_reduce_add_rms_norm
from ._compile_options import compile_options
from ._ffi import ffi_call, register_ffi_target
from ._inspection import executable_cache_info, hlo
from ._jit import jit
from ._layers import (
    attention_block,
    attention_block_,
    experts_mlp,
    gated_mlp,
    gelu_and_mul,
    grouped_linear,
    linear,
    rms_norm,
    rotary_and_cache,
    rotary_and_cache_,
    rotary_embedding,
    sample,
    silu_and_mul,
    simple_add,
)

__all__ = [
    "CudaKernel",
    "DeviceGroup",
    "Result",
    "Scratch",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "attention_block",
    "attention_block_",
    "bidirectional_attention",
    "compile_options",
    "concat_and_cache_mla",
    "concat_and_cache_mla_",
    "cuda_kernel",
    "executable_cache_info",
    "experts_mlp",
    "ffi_call",
    "gated_mlp",
    "gelu_and_mul",
    "grouped_linear",
    "hlo",
    "jit",
    "kernel_call",
    "kernel_call_",
    "linear",
    "merge_attention_states",
    "mla_attention",
    "mla_attention_with_lse",
    "openxla",
    "paged_attention",
    "paged_attention_with_lse",
    "ragged_paged_attention",
    "register_ffi_target",
    "register_targets",
    "register_tvm_ffi_target",
    "reshape_and_cache",
    "reshape_and_cache_",
    "rms_norm",
    "rotary_and_cache",
    "rotary_and_cache_",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "simple_add",
    "to_cuda",
    "to_xla",
    "triton_call",
    "triton_call_",
]

compile_backend.register()
