"""Calls of handlers without an XLA runtime: the library runs them over raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .._core.attributes import Array, Attribute, Attributes, Dictionary, Scalar, Text
from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec, OpCall
from ..errors import HandlerError
from . import abi, library
from .targets import Target


class Frame:
    """The arguments of one kind of call, laid out once; a run fills in the pointers. For one thread at a time."""

    def __init__(self, call: OpCall, target: Target, results: Sequence[ArraySpec]) -> None:
        self._name = call.name
        self._run = library.load().cdll.xla_gpu_call
        self._keep: list[object] = []  # what the structures point to
        self.operands = self._buffers(call.operands)
        self.results = self._buffers(results)
        attributes = self._attributes(call.attributes)
        self._code = ctypes.c_int32()
        self._args = abi.CallArgs(
            struct_size=ctypes.sizeof(abi.CallArgs),
            stages=target.stages(),
            operands=self.operands,
            num_operands=len(self.operands),
            results=self.results,
            num_results=len(self.results),
            attributes=attributes,
            num_attributes=len(attributes),
            device_ordinal=-1,
        )
        self._args_pointer = ctypes.pointer(self._args)
        self._code_pointer = ctypes.pointer(self._code)

    def run(self, operands: Sequence[int], results: Sequence[int], stream: int | None, device_ordinal: int) -> None:
        """Runs the handler. Addresses are in the order of the call's operands and results.

        Raises:
          ValueError: the handler returned InvalidArgument.
          HandlerError: it returned another error.
        """
        for buffer, address in zip(self.operands, operands, strict=True):
            buffer.data = address
        for buffer, address in zip(self.results, results, strict=True):
            buffer.data = address
        self._args.stream = stream
        self._args.device_ordinal = device_ordinal
        error = self._run(self._args_pointer, self._code_pointer)  # without the GIL
        if error is not None:
            text = error.decode(errors="replace")
            if not text.startswith(self._name):
                text = f"{self._name}: {text}"
            raise (ValueError if self._code.value == abi.ERROR_INVALID_ARGUMENT else HandlerError)(text)

    def _buffers(self, specs: Sequence[ArraySpec]) -> ctypes.Array[abi.Buffer]:
        buffers = (abi.Buffer * len(specs))()
        for buffer, spec in zip(buffers, specs, strict=True):
            dims = (ctypes.c_int64 * len(spec.shape))(*spec.shape)
            self._keep.append(dims)
            buffer.dims = dims
            buffer.rank = len(spec.shape)
            buffer.dtype = DTYPES[spec.dtype].code
        return buffers

    def _attributes(self, attributes: Attributes) -> ctypes.Array[abi.Attribute]:
        entries = (abi.Attribute * len(attributes))()
        for entry, (name, attribute) in zip(entries, attributes, strict=True):
            entry.name = name.encode()
            self._keep.append(entry.name)
            self._fill(entry, attribute)
        self._keep.append(entries)
        return entries

    def _fill(self, entry: abi.Attribute, attribute: Attribute) -> None:
        match attribute:
            case Scalar(dtype, data):
                entry.type, entry.dtype, entry.size = abi.ATTR_SCALAR, DTYPES[dtype].code, 1
            case Array(dtype, _, data):
                entry.type, entry.dtype = abi.ATTR_ARRAY, DTYPES[dtype].code
                entry.size = len(data) // DTYPES[dtype].itemsize
            case Text(data):
                entry.type, entry.size = abi.ATTR_STRING, len(data)
            case Dictionary(items):
                entry.type, entry.size = abi.ATTR_DICTIONARY, len(items)
                entry.data = ctypes.cast(self._attributes(items), ctypes.c_void_p)
                return
        # An aligned copy: handlers read scalars through typed pointers, and bytes objects promise no alignment.
        copy = (ctypes.c_uint64 * (len(data) // 8 + 1))()
        ctypes.memmove(copy, data, len(data))
        self._keep.append(copy)
        entry.data = ctypes.cast(copy, ctypes.c_void_p)
