"""The kernels of a build: their machine code and what they need of an SM, read from the build's object files."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection

INSTRUCTION_BYTES = 16  # since sm_70
_LOCAL_MEMORY = (0x983, 0x387)  # LDL and STL, as nvdisasm reads code for sm_80 to sm_121


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of one object file, for one architecture."""

    name: str  # demangled
    architecture: str  # "sm_90a"
    source: str  # of the object file
    code: str  # a digest of its instructions, relocations and constants: equal where the GPU executes the same
    opcodes: Mapping[int, int]  # how many instructions have an opcode
    registers: int  # of a thread
    stack: int  # bytes of a thread
    shared: int  # static bytes of a CTA
    parameters: int  # bytes of constant bank 0

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def spills(self) -> int:
        """Instructions that load or store local memory: spills, and arrays that are indexed at run time."""
        return sum(self.opcodes.get(opcode, 0) for opcode in _LOCAL_MEMORY)


_TOOL_PACKAGES = {
    "cuobjdump": "the CUDA toolkit and the package nvidia-cuda-cuobjdump, which `make compare-machine-code` installs",
    "nvdisasm": "the CUDA toolkit and the package nvidia-cuda-nvdisasm",
    "c++filt": "binutils",
}


class ToolError(Exception):
    """A program that the comparison needs is missing or failed."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ToolError(f"{name} is not in PATH: it is part of {_TOOL_PACKAGES[name]}")
    return path


def _run(name: str, *arguments: str | Path, folder: str | None = None, text: str = "") -> str:
    command = [tool(name), *map(str, arguments)]
    outcome = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder)
    if outcome.returncode != 0:
        raise ToolError(f"{' '.join(command)}: exit status {outcome.returncode}\n{outcome.stderr.strip()}")
    return outcome.stdout


# ---- Reading a build -------------------------------------------------------------------------------------------------
def read_build(build: Path) -> list[Kernel]:
    """All kernels of the CUDA object files under ``build``.

    Object files and not the library: cuobjdump names what it extracts by the source file's name alone, and sources in
    different folders may have the same name.
    """
    objects = sorted(build.rglob("*.cu.o"))
    if not objects:
        raise ToolError(f"{build} has no *.cu.o file: it is no build folder with CUDA")
    kernels: list[Kernel] = []
    for path in objects:
        with tempfile.TemporaryDirectory() as folder:
            _run("cuobjdump", "-xelf", "all", path.resolve(), folder=folder)
            for cubin in sorted(Path(folder).iterdir()):
                kernels += read_cubin(cubin, path.relative_to(build).as_posix())
    return kernels


def read_cubin(cubin: Path, source: str) -> list[Kernel]:
    """The kernels of a cubin, which cuobjdump names <source>.<architecture>.cubin."""
    found = code_sections(cubin)
    usage = parse_usage(_run("cuobjdump", "-res-usage", cubin)) if found else {}
    names = demangle(found)
    return [
        Kernel(
            name=names[mangled],
            architecture=cubin.suffixes[-2][1:],
            source=source,
            code=digest,
            opcodes=opcodes,
            registers=usage[mangled]["REG"],
            stack=usage[mangled]["STACK"],
            shared=usage[mangled]["SHARED"],
            parameters=usage[mangled]["CONSTANT[0]"],
        )
        for mangled, (digest, opcodes) in found.items()
    ]


def code_sections(cubin: Path) -> dict[str, tuple[str, Mapping[int, int]]]:
    """Per mangled name: a digest of the code, and its opcodes. Debug sections and symbol names play no part."""
    kernels = {}
    with cubin.open("rb") as file:
        elf = ELFFile(file)
        relocations: dict[int, list[tuple[int, int, int]]] = {}
        constants: dict[str, bytes] = {}
        for section in elf.iter_sections():
            if isinstance(section, RelocationSection):
                relocations[section["sh_info"]] = sorted(
                    (entry["r_offset"], entry["r_info_type"], entry.entry.get("r_addend", 0))
                    for entry in section.iter_relocations()
                )
            # Literals that the compiler keeps in memory: bank 2 and up. Bank 0 has the parameters.
            elif match := re.fullmatch(r"\.nv\.constant[1-9]\d*\.(.+)", section.name):
                constants[match[1]] = constants.get(match[1], b"") + section.data()
        for index, section in enumerate(elf.iter_sections()):
            if not section.name.startswith(".text."):
                continue
            name, code = section.name.removeprefix(".text."), section.data()
            digest = hashlib.sha256(code)
            digest.update(repr(relocations.get(index, [])).encode())
            digest.update(constants.get(name, b""))
            kernels[name] = digest.hexdigest(), count_opcodes(code)
    return kernels


def count_opcodes(code: bytes) -> Mapping[int, int]:
    """How many instructions have an opcode: the lowest twelve bits of each."""
    words = (code[at] | code[at + 1] << 8 for at in range(0, len(code), INSTRUCTION_BYTES))
    return collections.Counter(word & 0xFFF for word in words)


# ---- Texts of other programs -----------------------------------------------------------------------------------------
def parse_usage(text: str) -> dict[str, dict[str, int]]:
    """Per mangled name the figures in ``cuobjdump -res-usage``'s text, such as REG and STACK."""
    usage: dict[str, dict[str, int]] = {}
    name = None
    for line in text.splitlines():
        if match := re.match(r"\s*Function (\S+):$", line):
            name = match[1]
        elif name is not None and "REG:" in line:
            usage[name] = {key: int(value) for key, value in re.findall(r"(\S+):(\d+)", line)}
            name = None
    return usage


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Demangled names. c++filt leaves out what nvcc adds to unnamed namespaces, which depends on the file's path."""
    names = list(names)
    return dict(zip(names, _run("c++filt", text="\n".join(names)).splitlines(), strict=True))
