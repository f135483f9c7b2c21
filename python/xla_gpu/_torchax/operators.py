"""torch.ops.xla_gpu.* for torchax tensors: each operator is the function of its name in xla_gpu.jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchax
import torchax.tensor
from torchax.ops import ops_registry
from torchax.view import View

from .. import jax as jax_front_end
from .. import torch as torch_front_end  # noqa: F401 - defines torch.ops.xla_gpu
from .._core.operator import Operator
from .._torch.tensors import check_no_tangent, requires_gradient
from ..ops import COMPOSITES, OPERATORS, ragged_paged_attention

Implementation = Callable[..., Any]

_FFI_CALLS = ("ffi_call", "ffi_call_with_side_effect")


def implementations() -> dict[Any, Implementation]:
    """What torchax calls instead of each operator packet in torch.ops.xla_gpu."""
    found: dict[Any, Implementation] = {}
    for operator in (*OPERATORS, *COMPOSITES, ragged_paged_attention.OPERATOR):
        if "group" in operator.arguments:  # of processes there, of a mesh's devices in JAX
            found[getattr(torch.ops.xla_gpu, operator.name)] = functools.partial(_refuse_group, operator)
            continue
        found[getattr(torch.ops.xla_gpu, operator.name)] = functools.partial(_functional, operator)
        if operator.in_place is not None:
            found[getattr(torch.ops.xla_gpu, f"{operator.name}_")] = functools.partial(_in_place, operator)
    for name in _FFI_CALLS:
        found[getattr(torch.ops.xla_gpu, name)] = _refuse_ffi_call
    return found


def register(environment: torchax.tensor.Environment | None = None) -> None:
    """Registers the operators for environments made later, and with ``environment``, which is there already."""
    for packet, implementation in implementations().items():
        if packet not in ops_registry.all_aten_ops:
            # is_view_op: views come as they are, which an update in place needs. Both flags say that the function
            # takes torchax's tensors rather than JAX's arrays.
            ops_registry.register_torch_dispatch_op(
                packet, implementation, is_jax_function=False, is_user_defined=True, is_view_op=True
            )
        if environment is not None:
            environment.override_op_definition(packet, implementation, is_view_op=True)


def _functional(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    arguments = _named(operator.name, operator, args, kwargs)
    environment = _check(operator.name, operator, arguments)
    if environment is None:
        return _below_torchax(operator.name, args, kwargs)
    return environment.j2t_iso(_call(operator, arguments))


def _in_place(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    name = f"{operator.name}_"
    arguments = _named(name, operator, args, kwargs)
    environment = _check(name, operator, arguments)
    if environment is None:
        return _below_torchax(name, args, kwargs)
    target = arguments.get(operator.in_place or "")
    if target is not None and not isinstance(target, torch.Tensor):
        raise TypeError(f"{operator.name}: {operator.in_place}: expected a tensor, got {type(target).__name__}")
    result = _call(operator, arguments)
    assert target is not None  # which the call has refused
    other, result = result if isinstance(result, tuple) else (None, result)
    if isinstance(target, View):
        target.update(result)
    else:
        target._elem = result
    return target if other is None else environment.j2t_iso(other)


def _named(name: str, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) > len(operator.arguments):
        raise TypeError(f"{name}: expected at most {len(operator.arguments)} arguments, got {len(args)}")
    return {**dict(zip(operator.arguments, args, strict=False)), **kwargs}


def _check(name: str, operator: Operator, arguments: dict[str, Any]) -> torchax.tensor.Environment | None:
    """The environment of the operands; None where no operand is torchax's.

    Raises:
      ValueError: only some operands are torchax's, or one wants a gradient.
    """
    tensors = {o: arguments[o] for o in operator.operands if isinstance(arguments.get(o), torch.Tensor)}
    ours = {operand: tensor for operand, tensor in tensors.items() if _is_torchax(tensor)}
    if not ours:
        return None
    first = next(iter(ours))
    for operand, tensor in tensors.items():
        if operand not in ours:
            raise ValueError(f"{name}: {operand}: expected a torchax tensor (as {first}), got one on {tensor.device}")
        if requires_gradient(tensor):
            raise ValueError(
                f"{name}: {operand}: expected a torchax tensor that does not require a gradient of PyTorch's; take "
                "it by torchax.interop.jax_value_and_grad, or call the operator under torch.no_grad()"
            )
        check_no_tangent(name, operand, tensor)
    environment: torchax.tensor.Environment = ours[first]._env
    return environment


def _call(operator: Operator, arguments: dict[str, Any]) -> Any:
    """The results of the function of xla_gpu.jax, which are JAX's arrays."""
    arrays = {
        name: value.jax() if name in operator.operands and isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    return getattr(jax_front_end, operator.name)(**arrays)


def _is_torchax(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torchax.tensor.Tensor | View)


def _below_torchax(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator on other tensors, which torchax passes on where they are keyword arguments."""
    with torchax.disable_temporarily():
        return getattr(torch.ops.xla_gpu, name)(*args, **kwargs)


def _refuse_group(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    if _check(operator.name, operator, _named(operator.name, operator, args, kwargs)) is None:
        return _below_torchax(operator.name, args, kwargs)
    raise TypeError(
        f"{operator.name}: x: expected a tensor on a CPU or CUDA device, got a torchax tensor; call "
        f"xla_gpu.jax.{operator.name} by torchax.interop.call_jax, inside torchax.interop.jax_shard_map"
    )


def _refuse_ffi_call(operands: Sequence[torch.Tensor], target: str, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        f"{target}: ffi_call: expected tensors on CPU, CUDA or XLA devices, got torchax tensors; call "
        "torchax.interop.call_jax(jax.ffi.ffi_call(...), ...), with the handler registered by jax.ffi"
    )
