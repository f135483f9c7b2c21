"""torch.ops.xla_gpu.*: the operators as torch.library ones, for XLA, CPU, CUDA and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from .._core.operator import OpCall, Operator, check_inputs_requested
from .._torch_xla import lowering
from . import autocast, eager
from .tensors import (
    check_no_gradient,
    check_no_tangent,
    check_operands,
    requires_gradient,
    spec,
    torch_dtype,
)

LIBRARY = torch.library.Library("xla_gpu", "FRAGMENT")
BACKENDS = ("CPU", "CUDA", "XLA")

Results = tuple[torch.Tensor, ...]
# (overload, arguments by name) -> the overload's results with a gradient.
Differentiate = Callable[[Any, dict[str, Any]], Any]


def run(call: OpCall, tensors: Sequence[torch.Tensor], in_place: bool = False) -> Results:
    """Runs ``call`` on tensors of one device. Every operator and ffi_call end here."""
    device = check_operands(call.name, call.operand_names, tensors)
    if device.type == "xla":
        return lowering.run(call, tensors)
    return eager.run(call, tensors, in_place)


def fake_results(call: OpCall, tensors: Sequence[torch.Tensor]) -> Results:
    """Results without values, for fake and meta tensors."""
    device = check_operands(call.name, call.operand_names, tensors)
    results = []
    for i, result in enumerate(call.results):
        # The strides are those of eager calls, which compiled programs rely on. Tensors of torch_xla are row-major.
        permutation = None if device.type == "xla" else eager.permutation(call.result_layout(i))
        memory = eager.empty_memory(result.shape, torch_dtype(call.name, result.dtype), device, permutation)
        results.append(eager.array_in(memory, permutation))
    return tuple(results)


def bind(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[OpCall, list[torch.Tensor]]:
    """The custom call for the arguments of an operator's kernel, and its operands among them."""
    values = dict(zip(operator.arguments, args, strict=False), **kwargs)
    tensors = []
    for operand in operator.operands:
        tensor = values.get(operand)
        if tensor is not None:
            tensors.append(tensor)
            values[operand] = spec(f"{operator.name}: {operand}", tensor)
    return operator.bind(**values, check_inputs=check_inputs_requested()), tensors


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backends: Sequence[str] = BACKENDS,
    differentiable: Sequence[str] = (),
    differentiate: Differentiate | None = None,
) -> None:
    """Defines torch.ops.xla_gpu.<name> with one kernel for all ``backends``.

    ``differentiate`` is called instead where a gradient of one of the arguments ``differentiable`` is wanted.
    """
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for backend in backends:
        LIBRARY.impl(name, kernel, backend)
    LIBRARY.impl(name, _before_backends(name, schema, frozenset(differentiable), differentiate), "Autograd")
    if "(a!)" not in schema and "Tensor[] " not in schema:
        LIBRARY.impl(name, _each_of_a_batch(name), "FuncTorchBatched")
    torch.library.register_fake(f"xla_gpu::{name}", fake, lib=LIBRARY)


def _before_backends(
    name: str, schema: str, differentiable: frozenset[str], differentiate: Differentiate | None
) -> Callable[..., Any]:
    """The kernel that runs before those of backends, which do not always see what autograd marked.

    torch_xla and torch.func unwrap the tensors first, and a gradient of zero would be the silent result.
    """
    names = [argument.name for argument in torch._C.parse_schema(f"_{schema}").arguments]
    overload = getattr(torch.ops.xla_gpu, name).default
    public_name = name.strip("_")

    def before(*args: Any, **kwargs: Any) -> Any:
        wanted = False
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
                for tensor in value if isinstance(value, list) else (value,):
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    if argument in differentiable and tensor.itemsize > 1:  # of one byte: quantised
                        check_no_tangent(public_name, argument, tensor)
                        wanted = wanted or requires_gradient(tensor)
                    else:
                        check_no_gradient(public_name, argument, tensor)
        if wanted and differentiate is not None:
            return differentiate(overload, dict(zip(names, args, strict=False), **kwargs))
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return before


def _each_of_a_batch(name: str) -> Callable[..., Any]:
    """torch.vmap's rule: one call after the other, as JAX's. PyTorch's own takes no lists, and warns."""
    operator = getattr(torch.ops.xla_gpu, name).default
    functorch: Any = torch._C._functorch

    def batched(*args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level, size = interpreter.level(), interpreter.batch_size()
        if size == 0:
            raise ValueError(f"{name}: torch.vmap: expected a batch of 1 or more, got 0")

        def unwrapped(value: Any) -> tuple[Any, int | None]:
            return functorch._unwrap_batched(value, level) if isinstance(value, torch.Tensor) else (value, None)

        def element(value: tuple[Any, int | None], i: int) -> Any:
            array, dim = value
            return array if dim is None else array.select(dim, i)

        given, named = [unwrapped(value) for value in args], {n: unwrapped(value) for n, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)):
            outs = [
                operator(*(element(value, i) for value in given), **{n: element(v, i) for n, v in named.items()})
                for i in range(size)
            ]
            if isinstance(outs[0], torch.Tensor):
                return functorch._add_batch_dim(torch.stack(outs), 0, level)
            stacked = [torch.stack(results) for results in zip(*outs, strict=True)]
        return type(outs[0])(functorch._add_batch_dim(result, 0, level) for result in stacked)

    return batched


def define_operator(
    operator: Operator, run_call: Callable[..., Results] | None = None, differentiate: Differentiate | None = None
) -> None:
    """Defines an operator, and its in-place form if it declares one.

    ``run_call(call, tensors, arguments)``, if given, takes the place of ``run(call, tensors)``; where there is an
    in-place form it takes ``in_place``, too.
    """

    def results(args: Any, kwargs: Any, call: OpCall, tensors: list[torch.Tensor], **options: bool) -> Results:
        if run_call is None:
            return run(call, tensors, **options)
        return run_call(call, tensors, dict(zip(operator.arguments, args, strict=False), **kwargs), **options)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return returned(results(args, kwargs, *bind(operator, args, kwargs)))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return returned(fake_results(*bind(operator, args, kwargs)))

    # A schema with a varying number of results has them as a list.
    returned: Callable[[Results], Any] = list if operator.schema.endswith("-> Tensor[]") else unpacked

    differentiable = () if differentiate is None else operator.differentiable
    define(operator.name, operator.schema, kernel, fake, differentiable=differentiable, differentiate=differentiate)
    autocast.define(LIBRARY, operator)
    if operator.in_place is not None:
        _define_in_place(operator, operator.in_place, results)


def _define_in_place(operator: Operator, operand: str, results: Callable[..., Results]) -> None:
    """Defines torch.ops.xla_gpu.<operator>_, which updates ``operand`` and returns it, or the other result.

    torch.compile would clone the operand of a mutating operator on XLA, and the compiled program would copy it. So the
    operator that users call is a composite. On XLA it is the functional operator and a copy_ into a donated buffer, of
    which XLA makes an update in place. On CPU and CUDA tensors it is a mutating operator, which every other backend
    handles well.
    """
    name, index = operator.name, operator.arguments.index(operand)
    arguments, _, schema_results = operator.schema.partition(" -> ")
    arguments = arguments.replace(f"Tensor {operand}", f"Tensor(a!) {operand}")
    has_other = schema_results == "(Tensor, Tensor)"

    def update_memory(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        call, tensors = bind(operator, args, kwargs)
        target = tensors[call.aliases[0][0]]
        if target.device.type == "xla":  # a graph that was traced with CUDA tensors (_torch_xla/compile_backend.py)
            updated = results(args, kwargs, call, tensors)
            target.copy_(updated[call.aliases[0][1]])
            return updated[0] if has_other else None
        other, *_ = results(args, kwargs, call, tensors, in_place=True)
        if not target.is_inference():  # those have no version counter
            torch.autograd.graph.increment_version(target)
        return other if has_other else None

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        other, *_ = fake_results(*bind(operator, args, kwargs))
        return other if has_other else None

    returned = "Tensor" if has_other else "()"
    define(f"_{name}_", f"{arguments} -> {returned}", update_memory, fake)
    functional, mutating = getattr(torch.ops.xla_gpu, name), getattr(torch.ops.xla_gpu, f"_{name}_")

    def update(*args: Any, **kwargs: Any) -> torch.Tensor:
        target: torch.Tensor = args[index] if index < len(args) else kwargs[operand]
        if isinstance(target, torch.Tensor) and target.device.type == "xla":
            torch.ops.xla.dynamo_set_buffer_donor_(target, True)
            if not has_other:
                return target.copy_(functional(*args, **kwargs))
            other, updated = functional(*args, **kwargs)
            target.copy_(updated)
            return other
        if isinstance(target, torch.Tensor) and target.is_neg():  # PyTorch would update a copy, and fail behind it
            raise ValueError(
                f"{name}: {operand}: expected a tensor whose memory holds its values, since it is updated in place, "
                "got one that PyTorch negates when it is read, as .imag of a conjugate is; resolve_neg() copies it"
            )
        other = mutating(*args, **kwargs)
        return other if has_other else target

    returned = "Tensor" if has_other else "Tensor(a!)"
    LIBRARY.define(f"{name}_{arguments} -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(f"{name}_", update, "CompositeImplicitAutograd")

    def refuse_batch(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name}_ cannot run under torch.vmap, which would update a batch in place: use {name}")

    LIBRARY.impl(f"{name}_", refuse_batch, "FuncTorchBatched")


def unpacked(results: Results) -> Any:
    """As PyTorch has them: one result is no tuple."""
    return results[0] if len(results) == 1 else results
