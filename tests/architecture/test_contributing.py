"""CONTRIBUTING's "Adding an operator" is complete and true: every file that it names is there for every operator, and
the template has no file that it does not name."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.architecture.test_surface import ROOT, operator_folders
from xla_gpu.ops import OPERATORS

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
            assert list(folder.glob(f"{operator}*_cpu*.cc" if path.endswith(".cc") else f"{operator}*_cuda*.c[cu]")), (
                path
            )
        else:
            assert (ROOT / path).exists(), path


# Operators that the files with lists do not name, and why.
ELSEWHERE = {
    "all_reduce": "its front ends take groups of devices: tests/distributed and its own file test these properties"
}
# Named for some operators alone.
OPTIONAL = {
    "tests/common/cases.py",
    "tests/common/gradients.py",
    "tests/common/reference.py",
    "tests/frontends/in_place_program.py",
}


@pytest.mark.parametrize("operator", sorted(set(operator_folders()) - set(ELSEWHERE)))
def test_every_list_names_every_operator(operator):
    """Files of tests that the section names without <op> hold something for each operator."""
    camel = "".join(word.capitalize() for word in operator.split("_"))
    paths = {path for path in named_paths("<op>") if path.startswith(("tests/", "ffi/testing/"))}
    lists = {path for path in paths - OPTIONAL if (ROOT / path).is_file() and "tests/architecture/" not in path}
    assert len(lists) >= 9, sorted(lists)
    for path in sorted(lists):
        text = (ROOT / path).read_text()
        assert operator in text or camel in text, f"{path} does not name {operator}"


def test_files_of_in_place_operators():
    for operator in (op for op in OPERATORS if op.in_place):
        for path in ("tests/frontends/in_place_program.py", f"tests/ops/test_{operator.name}.py"):
            assert f"{operator.name}_(" in (ROOT / path).read_text(), f"{path} does not call {operator.name}_"


def test_a_file_that_names_every_operator_is_named():
    """Otherwise a new operator would be forgotten there."""
    wanted = set(operator_folders()) - set(ELSEWHERE)
    named = named_paths("<op>")
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith("tests/architecture/") and all(op in path.read_text() for op in wanted):
            assert name in named, f"CONTRIBUTING does not name {name}, where every operator is listed"


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


def test_every_command_is_named():
    """The make targets that the Makefile's first lines offer."""
    offered = re.match(r"# (make .*?)\.\n", (ROOT / "Makefile").read_text())[1].removeprefix("make ").split(" | ")
    documents = TEXT + (ROOT / "README.md").read_text()
    assert len(offered) >= 10
    assert [target for target in offered if not re.search(rf"make {target}(?![\w-])", documents)] == []


def test_every_folder_of_tests_is_described():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    table = re.search(r"^\| folder of `tests/`.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)[0]
    described = {
        name for row in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE) for name in re.findall(r"`(\w+)/`", row)
    }
    assert folders == described
    architecture = (ROOT / "docs/architecture.md").read_text()
    row = re.search(r"^\| `tests/` \|.*$", architecture, re.MULTILINE)[0]
    assert folders == set(re.findall(r"`(\w+)/`", row)) - {"tests"}
