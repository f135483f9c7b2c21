"""ragged_paged_attention: the signature of torch_xla's operator for TPUs, over paged_attention's custom call."""

from __future__ import annotations

import dataclasses

from .._core.checks import FLOAT8S, Checks
from .._core.operator import ArraySpec, IntOperand, Operator, Signature
from . import paged_attention

_DOCSTRING = """
It has the parameters of torch_xla's ``torch.ops.xla.ragged_paged_attention``, so that code written for TPUs moves
over by a change of namespace. paged_attention describes the arrays in full.

Args:
  q: T[num_tokens, num_heads, head_dim], query of paged_attention. T is float32, float16 or bfloat16.
  kv_pages: ``T[num_pages, page_size, 2 * num_kv_heads, head_dim]``, or of dtype float8_e4m3fn or float8_e5m2.
    kv_cache of paged_attention, in torch_xla's layout.
  kv_lens: int32[max_seqs], context_lens of paged_attention.
  page_indices: ``int32[max_seqs, pages_per_seq]``, block_tables of paged_attention.
  cu_q_lens: ``int32[max_seqs + 1]``, query_start_loc of paged_attention.
  num_seqs: int32[1], int32[] or a Python int.
  sm_scale: a Python number that multiplies ``q . k``.
  sliding_window: a query sees the last ``sliding_window`` keys up to its own position, itself included. None: all.
  soft_cap: from 2**-100 to 2**13. Scores become ``soft_cap * tanh(score / soft_cap)``. None: off.
  mask_value: accepted and ignored. Masked keys are left out exactly, which no finite number does.
  k_scale: a Python number; the kernels use ``K * k_scale``, whatever the dtype of kv_pages. None: 1.
  v_scale: as k_scale, for V.
  use_kernel: False runs a reference in the framework's own operations instead of the kernel, on any device.
  num_kv_pages_per_block: tuning of the TPU kernel, accepted and ignored.
  num_queries_per_block: accepted and ignored.
  vmem_limit_bytes: accepted and ignored.

Returns:
  T[num_tokens, num_heads, head_dim]. Padding rows are 0.

Raises:
  TypeError: an argument is no array or number of the kind expected, or has another dtype.
  ValueError: an argument has another shape, or a number is out of range.
"""

_check = Checks("ragged_paged_attention")

_NAMES = {
    "query": "q",
    "kv_cache": "kv_pages",
    "context_lens": "kv_lens",
    "block_tables": "page_indices",
    "query_start_loc": "cu_q_lens",
    "scale": "sm_scale",
}

ONE = ArraySpec((1,), "float32")


def number(argument: str, value: float | None) -> float:
    """k_scale or v_scale as the factor that it is."""
    return 1.0 if value is None else float(_check.float32(argument, value))


def _signature(
    q: ArraySpec,
    kv_pages: ArraySpec,
    kv_lens: ArraySpec,
    page_indices: ArraySpec,
    cu_q_lens: ArraySpec,
    num_seqs: ArraySpec,
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
    *,
    check_inputs: bool = False,
) -> Signature:
    _check.boolean("use_kernel", use_kernel)
    if mask_value is not None:
        _check.number("mask_value", mask_value)
    tuning = {"num_kv_pages_per_block": num_kv_pages_per_block, "num_queries_per_block": num_queries_per_block}
    for name, value in {**tuning, "vmem_limit_bytes": vmem_limit_bytes}.items():
        if value is not None:
            _check.integer(name, value, 0)
    if len(_check.array("kv_pages", kv_pages).shape) != 4:
        raise _check.value_error("kv_pages", "rank 4 [num_pages, page_size, 2 * num_kv_heads, head_dim]", kv_pages)
    scales: dict[str, ArraySpec] = {}
    k_factor, _ = number("k_scale", k_scale), number("v_scale", v_scale)
    if kv_pages.dtype in FLOAT8S:  # the scales are operands; otherwise factors of scale and of the result
        scales = {"k_scale": ONE, "v_scale": ONE}
        k_factor = 1.0
    signature = paged_attention.signature(
        Checks("ragged_paged_attention", _NAMES),
        False,
        *(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs),
        scale=float(_check.float32("sm_scale", sm_scale)) * k_factor,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        check_inputs=check_inputs,
        **scales,
    )
    return dataclasses.replace(signature, extra_operands=scales)


OPERATOR = Operator(
    "ragged_paged_attention",
    "(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor cu_q_lens, Tensor num_seqs, "
    "float sm_scale=1.0, int? sliding_window=None, float? soft_cap=None, float? mask_value=None, float? k_scale=None, "
    "float? v_scale=None, bool use_kernel=True, int? num_kv_pages_per_block=None, int? num_queries_per_block=None, "
    "int? vmem_limit_bytes=None) -> Tensor",
    _signature,
    _DOCSTRING,
    has_scratch=True,
    int_operands=(IntOperand("num_seqs", bounded_by="kv_lens"),),
    target=paged_attention.OPERATOR.target,
)
