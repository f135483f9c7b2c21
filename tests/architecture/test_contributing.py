"""CONTRIBUTING's "Adding an operator" is complete and true: every file that it names is there for every operator, and
the template has no file that it does not name."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.architecture.test_surface import ROOT, operator_folders

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def section() -> str:
    return re.search(r"^## Adding an operator\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)[1]


def named_paths(operator: str) -> set[str]:
    """Paths in backticks, <op> filled in. Names without a folder belong to the last folder named before them."""
    paths, folder = set(), ""
    for name in re.findall(r"`([\w./<>]+)`", section()):
        name = name.replace("<op>", operator)
        if name.endswith("/"):
            folder = name
            paths.add(name)
        elif "/" in name:
            paths.add(name)
        elif "." in name:
            paths.add(folder + name)
    return paths


@pytest.mark.parametrize("operator", operator_folders())
def test_every_named_file_exists(operator):
    paths = named_paths(operator)
    assert len(paths) >= 10, f"the section's paths were not found: {sorted(paths)}"
    for path in sorted(paths):
        if path.endswith((f"{operator}_cpu.cc", f"{operator}_cuda.cu")):  # a large kernel may be several files
            folder = (ROOT / path).parent
            assert list(folder.glob(f"{operator}*_cpu*.cc" if path.endswith(".cc") else f"{operator}*.cu")), path
        else:
            assert (ROOT / path).exists(), path


def test_the_template_is_complete():
    """simple_add, which newcomers copy, is in every place that an operator is in."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode != 0:
        pytest.skip("not a git checkout")
    named = [ROOT / path for path in named_paths("simple_add")]
    for path in files.stdout.split():
        if "simple_add" in path:
            assert any(p == ROOT / path or p in (ROOT / path).parents for p in named), (
                f"CONTRIBUTING does not name {path}"
            )


@pytest.mark.parametrize("operator", operator_folders())
@pytest.mark.parametrize("document", ["README.md", "CHANGELOG.md", "docs/operators.md"])
def test_documents_name_every_operator(document, operator):
    assert operator in (ROOT / document).read_text()


def test_commands_exist():
    """The make targets that CONTRIBUTING and the README tell people to run."""
    makefile = (ROOT / "Makefile").read_text()
    for document in ("CONTRIBUTING.md", "README.md"):
        for target in set(re.findall(r"^(?:\$ )?make (\w[\w-]*)", (ROOT / document).read_text(), re.MULTILINE)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"
