"""Imports of our own code: private names stay in their folder, and there are no cycles."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path
from typing import NamedTuple

from tests.architecture.test_surface import PACKAGE, ROOT

FOLDERS = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")


class Import(NamedTuple):
    module: str  # absolute: "xla_gpu._core.operator"
    name: str
    known_as: str
    line: int


def root_of(path: Path) -> Path:
    return PACKAGE.parent if PACKAGE in path.parents else ROOT


def our_imports(path: Path, text: str) -> list[Import]:
    """The imports of our own names, relative ones made absolute."""
    parts = path.relative_to(root_of(path)).with_suffix("").parts
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            found += [Import(module, alias.name, alias.asname or alias.name, node.lineno) for alias in node.names]
    return [each for each in found if each.module.split(".")[0] in ("xla_gpu", "tests", "benchmarks", "examples")]


def file_of(module: str) -> Path | None:
    """The folder or the file of a module of ours; None where it is no module."""
    path = (PACKAGE.parent if module.startswith("xla_gpu") else ROOT).joinpath(*module.split("."))
    return path if path.is_dir() else path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def others_private_names(path: Path, text: str) -> list[str]:
    """Private names of another folder that a file uses, on lines without a comment."""
    lines, found = text.splitlines(), []
    imports = our_imports(path, text)
    for each in imports:
        target, module = file_of(f"{each.module}.{each.name}"), file_of(each.module)
        folder = module if module is not None and module.is_dir() else (module or path).parent
        # The package's own folders, _core and so on, are private to the package as a whole.
        if private(each.name) and folder != path.parent and not (target is not None and target.is_dir()):
            found.append((each.line, f"{each.module}.{each.name}"))
    known = {each.known_as for each in imports if file_of(f"{each.module}.{each.name}") is not None}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if private(node.attr) and node.value.id in known:
            found.append((node.lineno, f"{node.value.id}.{node.attr}"))
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in found if "#" not in lines[line - 1]]


def test_private_names_stay_in_their_folder():
    """A name that begins with "_" is used in its own folder alone, or on a line whose comment gives the reason."""
    found = [
        use
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py"))
        for use in others_private_names(path, path.read_text())
    ]
    assert found == []


def test_the_check_above_can_fail():
    path = PACKAGE / "_jax" / "call.py"
    for line, name in (
        ("from .._runtime.library import _MACHINES", "xla_gpu._runtime.library._MACHINES"),
        ("from .._runtime import library as lib\nlib._MACHINES", "lib._MACHINES"),
    ):
        (use,) = others_private_names(path, line)
        assert use.endswith(f": {name}")
        assert others_private_names(path, f"{line}  # since there is a reason") == []
    assert others_private_names(path, "from .. import _runtime\nfrom .call import _run") == []


def test_no_import_cycles():
    """Of the package's modules, and of its folders: each imports those alone that come before it in some order."""
    modules: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for each in our_imports(path, path.read_text()):
            target = f"{each.module}.{each.name}"
            target = target if file_of(target) is not None else each.module
            if name == target or name.startswith(f"{target}."):  # a module of a package imports the package's names
                continue
            modules.setdefault(name, set()).add(target)
            ours, theirs = name.split(".")[1], target.split(".")[1]
            if ours != theirs and ours.startswith("_") and theirs.startswith("_"):
                folders.setdefault(ours, set()).add(theirs)
    assert len(modules) > 20 and len(folders) >= 5
    for graph in (modules, folders):
        graphlib.TopologicalSorter(graph).prepare()  # CycleError names the cycle
