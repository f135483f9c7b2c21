"""The gradients of the operators that declare some, in PyTorch's own operations and in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from .._core.operator import Operator
from . import by_parts, dense_linear
from .dispatch import bind

Tensors = dict[str, torch.Tensor]
Grads = Sequence[torch.Tensor | None]  # of the results; None where nothing depends on one


class _Gradient(NamedTuple):
    # (what saved names, and the numbers; the results' gradients; the operands whose gradients are wanted) -> theirs
    backward: Callable[[Mapping[str, Any], Grads, frozenset[str]], Tensors]
    # (all arguments, the operands whose gradients are wanted) -> the arguments, and results as "result 1", for backward
    saved: Callable[[Mapping[str, Any], frozenset[str]], tuple[str, ...]]


def call(operator: Operator, overload: Any, arguments: Mapping[str, Any]) -> Any:
    """The results of ``overload`` with a gradient; arguments by name, those left out are defaults."""
    if operator.name in COMPOSITES:
        bind(operator, (), dict(arguments))  # so that errors name this operator, not those that it is made of
        return COMPOSITES[operator.name](arguments)
    # Not Function.apply, which would hand the call to torch.func's transformations: this is the kernel of one of them.
    apply = super(torch.autograd.Function, _Differentiable).apply
    with enable_single_level_autograd_function():
        results = apply(operator.name, overload, tuple(arguments), *arguments.values())
    if operator.schema.endswith("-> Tensor[]"):
        return list(results)
    return results[0] if len(results) == 1 else results


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """An operator's kernel, and its gradient."""

    @staticmethod
    def forward(name: str, overload: Any, names: tuple[str, ...], *values: Any) -> tuple[torch.Tensor, ...]:
        del name
        # A Function's forward has no gradients, but the transformations of torch.func around this one may want theirs.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            results = overload(**dict(zip(names, values, strict=True)))
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.name, _, ctx.names, *values = inputs
        given = dict(zip(ctx.names, values, strict=True)) | {f"result {i}": tensor for i, tensor in enumerate(output)}
        ctx.options = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        names = GRADIENTS[ctx.name].saved(given, _wanted(ctx))
        ctx.saved = [name for name in names if given.get(name) is not None]
        ctx.save_for_backward(*(given[name] for name in ctx.saved))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted, found = _wanted(ctx), {}
        if any(grad is not None for grad in grads):
            given = ctx.options | dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
            found = GRADIENTS[ctx.name].backward(given, grads, wanted)
        return (None, None, None, *(found.get(name) if name in wanted else None for name in ctx.names))


def _wanted(ctx: Any) -> frozenset[str]:
    return frozenset(name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed)


def _simple_add(_: Mapping[str, Any], grads: Grads, __: frozenset[str]) -> Tensors:
    (grad,) = grads
    assert grad is not None
    return {"a": grad, "b": grad}


def _activated(function: str, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of function(gate) * up to both, which stand side by side; all in float32."""
    gate, up = gate_up.chunk(2, -1)
    if function == "silu_and_mul":
        part = torch.sigmoid(gate)  # aten.silu_backward has no derivative
        active = gate * part
        of_gate = grad * up * part * (1 + gate * (1 - part))  # 1 - part is 0 where gate is large
    else:
        active = torch.nn.functional.gelu(gate, approximate="tanh")
        of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return torch.cat([of_gate, grad * active], -1)


def _gated(function: str) -> _Gradient:
    def backward(given: Mapping[str, Any], grads: Grads, _: frozenset[str]) -> Tensors:
        (grad,), x = grads, given["x"]
        assert grad is not None
        return {"x": _activated(function, x.float(), grad.float()).to(x.dtype)}

    return _Gradient(backward, lambda *_: ("x",))


def _rms_norm(given: Mapping[str, Any], grads: Grads, wanted: frozenset[str]) -> Tensors:
    grad, grad_sum = (*grads, None)[:2]
    weight, total = given["weight"], given["result 1"] if "result 1" in given else given["x"]
    found: Tensors = {}
    of_sum = None if grad_sum is None else grad_sum.float()
    if grad is not None:
        x, grad = total.float(), grad.float()
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + given["eps"])
        normed = x * inverse
        if "weight" in wanted:
            found["weight"] = (grad * normed).sum_to_size(weight.shape).to(weight.dtype)
        grad = grad * (weight.float() + given.get("weight_offset", 0.0))
        grad = inverse * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        of_sum = grad if of_sum is None else of_sum + grad
    if of_sum is not None:
        found["x"] = found["residual"] = of_sum.to(total.dtype)
    return found


def _rotary_embedding(given: Mapping[str, Any], grads: Grads, wanted: frozenset[str]) -> Tensors:
    positions, table, interleaved = given["positions"].long(), given["table"], given.get("interleaved", False)
    half = table.shape[1]
    cos, sin = table[positions][:, None].unbind(-1)

    def pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first and the second of each pair of a head, and what passes."""
        turned, passed = x.float().split([2 * half, x.shape[-1] - 2 * half], -1)
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.split(half, -1)
        return first, second, passed

    found = {"table": torch.zeros_like(table)} if "table" in wanted else {}
    for name, grad in zip(("query", "key"), grads, strict=True):
        if grad is None:
            continue
        first, second, passed = pairs(grad)
        back = (first * cos + second * sin, second * cos - first * sin)
        turned = torch.stack(back, -1).flatten(-2) if interleaved else torch.cat(back, -1)
        found[name] = torch.cat([turned, passed], -1).to(grad.dtype)
        if "table" in wanted:
            x, y, _ = pairs(given[name])
            of_token = torch.stack([first * x + second * y, second * x - first * y], -1).sum(1)
            found["table"] = found["table"].index_add(0, positions, of_token)
    return found


def _saved_rotary(_: Mapping[str, Any], wanted: frozenset[str]) -> tuple[str, ...]:
    return ("positions", "table", *(("query", "key") if "table" in wanted else ()))


def _linear(given: Mapping[str, Any], grads: Grads, wanted: frozenset[str]) -> Tensors:
    (grad,), activation = grads, given.get("activation")
    assert grad is not None
    dtype = grad.dtype
    found = {"residual": grad}
    if wanted <= {"residual"}:
        return found
    if activation is not None:
        product = {name: given[name] for name in _OF_LINEAR if given.get(name) is not None}
        gate_up = dense_linear.linear(product, None).float()
        grad = _activated(activation, gate_up, grad.float()).to(dtype)
    if "bias" in wanted:
        found["bias"] = grad.float().sum(0).to(dtype)
    if "weight" in wanted:
        found["weight"] = grad.t() @ given["x"]
    if "x" in wanted:
        scale, zero_point = given.get("weight_scale"), given.get("weight_zero_point")
        weight, row_scale = dense_linear.dequantized(dtype, given["weight"], scale, zero_point)
        found["x"] = (grad if row_scale is None else (grad.float() * row_scale).to(dtype)) @ weight
    return found


def _saved_linear(given: Mapping[str, Any], wanted: frozenset[str]) -> tuple[str, ...]:
    """What a layer without an activation, frozen or not, needs of its operands; with one, the product once more."""
    if given.get("activation") is not None and not wanted <= {"residual"}:
        return _OF_LINEAR
    return (*(("x",) if "weight" in wanted else ()), *(_WEIGHT if "x" in wanted else ()))


_WEIGHT = ("weight", "weight_scale", "weight_zero_point")
_OF_LINEAR = ("x", *_WEIGHT, "bias")

GRADIENTS = {
    "simple_add": _Gradient(_simple_add, lambda *_: ()),
    "silu_and_mul": _gated("silu_and_mul"),
    "gelu_and_mul": _gated("gelu_and_mul"),
    "rms_norm": _Gradient(_rms_norm, lambda given, _: ("weight", "x" if given.get("residual") is None else "result 1")),
    "rotary_embedding": _Gradient(_rotary_embedding, _saved_rotary),
    "linear": _Gradient(_linear, _saved_linear),
}
# Those that are made of others, one after the other, where a gradient is wanted.
COMPOSITES: dict[str, Callable[[Mapping[str, Any]], Any]] = {"gated_mlp": by_parts.differentiable_gated_mlp}
