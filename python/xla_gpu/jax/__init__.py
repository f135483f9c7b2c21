"""The operators for JAX.

They take JAX and NumPy arrays. They work under jax.jit on CPUs and NVIDIA GPUs, inside jax.shard_map, and under
jax.vmap, which calls the kernel once per example. rms_norm, rotary_embedding, silu_and_mul, gelu_and_mul,
simple_add, linear and gated_mlp have gradients, in both modes; differentiating through another one raises ValueError.
An error of a kernel is raised where JAX first waits for a result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _jax  # noqa: F401 - first: it says which jax is needed

# isort: split
from .._jax.device_group import DeviceGroup
from .._jax.user_kernels import kernel_call, register_tvm_ffi_target, triton_call
from .._user_kernels.cuda_kernel import CudaKernel, cuda_kernel
from .._user_kernels.launch import Result, Scratch
from ._attention import (
    bidirectional_attention,
    concat_and_cache_mla,
    context_parallel_paged_attention,
    context_parallel_slots,
    merge_attention_states,
    mla_attention,
    mla_attention_with_lse,
    paged_attention,
    paged_attention_with_lse,
    ragged_paged_attention,
    ragged_paged_attention_v3,
    reshape_and_cache,
)
from ._collectives import all_reduce, all_reduce_add_rms_norm
from ._layers import (
    attention_block,
    experts_mlp,
    gated_mlp,
    gelu_and_mul,
    grouped_linear,
    linear,
    rms_norm,
    rotary_and_cache,
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
    "bidirectional_attention",
    "concat_and_cache_mla",
    "context_parallel_paged_attention",
    "context_parallel_slots",
    "cuda_kernel",
    "experts_mlp",
    "gated_mlp",
    "gelu_and_mul",
    "grouped_linear",
    "kernel_call",
    "linear",
    "merge_attention_states",
    "mla_attention",
    "mla_attention_with_lse",
    "paged_attention",
    "paged_attention_with_lse",
    "ragged_paged_attention",
    "ragged_paged_attention_v3",
    "register_tvm_ffi_target",
    "reshape_and_cache",
    "rms_norm",
    "rotary_and_cache",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "simple_add",
    "triton_call",
]


if not TYPE_CHECKING:  # to whose eyes every name would be here

    def __getattr__(name: str) -> object:
        text = f"module {__name__!r} has no attribute {name!r}"
        if name[:-1] in __all__ and name.endswith("_"):
            text += f": JAX's arrays do not change; donate the operand to jax.jit, and {name[:-1]} updates it in place"
        raise AttributeError(text)
