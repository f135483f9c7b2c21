"""Scratch memory: how many bytes a call needs is computed by the library, from shapes, dtypes and attributes."""

from __future__ import annotations

import ctypes

from .._core.operator import ArraySpec, OpCall
from ..errors import LibraryError
from . import library
from .call_frame import Frame
from .targets import Target


def all_results(call: OpCall) -> tuple[ArraySpec, ...]:
    """The results of the custom call: those of ``call``, then its scratch memory."""
    if not call.has_scratch:
        return call.results
    return (*call.results, ArraySpec((scratch_bytes(call),), "uint8"))


def scratch_bytes(call: OpCall) -> int:
    """Bytes of the scratch memory of ``call``, whose dimensions must be numbers.

    Raises:
      LibraryError: the library has no such target, or its target takes no scratch memory.
      ValueError: the library refuses the operands or the attributes.
    """
    loaded = library.load()
    functions = {handler.target: handler.scratch_bytes for handler in loaded.handlers()}
    function = functions.get(call.target)
    if not function:
        lacks = "no such target" if function is None else "no function for the size of its scratch memory"
        raise LibraryError(
            f"{call.name}: {loaded.path} has {lacks}: {call.target}. Build and install the package again."
        )
    size = ctypes.c_int64(-1)
    target = Target(call.target, "cpu", 0, 0, 0, function)
    # The function reads no operand. Null would be refused as an address that was forgotten.
    unread = ctypes.addressof(size)
    Frame(call, target, (ArraySpec((), "int64"),)).run(
        [unread] * len(call.operands), [ctypes.addressof(size)], stream=None, device_ordinal=-1
    )
    return size.value
