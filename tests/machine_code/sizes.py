"""`python -m tests.machine_code.sizes BUILD`: bytes of each template's kernels, and kernels that are there twice."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.machine_code.kernels import INSTRUCTION_BYTES, Kernel, ToolError, read_build

Groups = dict[tuple[str, str], list[Kernel]]  # by architecture and template or code

_EMPTY = 1024  # bytes up to which a kernel may be one that its architecture never launches, of which there are many


def size(kernels: Iterable[Kernel]) -> int:
    """Bytes of machine code."""
    return sum(kernel.instructions for kernel in kernels) * INSTRUCTION_BYTES


def template(kernel: Kernel) -> str:
    """``Add`` of ``void xla_gpu::(anonymous namespace)::Add<ops::Traits<float>>(ops::Params)``."""
    name = kernel.name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split("[<(]", name)[0].rsplit("::", 1)[-1]


def templates(kernels: Iterable[Kernel]) -> Groups:
    """The kernels of each template, those with most code first."""
    groups = _group(kernels, template)
    return dict(sorted(groups.items(), key=lambda item: -size(item[1])))


def duplicates(kernels: Iterable[Kernel]) -> Groups:
    """Kernels that have the same code, those that cost most first."""
    groups = _group((kernel for kernel in kernels if size([kernel]) > _EMPTY), lambda kernel: kernel.code)
    several = {key: group for key, group in groups.items() if len(group) > 1}
    return dict(sorted(several.items(), key=lambda item: -size(item[1][1:])))


def _group(kernels: Iterable[Kernel], key: Callable[[Kernel], str]) -> Groups:
    groups: Groups = {}
    for kernel in kernels:
        groups.setdefault((kernel.architecture, key(kernel)), []).append(kernel)
    return groups


def report(kernels: list[Kernel]) -> str:
    """The report for people: bytes and number of kernels of each template, and the duplicates with their files."""
    lines = [f"{size(kernels)} bytes in {len(kernels)} kernels"]
    lines += [f"{size(group):>10} {len(group):>4} {' '.join(key)}" for key, group in templates(kernels).items()]
    for group in duplicates(kernels).values():
        lines += ["", f"{len(group)} times the same {size(group[:1])} bytes"]
        lines += [f"  {kernel.name}  [{kernel.architecture}, {kernel.source}]" for kernel in group]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machine_code.sizes", description=__doc__)
    parser.add_argument("build", type=Path, help="build folder")
    try:
        print(report(read_build(parser.parse_args().build)))
    except ToolError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
