"""The definitions of the operators in torch.ops.xla_gpu, and what PyTorch needs beyond their declarations."""

from __future__ import annotations

from typing import Any

import torch

from .._core.operator import OpCall
from ..ops import OPERATORS, reshape_and_cache
from ..ops import _ragged_paged_attention as ragged_paged_attention
from ..ops.paged_attention import num_seqs_number
from . import reference
from .dispatch import LIBRARY, Binder, Results, define, define_operator, fake_results, run
from .tensors import check_operands

# ---- ragged_paged_attention: numbers where paged_attention takes tensors ---------------------------------------------


def _ragged(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    k_scale, v_scale = (ragged_paged_attention.number(name, arguments.get(name)) for name in ("k_scale", "v_scale"))
    if not arguments.get("use_kernel", True):
        check_operands(call.name, call.operand_names[: len(tensors)], tensors)
        out = reference.ragged_paged_attention(
            *tensors,
            sm_scale=arguments.get("sm_scale", 1.0),
            sliding_window=arguments.get("sliding_window"),
            soft_cap=arguments.get("soft_cap"),
            k_scale=k_scale,
            v_scale=v_scale,
        )
    elif ragged_paged_attention.has_float8_cache(call.operands[1]):  # the handler applies the scales
        device = tensors[0].device
        scales = [torch.full((1,), scale, dtype=torch.float32, device=device) for scale in (k_scale, v_scale)]
        (out,) = run(call, [*tensors, *scales])
    else:
        (out,) = run(call, tensors)  # k_scale is a factor of scale already
        if v_scale != 1.0:
            out = (out.float() * v_scale).to(out.dtype)
    return (out,)


for _operator in OPERATORS:
    define_operator(_operator)
define_operator(ragged_paged_attention.OPERATOR, _ragged)


# ---- reshape_and_cache_: in place ------------------------------------------------------------------------------------

_ARGUMENTS = reshape_and_cache.OPERATOR.schema.removesuffix(" -> Tensor").replace("Tensor kv", "Tensor(a!) kv")
_binder = Binder(reshape_and_cache.OPERATOR)


# torch.compile would clone the cache of a mutating operator on XLA, and the compiled program would copy it. So the
# operator that users call is a composite: on XLA it is the functional operator and a copy_ into a donated buffer, of
# which XLA makes an update in place; on CPU and CUDA tensors it is a mutating operator, which every other backend
# handles well.
def _update(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if kv_cache.device.type == "xla":
        torch.ops.xla.dynamo_set_buffer_donor_(kv_cache, True)
        return kv_cache.copy_(torch.ops.xla_gpu.reshape_and_cache(key, value, kv_cache, *args, **kwargs))
    torch.ops.xla_gpu._reshape_and_cache_(key, value, kv_cache, *args, **kwargs)
    return kv_cache


def _update_memory(*args: Any, **kwargs: Any) -> None:
    call, tensors = _binder.bind(_binder.arguments(args, kwargs), traced=False)
    run(call, tensors, in_place=True)
    kv_cache = tensors[call.aliases[0][0]]
    if not kv_cache.is_inference():  # those have no version counter
        torch.autograd.graph.increment_version(kv_cache)


def _update_fake(*args: Any, **kwargs: Any) -> None:
    fake_results(*_binder.bind(_binder.arguments(args, kwargs), traced=True))


LIBRARY.define(f"reshape_and_cache_{_ARGUMENTS} -> Tensor(a!)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("reshape_and_cache_", _update, "CompositeImplicitAutograd")
define("_reshape_and_cache_", f"{_ARGUMENTS} -> ()", _update_memory, _update_fake, backends=("CPU", "CUDA"))


# ---- num_seqs as a number --------------------------------------------------------------------------------------------


def num_seqs_tensor(name: str, num_seqs: torch.Tensor | int, context_lens: torch.Tensor) -> torch.Tensor:
    """``num_seqs`` as int32[1] on the device of ``context_lens``."""
    if isinstance(num_seqs, torch.Tensor) or not isinstance(context_lens, torch.Tensor):
        return num_seqs  # or whatever it is: the operator says what is wrong with context_lens
    number = num_seqs_number(name, num_seqs, context_lens.shape)
    device = context_lens.device
    if device.type == "xla" and not torch.compiler.is_compiling():
        # An upload: as a constant of the lazy graph every number would be compiled anew.
        return torch.tensor([number], dtype=torch.int32).to(device)
    # No upload here: it would wait for the device, and cannot be captured into a CUDA graph.
    return torch.full((1,), number, dtype=torch.int32, device=device)
