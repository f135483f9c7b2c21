"""StableHLO text of one custom call."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.attributes import Array, Attribute, Attributes, Scalar, Text
from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec, OpCall
from .._runtime.scratch import all_results


def module(call: OpCall) -> str:
    """A module whose main function is the custom call of ``call`` and nothing else."""
    operands, results = call.operands, all_results(call)
    names = [f"%{i}" for i in range(len(operands))]
    parameters = ", ".join(f"{name}: {_tensor(spec)}" for name, spec in zip(names, operands, strict=True))
    types = [_tensor(spec) for spec in results]
    one = len(types) == 1
    values = ["%r"] if one else [f"%r#{i}" for i in range(len(types))]
    returned = types[0] if one else f"({', '.join(types)})"
    clauses = [
        "api_version = 4 : i32",
        f"backend_config = {_dictionary(call.attributes)}",
        f"has_side_effect = {'true' if call.has_side_effect else 'false'}",
        f"operand_layouts = {_layouts([call.operand_layout(i) for i in range(len(operands))])}",
        f"result_layouts = {_layouts([call.result_layout(i) for i in range(len(results))])}",
    ]
    if call.aliases:
        aliases = (
            "#stablehlo.output_operand_alias<"
            f"output_tuple_indices = [{'' if one else result}], operand_index = {operand}, operand_tuple_indices = []>"
            for operand, result in call.aliases
        )
        clauses.append(f"output_operand_aliases = [{', '.join(aliases)}]")
    assignment = f"%r{'' if one else f':{len(types)}'} = " if types else ""
    return (
        f"module @{_quoted(call.target.encode())} {{\n"
        f"  func.func public @main({parameters}) -> ({', '.join(types)}) {{\n"
        f"    {assignment}stablehlo.custom_call @{_quoted(call.target.encode())}({', '.join(names)}) {{\n"
        f"      {', '.join(clauses)}\n"
        f"    }} : ({', '.join(map(_tensor, operands))}) -> {returned}\n"
        f"    return{' ' + ', '.join(values) + ' : ' + ', '.join(types) if types else ''}\n"
        f"  }}\n"
        f"}}\n"
    )


def _tensor(spec: ArraySpec) -> str:
    return f"tensor<{''.join(f'{size}x' for size in spec.shape)}{DTYPES[spec.dtype].mlir}>"


def _layouts(layouts: Sequence[tuple[int, ...]]) -> str:
    """In MLIR the order is minor to major, the reverse of ours."""
    texts = []
    for layout in layouts:
        axes = list(reversed(layout))
        texts.append(f"dense<{axes if axes else ''}> : tensor<{len(axes)}xindex>")
    return f"[{', '.join(texts)}]"


def _dictionary(attributes: Attributes) -> str:
    return f"{{{', '.join(f'{_quoted(name.encode())} = {_attribute(value)}' for name, value in attributes)}}}"


def _attribute(attribute: Attribute) -> str:
    if isinstance(attribute, Scalar):
        return _scalar(attribute.dtype, attribute.data)
    if isinstance(attribute, Array):
        return _dense(attribute)
    if isinstance(attribute, Text):
        return _quoted(attribute.data)
    return _dictionary(attribute.items)


def _scalar(dtype: str, data: bytes) -> str:
    if dtype == "bool":
        return "true" if data != b"\0" else "false"
    if "float" in dtype:  # the bits in hexadecimal: exact, infinities and NaNs included
        return f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}X} : {DTYPES[dtype].mlir}"
    return f"{int.from_bytes(data, 'little', signed=dtype.startswith('int'))} : {DTYPES[dtype].mlir}"


def _dense(array: Array) -> str:
    dtype = DTYPES[array.dtype]
    type_ = f"tensor<{''.join(f'{size}x' for size in array.shape)}{dtype.mlir}>"
    if not array.data:
        return f"dense<> : {type_}"
    if array.dtype == "bool":  # has no hexadecimal form of one byte an element
        return f"dense<{_nested(['true' if byte else 'false' for byte in array.data], array.shape)}> : {type_}"
    return f'dense<"0x{array.data.hex().upper()}"> : {type_}'


def _nested(elements: Sequence[str], shape: Sequence[int]) -> str:
    if not shape:
        return elements[0]
    step = len(elements) // shape[0]
    rows = (_nested(elements[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))
    return f"[{', '.join(rows)}]"


def _quoted(data: bytes) -> str:
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:02X}" for byte in data) + '"'
