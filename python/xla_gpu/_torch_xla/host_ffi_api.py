"""The XLA FFI API of torch_xla's CPU client, which torch_xla itself offers no way to reach.

``xla::ffi::GetXlaFfiApi()`` is compiled into the extension module _XLAC without being exported. Its address is in
the file's symbol table, which torch_xla's wheels keep.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from typing import NamedTuple

import numpy as np

from .._runtime.abi import api_version
from ..errors import CompatibilityError

_GET_API = b"_ZN3xla3ffi12GetXlaFfiApiEv"  # const XLA_FFI_Api* xla::ffi::GetXlaFfiApi()
# Exported by every extension module: its address in memory and in the file together give the load address.
_ANCHOR = "PyInit__XLAC"
_REMEDY = "Use the torch_xla wheel from the package index: pip install --force-reinstall --no-deps torch_xla==2.9.0"


@functools.cache
def ffi_api() -> int:
    """Address of the XLA_FFI_Api of torch_xla's CPU client.

    Raises:
      CompatibilityError: this build of torch_xla does not have it, or has it in another form.
    """
    import _XLAC

    path: str = _XLAC.__file__
    found = symbols(path, (_GET_API, _ANCHOR.encode()))
    module = ctypes.CDLL(path)  # loaded already: this only gives a handle
    load_address = ctypes.cast(getattr(module, _ANCHOR), ctypes.c_void_p).value or 0
    load_address -= found[_ANCHOR.encode()]
    address = ctypes.CFUNCTYPE(ctypes.c_void_p)(load_address + found[_GET_API])()
    if not address or api_version(address)[0] != 0:
        raise CompatibilityError(f"{path}: GetXlaFfiApi() returned no XLA FFI API of version 0.x. {_REMEDY}")
    return int(address)


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int
    entry_size: int


_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


def symbols(path: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """The values of symbols of an ELF file, from .symtab or .dynsym. Raises CompatibilityError for a missing one."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        try:
            sections = _sections(elf)
            found: dict[bytes, int] = {}
            for section in sections:
                if section.kind in (_SHT_SYMTAB, _SHT_DYNSYM):
                    strings = sections[section.link]
                    found |= _values(elf, section, strings, [name for name in names if name not in found])
        except (struct.error, ValueError, IndexError) as error:
            raise CompatibilityError(f"{path} cannot be read as a 64-bit little-endian ELF file: {error}") from error
    stripped = not any(section.kind == _SHT_SYMTAB for section in sections)
    for name in names:
        if name not in found:
            why = "its symbol table was stripped" if stripped else "its symbol table does not name it"
            raise CompatibilityError(
                f"{path}: the function {name.decode()} was not found ({why}). Handlers are registered with torch_xla's "
                f"CPU client through it. {_REMEDY}"
            )
    return found


def _sections(elf: mmap.mmap) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("wrong magic bytes")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count = struct.unpack_from("<HH", elf, 0x3A)
    if table == 0 or entry_size < 64:
        raise ValueError("it has no section headers")

    def section(index: int) -> _Section:
        _, kind, _, _, offset, size, link, _, _, row = struct.unpack_from(
            "<IIQQQQIIQQ", elf, table + index * entry_size
        )
        return _Section(kind, offset, size, link, row)

    count = count or section(0).size  # too many for the header's 16 bits: the first section holds the number
    return [section(i) for i in range(count)]


def _values(elf: mmap.mmap, table: _Section, strings: _Section, names: list[bytes]) -> dict[bytes, int]:
    if table.entry_size != _SYMBOL.itemsize or table.offset + table.size > len(elf):
        raise ValueError("its symbol table is cut off or of another form")
    rows = np.frombuffer(elf[table.offset : table.offset + table.size], _SYMBOL)
    found = {}
    for name in names:
        # Linkers store a name that ends another one inside it, so a name may begin anywhere.
        at = elf.find(name + b"\0", strings.offset, strings.offset + strings.size)
        while at >= 0:
            (hits,) = np.nonzero((rows["name"] == at - strings.offset) & (rows["section"] != 0))
            if len(hits):
                found[name] = int(rows["value"][hits[0]])
                break
            at = elf.find(name + b"\0", at + 1, strings.offset + strings.size)
    return found
