"""A cubin of one kernel "k" without machine code, made by hand: every table that a reader of cubins follows."""

from __future__ import annotations

import struct


def small_cubin() -> bytes:
    """The file: header, sections' contents, section headers."""
    section_names = b"\0.shstrtab\0.strtab\0.symtab\0.nv.info.k\0.text.k\0.rela.text.k\0.nv.callgraph\0.note\0"
    # type, contents, link, info, size of an entry
    parameter = struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 0, 0, 8 << 18)
    sections = {
        b".shstrtab": (3, section_names, 0, 0, 0),
        b".strtab": (3, b"\0k\0", 0, 0, 0),
        b".symtab": (2, bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0x10, 5, 0, 16), 2, 1, 24),
        b".nv.info.k": (0x70000000, parameter, 3, 5, 0),
        b".text.k": (1, bytes(16), 3, 1, 0),
        b".rela.text.k": (4, struct.pack("<QQq", 8, 1 << 32 | 2, 0), 3, 5, 24),
        b".nv.callgraph": (0x70000001, struct.pack("<IIII", 0, 0xFFFFFFFF, 0, 1), 3, 0, 8),
        b".note": (7, struct.pack("<III", 3, 4, 1) + b"NV\0\0" + bytes(4), 0, 0, 0),
    }
    contents = b""
    headers = [bytes(64)]
    for name, (kind, data, link, info, entry) in sections.items():
        at = section_names.index(b"\0" + name + b"\0") + 1
        # Allocated and executable; or the section whose number the information is.
        flags = 6 if kind == 1 else 0x40 if info and kind != 2 else 0
        headers.append(
            struct.pack("<IIQQQQIIQQ", at, kind, flags, 0, 64 + len(contents), len(data), link, info, 8, entry)
        )
        contents += data + bytes(-len(data) % 8)
    ident = b"\x7fELF\x02\x01\x01\x33\x07".ljust(16, b"\0")
    header = struct.pack(
        *("<16sHHIQQQIHHHHHH", ident, 2, 190, 1, 0, 0, 64 + len(contents), 0x5A055A),
        *(64, 0, 0, 64, len(headers), 1),
    )
    return header + contents + b"".join(headers)
