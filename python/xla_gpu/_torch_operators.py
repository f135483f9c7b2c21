"""The definitions of the operators in torch.ops.xla_gpu, and what PyTorch needs beyond their declarations."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_reference
from ._signature import OpCall
from ._torch_ops import BACKENDS, LIBRARY, Binder, Results, define_operator, fake_results, run
from ._torch_tensors import check_operands
from .ops import OPERATORS, ragged_paged_attention, reshape_and_cache

# ---- ragged_paged_attention: numbers where paged_attention takes tensors -------------------------------------------------


def _ragged(call: OpCall, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> Results:
    k_scale, v_scale = (ragged_paged_attention.number(name, arguments.get(name)) for name in ("k_scale", "v_scale"))
    if not arguments.get("use_kernel", True):
        check_operands(call.name, call.operand_names, tensors)
        options = {name: arguments.get(name) for name in ("sliding_window", "soft_cap")}
        sm_scale = arguments.get("sm_scale", 1.0)
        return (
            _torch_reference.ragged_paged_attention(
                *tensors, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale, **options
            ),
        )
    if len(call.operands) > len(tensors):  # a float8 cache: the handler applies the scales
        device = tensors[0].device
        scales = [torch.full((1,), scale, dtype=torch.float32, device=device) for scale in (k_scale, v_scale)]
        return run(call, [*tensors, *scales])
    (out,) = run(call, tensors)  # k_scale is a factor of scale already
    return (out if v_scale == 1.0 else (out.float() * v_scale).to(out.dtype),)


for _operator in OPERATORS:
    define_operator(_operator, _ragged if _operator is ragged_paged_attention.OPERATOR else None)


# ---- reshape_and_cache_: in place ----------------------------------------------------------------------------------------

_ARGUMENTS = reshape_and_cache.OPERATOR.schema.removesuffix(" -> Tensor").replace("Tensor kv", "Tensor(a!) kv")
_binder = Binder(reshape_and_cache.OPERATOR)


# torch.compile would clone the cache of a mutating operator on XLA, and the compiled program would copy it. So the operator
# that users call is a composite: on XLA it is the functional operator and a copy_ into a donated buffer, of which
# XLA makes an update in place; on CPU and CUDA tensors it is a mutating operator, which every other backend handles well.
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
LIBRARY.define(f"_reshape_and_cache_{_ARGUMENTS} -> ()", tags=(torch.Tag.pt2_compliant_tag,))
for _backend in BACKENDS[:2]:
    LIBRARY.impl("_reshape_and_cache_", _update_memory, _backend)
torch.library.register_fake("xla_gpu::_reshape_and_cache_", _update_fake, lib=LIBRARY)
