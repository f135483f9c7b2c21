"""Which of the library's CUDA code a GPU runs."""

from __future__ import annotations

import re
from collections.abc import Sequence


def code_for(capability: str, architectures: Sequence[str]) -> str | None:
    """What a GPU runs of a library that was built for ``architectures``: "90a", "PTX of 120", or None.

    ``capability`` is as "9.0", an architecture as in CMAKE_CUDA_ARCHITECTURES. The driver takes the latest machine code
    of the GPU's major version that is not of a later minor one; with an `a`, of exactly the GPU's version. Where there
    is none it compiles the latest PTX that is not of a later version.
    """
    gpu = int(capability.replace(".", ""))
    code: list[tuple[int, str]] = []
    ptx: list[tuple[int, str]] = []
    for entry in architectures:
        match = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", entry)
        if match is None:
            continue
        number, name = int(match[1]), match[1] + match[2]
        if gpu != number if match[2] == "a" else gpu < number:
            continue
        if match[3] != "-virtual" and gpu // 10 == number // 10:
            code.append((number, name))
        if match[3] != "-real" and (match[2] != "f" or gpu // 10 == number // 10):
            ptx.append((number, f"PTX of {name}"))
    return max(code or ptx, default=(0, None))[1]
