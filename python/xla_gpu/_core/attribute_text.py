"""Attributes as strings, the only form in which every one of them passes through torch.compile and torch.export."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .attributes import Array, Attribute, Dictionary, Scalar, Text, attributes


def attribute_text(where: str, name: str, value: Any) -> str:
    """The attribute for ``value`` as a string. torch.compile traces through the first cases, and no further."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"int64:{int(value)}"
    if isinstance(value, float):
        return f"float64:{float(value)!r}"
    if isinstance(value, str):
        return "str:" + value
    ((_, attribute),) = attributes(where, {name: value})
    return _text(attribute)


_PLAIN: dict[str, Callable[[str], Any]] = {
    "true": lambda _: True,
    "false": lambda _: False,
    "int64": int,
    "float64": float,
    "str": str,
}


def parse_attribute(where: str, name: str, text: str) -> Attribute:
    """The attribute that ``attribute_text`` made into ``text``; ``where`` begins the error texts."""
    kind, _, payload = text.partition(":")
    if kind in _PLAIN:
        ((_, attribute),) = attributes(where, {name: _PLAIN[kind](payload)})
        return attribute
    fields: list[Any] = json.loads(payload)
    if kind == "bytes":
        return Text(bytes.fromhex(fields[0]))
    if kind == "dict":
        return Dictionary(tuple((member, parse_attribute(where, member, value)) for member, value in fields))
    if kind == "scalar":
        return Scalar(fields[0], bytes.fromhex(fields[1]))
    return Array(fields[0], tuple(fields[1]), bytes.fromhex(fields[2]))


def _text(attribute: Attribute) -> str:
    if isinstance(attribute, Scalar):
        return "scalar:" + json.dumps([attribute.dtype, attribute.data.hex()])
    if isinstance(attribute, Array):
        return "array:" + json.dumps([attribute.dtype, attribute.shape, attribute.data.hex()])
    if isinstance(attribute, Text):
        return "bytes:" + json.dumps([attribute.data.hex()])
    return "dict:" + json.dumps([[name, _text(value)] for name, value in attribute.items])
