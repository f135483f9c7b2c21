"""What a cubin says of itself: its kernels, the sizes of their parameters, and the GPU that it is for."""

from __future__ import annotations

import struct
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_MACHINE_CUDA = 190
_SYMBOL_TABLE = 2
_NO_BITS = 8  # a section without contents in the file
_FUNCTION = 2
_ENTRY = 0x10  # st_other of a kernel, which tells it from a function that kernels call
_ABI_WITH_WIDE_ARCHITECTURE = 8  # e_ident[8] from which on the architecture is the second byte of e_flags
_SIZED = 4  # an attribute of .nv.info followed by so many bytes
_PARAMETER = 0x17  # such an attribute: one parameter of the kernel


class Cubin(NamedTuple):
    """The kernels of a cubin, by their names in it, and "sm_90" for which it was compiled."""

    kernels: dict[str, tuple[int, ...] | None]  # bytes of each parameter; None where the cubin does not tell
    arch: str


def is_cubin(data: bytes) -> bool:
    """Whether ``data`` begins as a cubin does."""
    return data[:6] == _MAGIC and len(data) >= 20 and struct.unpack_from("<H", data, 18)[0] == _MACHINE_CUDA


def read(data: bytes) -> Cubin:
    """The contents of a cubin. Raises ValueError for a file that is cut short or none."""
    if not is_cubin(data):
        raise ValueError(f"expected a cubin, which is an ELF file for CUDA, got {len(data)} bytes of something else")
    try:
        return _read(data)
    except (struct.error, IndexError, OverflowError, ValueError):
        raise ValueError(f"expected a whole cubin, got one that is damaged or cut short to {len(data)} bytes") from None


def _read(data: bytes) -> Cubin:
    (flags,) = struct.unpack_from("<I", data, 48)
    arch = flags >> 8 & 0xFF if data[8] >= _ABI_WITH_WIDE_ARCHITECTURE else flags & 0xFF
    (start,) = struct.unpack_from("<Q", data, 40)
    entry, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * entry) for i in range(count)]
    (segments,) = struct.unpack_from("<Q", data, 32)
    segment_size, segment_count = struct.unpack_from("<HH", data, 54)
    ends = [header[4] + header[5] for header in headers if header[1] != _NO_BITS]
    if max(segments + segment_size * segment_count, *ends) > len(data):
        raise ValueError

    def contents(index: int) -> bytes:
        _, _, _, _, offset, size, *_ = headers[index]
        return data[offset : offset + size]

    def text(strings: bytes, offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode()

    section_names = contents(names_index)
    sections = {text(section_names, header[0]): i for i, header in enumerate(headers)}
    kernels: dict[str, tuple[int, ...] | None] = {}
    for i, header in enumerate(headers):
        if header[1] != _SYMBOL_TABLE:
            continue
        strings = contents(header[6])
        for name, info, other, section, _, _ in struct.iter_unpack("<IBBHQQ", contents(i)):
            if info & 0xF == _FUNCTION and other & _ENTRY and section != 0:
                kernel = text(strings, name)
                described = sections.get(f".nv.info.{kernel}")
                kernels[kernel] = None if described is None else _parameters(contents(described))
    return Cubin(kernels, f"sm_{arch}")


def _parameters(info: bytes) -> tuple[int, ...] | None:
    """The sizes in a section .nv.info of a kernel; None where it has another form than the known one."""
    sizes, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _PARAMETER:
            if size != 12:
                return None
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
            sizes[ordinal] = packed >> 18
        at += size
    if sorted(sizes) != list(range(len(sizes))):
        return None
    return tuple(sizes[i] for i in range(len(sizes)))
