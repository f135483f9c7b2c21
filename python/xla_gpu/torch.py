"""The operators for PyTorch: torch_xla tensors (lazy and under torch.compile), and eager CPU and CUDA tensors.

Importing this module defines the operators ``torch.ops.xla_gpu.*``. The functions here call them, carry their
documentation, and take num_seqs as a Python int too. All of them share these rules:

* All operands are on one device. No operand requires a gradient while gradients are recorded, since the operators have
  no gradients. Otherwise ValueError.
* Eager tensors are used without a copy, on PyTorch's current stream. Operands that are not row-major, or not aligned to
  16 bytes, are copied first. An operand that is updated in place must be both; otherwise ValueError.
* Errors of the kernels: for eager tensors the call raises them, as ValueError for values that the operator excludes and
  as ``xla_gpu.errors.HandlerError`` for everything else. For XLA tensors they are a RuntimeError, raised where the
  result is first waited for; torch_xla raises the same error once more at the next step, or in
  ``torch_xla.core.xla_model.wait_device_ops()``.
"""

# `function` gives these declarations their bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _torch  # noqa: F401 - first: it says which torch is needed

# isort: split
import torch

from ._core.docstrings import docstring
from ._runtime import executable_cache, targets
from ._runtime.executable_cache import ExecutableCacheInfo
from ._torch import process_group
from ._torch.ffi_call import FfiCall
from ._torch.functions import function
from ._torch.user_kernels import (
    kernel_call,
    kernel_call_,
    register_tvm_ffi_target,
    triton_call,
    triton_call_,
)
from ._torch_xla import compile_backend, lowering
from ._torch_xla.device_group import DeviceGroup
from ._torch_xla.functions import openxla, register_targets, to_cuda, to_xla
from ._user_kernels.cuda_kernel import CudaKernel, cuda_kernel
from ._user_kernels.launch import Result, Scratch
from .ops import all_reduce as _all_reduce
from .ops import attention_block as _attention_block
from .ops import gated_mlp as _gated_mlp
from .ops import linear as _linear
from .ops import merge_attention_states as _merge_attention_states
from .ops import paged_attention as _paged_attention
from .ops import ragged_paged_attention as _ragged_paged_attention
from .ops import reshape_and_cache as _reshape_and_cache
from .ops import rms_norm as _rms_norm
from .ops import rotary_embedding as _rotary_embedding
from .ops import sample as _sample
from .ops import silu_and_mul as _silu_and_mul
from .ops import simple_add as _simple_add

__all__ = [
    "CudaKernel",
    "DeviceGroup",
    "Result",
    "Scratch",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "attention_block",
    "attention_block_",
    "cuda_kernel",
    "executable_cache_info",
    "ffi_call",
    "gated_mlp",
    "gelu_and_mul",
    "hlo",
    "kernel_call",
    "kernel_call_",
    "linear",
    "merge_attention_states",
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

# ---- Operators -------------------------------------------------------------------------------------------------------


@function(_simple_add.OPERATOR)
def simple_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the element-wise sum a + b."""


@function(_paged_attention.OPERATOR)
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention of the new tokens of a ragged batch over a paged KV cache."""


@function(_paged_attention.OPERATOR_WITH_LSE)
def paged_attention_with_lse(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes paged_attention and the log-sum-exp of each row's scores."""


@function(_merge_attention_states.OPERATOR)
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention states into one."""


@function(_reshape_and_cache.OPERATOR)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a paged KV cache with new keys and values stored; ``reshape_and_cache_`` updates it in place."""


@function(_reshape_and_cache.OPERATOR, in_place=True)
def reshape_and_cache_(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores new keys and values into a paged KV cache in place, and returns that cache.

    The cache is not copied. Eager tensors: the kernel writes into it, so it must be row-major, aligned to 16 bytes, and
    share no memory with the other operands. XLA tensors, lazy and under torch.compile: its buffer is donated to the
    program, so pass a tensor of its own rather than a view into a larger one. A clone that torch_xla has not
    materialised yet shares the buffer and is lost with it: call ``torch_xla.sync()`` between clone() and a compiled
    function that updates the cache.
    """


@function(_ragged_paged_attention.OPERATOR)
def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor | int,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """Computes paged_attention, with the name and the parameters of torch_xla's operator for TPUs."""


@function(_linear.OPERATOR)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    weight_zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Computes the product of rows with a weight matrix, plain or quantised, with bias, activation and residual."""


@function(_gated_mlp.OPERATOR)
def gated_mlp(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    gate_up_zero_point: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    down_zero_point: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu_and_mul",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """Computes the gated MLP of a decoder layer: norm, gate and up, activation, down, residual."""


@function(_attention_block.OPERATOR)
def attention_block(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    out_weight: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    qkv_scale: torch.Tensor | None = None,
    qkv_zero_point: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_zero_point: torch.Tensor | None = None,
    out_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the attention of a decoder layer, from the norm before its projection to the residual behind it."""


@function(_attention_block.OPERATOR, in_place=True)
def attention_block_(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    out_weight: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    *,
    scale: float,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    qkv_scale: torch.Tensor | None = None,
    qkv_zero_point: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_zero_point: torch.Tensor | None = None,
    out_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """attention_block that stores keys and values in kv_cache, in place."""


@function(_rms_norm.OPERATOR)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the RMS norm of rows, after adding a residual if one is given."""


@function(_silu_and_mul.OPERATOR)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu of the first half of each row, times the second half."""


@function(_silu_and_mul.OPERATOR_GELU)
def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes gelu of the first half of each row, times the second half."""


@function(_sample.OPERATOR)
def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    step: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token from each row of logits, by temperature, min-p, top-k and top-p."""


@function(_rotary_embedding.OPERATOR)
def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns query and key heads by their positions, with cosines and sines from a table."""


@function(_rotary_embedding.OPERATOR_AND_CACHE)
def rotary_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    norm_eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the query of attention of a projection, and stores keys and values in a cache that it returns.

    ``rotary_and_cache_`` updates the cache in place.
    """


@function(_rotary_embedding.OPERATOR_AND_CACHE, in_place=True)
def rotary_and_cache_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    norm_eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """Makes the query of attention of a projection, and stores keys and values in a cache in place.

    What reshape_and_cache_ says of its cache holds here too.
    """


@docstring(_all_reduce.OPERATOR.docstring)
def all_reduce(x: torch.Tensor, *, group: torch.distributed.ProcessGroup | DeviceGroup | None = None) -> torch.Tensor:
    """The sum of x over the ranks of a process group of torch.distributed; None: the default group.

    Each rank is a process with one device, as torchrun starts them. At a group's first call all of its ranks open each
    other's GPU memory: the handles travel through torch.distributed's store. Where a GPU cannot reach a peer's memory
    it warns, and there and on the CPU torch.distributed gathers the parts, whatever its backend is.

    Under torch_xla's SPMD ``group`` is a DeviceGroup and x holds the parts of all ranks, T[ranks, ...], divided over
    its axis along the first dimension; the result is T[...], whole on every device.
    """
    return process_group.run(_all_reduce.OPERATOR, group, x)


@docstring(_all_reduce.OPERATOR_ADD_RMS_NORM.docstring)
def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    group: torch.distributed.ProcessGroup | DeviceGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """all_reduce over the ranks of a group, the residual added, and the RMS norm of that sum."""
    out, sum_ = process_group.run(_all_reduce.OPERATOR_ADD_RMS_NORM, group, x, residual, weight, eps=eps)
    return out, sum_


# ---- Third-party handlers --------------------------------------------------------------------------------------------


def register_ffi_target(name: str, fn: Any, platform: str = "cpu", api_version: int = 1) -> None:
    """Registers a typed XLA FFI handler as the target ``name``, for torch_xla and for eager tensors.

    It has the parameters of jax.ffi.register_ffi_target. torch_xla's runtime learns of the target when it is first
    called there.

    Args:
      name: the target's name, for ffi_call.
      fn: the handler: a PyCapsule, a ctypes function pointer, or a dict of these by stage ("instantiate", "prepare",
        "initialize", "execute").
      platform: "cpu" or "CUDA".
      api_version: 1, the typed FFI.

    Raises:
      xla_gpu.errors.TargetError: another function has this name on this platform; platform, api_version or a key of
        the dict is not one of those above; or, on "cpu", the handler was built with a newer FFI API than the
        runtimes accept.
      TypeError: name or fn is of another type.
    """
    targets.register(name, fn, platform, api_version)


def ffi_call(
    target_name: str,
    result_shape_dtypes: Any,
    *,
    has_side_effect: bool = False,
    input_layouts: Sequence[Sequence[int] | None] | None = None,
    output_layouts: Sequence[Sequence[int] | None] | Sequence[int] | None = None,
    input_output_aliases: dict[int, int] | None = None,
) -> FfiCall:
    """Returns a function that calls an FFI target on tensors, with the meaning of jax.ffi.ffi_call.

    ``ffi_call("my_target", x)(x, y, scale=np.float32(2), n=3)`` passes x and y as buffers, and scale and n as
    attributes. It takes XLA, eager CPU, eager CUDA, meta and fake tensors; torch.compile and torch.export trace through
    it.

    Attributes arrive in the handler with the types that jax.ffi gives them: a Python bool, int or float as bool,
    int64_t or double; a NumPy scalar with its own type; a NumPy array as a span of its elements; str and bytes as a
    string; a dict as a dictionary. torch.compile turns NumPy values into tensors, so bind them outside of the compiled
    function: ``f = ffi_call("my_target", x).bind(scale=np.float32(2))``, and call ``f(x, y)`` inside.

    Args:
      target_name: a name given to register_ffi_target.
      result_shape_dtypes: anything with ``shape`` and ``dtype``, such as a tensor on the meta device; or a sequence of
        these, one for each result.
      has_side_effect: XLA neither drops the call nor merges it with an equal one. Still use one of its results:
        torch_xla's lazy graph and torch.compile's Inductor drop a call whose results are unused before XLA sees it.
      input_layouts: for each operand None (row-major) or its axes, major to minor.
      output_layouts: for each result likewise; for a single result that is not in a sequence, its layout itself.
      input_output_aliases: operand index to result index. The handler gets one buffer for both. The caller's operand
        keeps its value: where it is needed later, and for eager tensors, the handler gets a copy of it.

    Returns:
      A function of tensors and attributes. It returns a tensor; or a tuple or list of tensors where result_shape_dtypes
        is a tuple or another sequence.

    Raises:
      xla_gpu.errors.TargetError: by the function returned: the target is not registered on the tensors' platform, or
        the runtime refuses it, for example because it was built with a newer FFI API.
      ValueError: operands, layouts, aliases or attributes do not fit together.
      TypeError: an argument or an attribute is of another type.
    """
    return FfiCall(
        target_name,
        result_shape_dtypes,
        has_side_effect=has_side_effect,
        input_layouts=input_layouts,
        output_layouts=output_layouts,
        input_output_aliases=input_output_aliases,
    )


# ---- Inspection ------------------------------------------------------------------------------------------------------


def hlo(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Returns the HLO text, before optimisation, of the pending lazy graph that computes these XLA tensors.

    Custom calls appear with target, typed attributes, layouts and aliases. Nothing is executed. After
    ``torch_xla.sync()`` a tensor is a parameter, and the text shows no more than that.

    Args:
      tensors: one XLA tensor or a sequence of them.

    Returns:
      The text of one HLO module.

    Raises:
      TypeError: an element is not a tensor on an XLA device.
    """
    sequence = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in sequence:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
            got = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"hlo: tensors: expected XLA tensors, got {got}")
    return lowering.hlo(sequence)


def executable_cache_info() -> ExecutableCacheInfo:
    """What torch_xla's programs on GPUs found in the cache of executables that XLA_GPU_EXECUTABLE_CACHE names.

    Returns:
      ``(loaded, compiled, stored, unusable)``: executables that came from a file, that XLA compiled, those of them that
      were written to a file, and files that were damaged or refused. All 0 where the variable is not set, and on the
      CPU, whose client is torch_xla's own.
    """
    return executable_cache.info()
