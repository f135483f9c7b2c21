"""The examples in README.md, docs/ and examples/README.md: every ```python block runs, on the CPU.

The blocks of a page run one after the other in one namespace, in an empty folder. A comment in the line above a block
says where it runs otherwise:

    <!-- example: gpu -->            on a machine with an NVIDIA GPU, under `pytest -m gpu`
    <!-- example: fragment, WHY -->  nowhere: it needs something that no test has. It must still be valid Python

What a page needs first is itself a block of the page, so that a reader can run the page as well; PRELUDES has the one
exception.
"""

from __future__ import annotations

import ast
import importlib.metadata
import linecache
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
)
BLOCK = re.compile(r"^(?:<!-- example: (?P<mark>[^>]*) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# Most examples must run, or the test says nothing about the documents.
MOST_FRAGMENTS = 7


def build_handler(text: str) -> None:
    """The page's C++ handler, compiled as the page says, with the headers that the library is built with."""
    include = ROOT / "build" / "ffi-headers" / "jaxlib" / "include"
    if not include.is_dir():
        pytest.skip(f"{include.relative_to(ROOT)} is not there; `make test` installs it")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    Path("handler.cc").write_text(re.search(r"^```cpp\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1])
    command = re.search(r"^(g\+\+ .*)$", text, re.MULTILINE)[1].replace("headers/jaxlib/include", str(include))
    subprocess.run(shlex.split(command), check=True)


def build_tvm_ffi_functions(text: str) -> None:
    """The page's tvm-ffi function, compiled against the package's headers."""
    libinfo = pytest.importorskip("tvm_ffi.libinfo")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    code = re.search(r"^```cpp\n(#include <tvm.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    Path("functions.cc").write_text(code)
    include = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    command = ["g++", "-std=c++17", "-fPIC", "-shared", *include, "functions.cc", "-o", "functions.so"]
    subprocess.run([*command, libinfo.find_libtvm_ffi()], check=True)


PRELUDES = {"docs/guides/ffi_call.md": build_handler, "docs/guides/user_functions.md": build_tvm_ffi_functions}


class Example(NamedTuple):
    code: str
    line: int  # of its first line in the page
    mark: str  # "", "gpu" or "fragment, why"


def examples(text: str) -> list[Example]:
    return [
        Example(match["code"], text.count("\n", 0, match.start("code")) + 1, match["mark"] or "")
        for match in BLOCK.finditer(text)
    ]


def check(text: str) -> None:
    """Raises AssertionError for a block that `examples` does not find, and for a mark that means nothing."""
    found = examples(text)
    count = len(re.findall(r"^[ \t]*```[ \t]*(?:python|py)\b", text, re.MULTILINE))
    assert len(found) == count, f"{count - len(found)} python blocks are indented, not closed or marked in another form"
    assert text.count("<!-- example:") == sum(1 for example in found if example.mark), "a mark without its block"
    for example in found:
        assert re.fullmatch(r"|gpu|fragment, \S.{5,}", example.mark), f"line {example.line}: {example.mark!r}"
        ast.parse(example.code, f"line {example.line}")


def run(page: str, chosen: list[Example]) -> None:
    """Runs the blocks in one namespace; an error is reported with the page's name and line."""
    namespace: dict = {"__name__": "__main__"}
    source = ""
    for example in chosen:
        # Empty lines before it give a traceback the page's line numbers.
        empty = "\n" * (example.line - 1)
        source += empty[source.count("\n") :] + example.code
        # Triton reads functions' source by the name of their file, which is not in the folder that examples run in.
        linecache.cache[page] = (len(source), None, source.splitlines(keepends=True), page)
        code = compile(empty + example.code, page, "exec")
        try:
            exec(code, namespace)
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == page]
            at = lines[-1] if lines else example.line
            raise AssertionError(f"{page}:{at}: {type(error).__name__}: {error}") from error


def pages(wanted: str) -> list:
    chosen = [page for page in PAGES if any(example.mark == wanted for example in examples(page.read_text()))]
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in chosen]


@pytest.fixture
def prepared(page, tmp_path, monkeypatch):
    """An empty folder to run in, and the frameworks that the page imports."""
    text = page.read_text()
    for module in ("torch", "torch_xla", "torchax", "jax"):
        used = re.search(rf"^(?:import|from) .*\b{module}\b", text, re.MULTILINE)
        # By metadata: torch_xla 2.9's wheel holds files of torchax, and not what they import.
        if used and not any(importlib.metadata.distributions(name=module)):
            pytest.skip(f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    if prelude := PRELUDES.get(page.relative_to(ROOT).as_posix()):
        prelude(text)
    yield
    if "torch" in sys.modules:  # pages may compile functions of one name
        sys.modules["torch"]._dynamo.reset()


@pytest.mark.parametrize("page", pages(""))
def test_examples_run(page, prepared):
    run(page.relative_to(ROOT).as_posix(), [e for e in examples(page.read_text()) if e.mark == ""])


@pytest.mark.gpu
@pytest.mark.parametrize("page", pages("gpu"))
def test_examples_for_gpus_run(page, prepared):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    run(page.relative_to(ROOT).as_posix(), [e for e in examples(page.read_text()) if e.mark in ("", "gpu")])


def test_few_examples_are_fragments():
    fragments = [
        f"{page.relative_to(ROOT)}:{example.line}: {example.mark}"
        for page in PAGES
        for example in examples(page.read_text())
        if example.mark.startswith("fragment")
    ]
    assert len(fragments) <= MOST_FRAGMENTS, "\n".join(fragments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_example_is_overlooked(page):
    check(page.read_text())


# ---- The checks above can fail ---------------------------------------------------------------------------------------
def test_an_example_that_breaks_is_reported_with_its_line():
    text = "# A page\n\n```python\nx = 1\n```\n\nText.\n\n```python\ny = x + 1\nassert y == 3\n```\n"
    with pytest.raises(AssertionError, match=r"^page\.md:11: AssertionError"):
        run("page.md", examples(text))


def test_the_source_of_a_pages_functions_is_found():
    defined = "import inspect\n\ndef f():\n    return x\n\nfound = inspect.getsource(f)\n"
    blocks = ["x = 1\n", defined, "assert found == 'def f():\\n    return x\\n', found\n"]
    run("page.md", examples("\n".join(f"```python\n{block}```\n" for block in blocks)))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- example: gpu -->\n\n```python\n1\n```\n",  # the mark does not touch its block
        "<!-- example: some day -->\n```python\n1\n```\n",
        "<!-- example: fragment -->\n```python\n1\n```\n",  # and why?
        "- item\n  ```python\n  1\n  ```\n",
        "```python\n1\n",
    ],
)
def test_a_block_that_would_be_overlooked_is_an_error(text):
    with pytest.raises(AssertionError):
        check(text)


def test_the_index_of_the_log_has_each_page_once():
    index = (ROOT / "docs" / "log" / "README.md").read_text()
    pages = sorted(path.name for path in (ROOT / "docs" / "log").glob("*.md") if path.name != "README.md")
    assert sorted(re.findall(r"\]\(([\w.-]+\.md)\)", index)) == pages


# ---- Names of files --------------------------------------------------------------------------------------------------
NAMED = re.compile(r"`((?:tests|ffi|python|docs|examples|benchmarks|third_party)/[\w./-]*\w/?)(?::[^`]*)?`")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name != "log"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_files_that_a_page_names_exist(page):
    """What docs/log names existed on its day."""
    missing = [name for name in NAMED.findall(page.read_text()) if not (ROOT / name).exists()]
    assert missing == []


def test_names_of_files_are_found():
    assert NAMED.findall("`tests/nothing.py` and `ffi/nothing.h: Name`, `tests/fuzz`") == [
        "tests/nothing.py",
        "ffi/nothing.h",
        "tests/fuzz",
    ]
