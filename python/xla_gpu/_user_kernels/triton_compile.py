"""Triton's compiler without its launcher: signature and specialisation of a function, and the cubin that results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec
from . import cuda_kernel, launch
from .triton_arguments import ALIGNED, BOOL, FLOAT, NONE, NUMPY, OPERAND, RESULT, SCALARS, TYPES


class Compiled(NamedTuple):
    kernel: cuda_kernel.CudaKernel
    metadata: Any
    arguments: tuple[int, ...]  # as launch.make_call takes them


def compile_function(
    jit: Any,
    where: str,
    options: Mapping[str, Any],
    names: Sequence[str],
    constants: Mapping[str, Any],
    operands: Sequence[ArraySpec],
    encoded: Sequence[int],
    results: Sequence[ArraySpec],
) -> Compiled:
    """A ``@triton.jit`` function, compiled for this machine's GPU with these constants.

    Args:
      jit: the triton.JITFunction.
      where: how error texts begin.
      options: num_warps and others of Triton's compiler.
      names: parameters that ``encoded`` gives, in its order.
      constants: values of all others.
      operands: the arrays, in the order of ``encoded``.
      encoded: see triton_arguments.encode.
      results: the arrays that the function writes, alike.

    Raises:
      ValueError, TypeError: Triton does not compile it, or arguments do not fit.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(names, zip(encoded[::2], encoded[1::2], strict=True), strict=True))
    specialized = _specialized(jit, where, given, constants, operands, results)
    arch = cuda_kernel.default_arch()
    capability = int(re.sub(r"\D", "", arch))
    source = ASTSource(jit, specialized.signature, specialized.constexprs, specialized.attributes)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    except triton.TritonError as error:
        raise ValueError(
            f"{where}: Triton does not compile it for compute capability {capability}:\n{error}"
        ) from error
    metadata = compiled.metadata
    kernel = cuda_kernel.from_cubin(compiled.asm["cubin"], jit.fn.__name__, metadata.name, arch)
    return Compiled(kernel, metadata, tuple(specialized.arguments))


class _Specialized(NamedTuple):
    """What Triton compiles a function for, and what is left to pass to the kernel."""

    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    arguments: list[int]


def _specialized(
    jit: Any,
    where: str,
    given: Mapping[str, tuple[int, int]],
    constants: Mapping[str, Any],
    operands: Sequence[ArraySpec],
    results: Sequence[ArraySpec],
) -> _Specialized:
    """See compile_function; ``given``: kind and value of the parameters that are no constants."""
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    arguments: list[int] = []
    for i, parameter in enumerate(jit.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(i,)] = constants[name]
            continue
        kind, value = given[name]
        argument_where = f"{where}: {name}"
        type_, divisible, argument = _parameter(argument_where, parameter, kind, value, operands, results)
        if argument is None:
            signature[name] = "constexpr"
            constexprs[(i,)] = None if kind == NONE else 1
            continue
        signature[name] = type_
        if divisible:
            attributes[(i,)] = [["tt.divisibility", ALIGNED]]
        arguments += argument
    return _Specialized(signature, constexprs, attributes, arguments)


def _parameter(
    where: str, parameter: Any, kind: int, value: int, operands: Sequence[ArraySpec], results: Sequence[ArraySpec]
) -> tuple[str, bool, list[int] | None]:
    """A parameter's Triton type, whether it is divisible by 16, and its argument for the launch.

    None stands for an argument that Triton compiles in: None, and 1. These are Triton's rules (runtime/jit.py).
    """
    specialize = not parameter.do_not_specialize
    aligned = specialize and not parameter.do_not_specialize_on_alignment
    annotated = parameter.annotation_type or None
    if kind in (OPERAND, RESULT):
        specs, launched = (operands, launch.OPERAND) if kind == OPERAND else (results, launch.RESULT)
        if value >= len(specs):
            raise ValueError(f"{where}: expected a Result below {len(specs)}, got {value}")
        dtype = specs[value].dtype
        if dtype not in TYPES:
            raise TypeError(f"{where}: expected a dtype that Triton knows, got {dtype}")
        constant = "k" if parameter.is_const else ""
        # The launch checks the alignment that is claimed here.
        return (
            f"*{constant}{TYPES[dtype]}",
            aligned,
            [launched, value, ALIGNED if aligned else 0],
        )
    if kind == NONE:
        return "constexpr", False, None
    if kind == BOOL:
        return "u1", False, [launch.BITS, value, 1]
    if kind == FLOAT:
        type_ = annotated if annotated in ("fp16", "bf16", "fp32", "fp64") else "fp32"
        if type_ in ("fp16", "bf16"):
            raise TypeError(f"{where}: expected a NumPy or ml_dtypes scalar of {type_}, got a float")
        return type_, False, [launch.FLOAT, value, 8 if type_ == "fp64" else 4]
    if kind >= NUMPY:
        name = SCALARS[kind - NUMPY]
        is_integer = "int" in name
        divisible = aligned and is_integer and value % ALIGNED == 0
        type_ = "u1" if name == "bool" else TYPES[name]
        if annotated is not None and annotated != type_:
            raise TypeError(f"{where}: expected a number of type {annotated}, as it is annotated, got {name}")
        return type_, divisible, [launch.BITS, value, DTYPES[name].itemsize]
    if value == 1 and specialize and annotated is None:
        return "constexpr", False, None
    type_ = annotated or ("i32" if -(2**31) <= value < 2**31 else "i64")
    bits = re.fullmatch(r"[iu](\d+)", type_)
    if bits is None:
        raise TypeError(f"{where}: expected a number of type {type_}, as it is annotated, got an int")
    size = max(int(bits[1]) // 8, 1)
    if not -(2 ** (8 * size - 1)) <= value < 2 ** (8 * size):
        raise ValueError(f"{where}: expected an integer of type {type_}, as it is annotated, got {value}")
    return type_, aligned and value % ALIGNED == 0, [launch.BITS, value, size]
