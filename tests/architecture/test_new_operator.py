"""CONTRIBUTING's steps give an operator: one with scratch memory and an in-place form is added to a copy of the tree,
built, and called through every front end of the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_surface import ROOT

FILES = Path(__file__).parent / "accumulate"
FUNCTION = """

@function(_accumulate.OPERATOR{options})
def accumulate{suffix}(x: {array}, total: {array}, *, scale: float) -> {array}:
    \"\"\"Computes total + scale * reversed(x).\"\"\"
"""


def cmake_settings() -> tuple[str, list[str]]:
    """The cmake that built the tests' handlers, and what it was told about compilers and headers."""
    handlers = os.environ.get("XLA_GPU_TEST_HANDLERS")
    cache = Path(handlers).parents[2] / "CMakeCache.txt" if handlers else None
    if cache is None or not cache.is_file():
        pytest.skip("XLA_GPU_TEST_HANDLERS is not set, or stands in no build folder; `make test` sets it")
    values = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    kept = ("XLA_GPU_FFI_INCLUDE_DIR", "CMAKE_MAKE_PROGRAM", "CMAKE_CXX_COMPILER", "CMAKE_CXX_COMPILER_LAUNCHER")
    settings = [f"-D{name}={values[name]}" for name in kept if values.get(name)]
    return values["CMAKE_COMMAND"], ["-G", values["CMAKE_GENERATOR"], *settings]


def replace(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count == 1, f"{path}: {pattern} matches {count} times"
    path.write_text(text)


def add_operator(tree: Path) -> None:
    """The steps of CONTRIBUTING that make the operator, for the host."""
    # 1. Its name. The other operators are left out, which are long to compile.
    replace(tree / "ffi" / "CMakeLists.txt", r"set\(XLA_GPU_OPS\s+[\w\s]+\)", "set(XLA_GPU_OPS accumulate)")
    # 2. Kernels and handlers.
    folder = tree / "ffi" / "ops" / "accumulate"
    folder.mkdir()
    for file in (*FILES.glob("*.h"), *FILES.glob("*.cc"), FILES / "CMakeLists.txt"):
        shutil.copy(file, folder)
    # 3. The declaration.
    package = tree / "python" / "xla_gpu"
    shutil.copy(FILES / "accumulate.py", package / "ops")
    replace(package / "ops" / "__init__.py", r"(OPERATORS: .* = \()", r"\1\n    accumulate.OPERATOR,")
    replace(package / "ops" / "__init__.py", r"from \. import \(", "from . import (\n    accumulate,")
    # 4. The functions, the in-place form too.
    imported = "from ..ops import accumulate as _accumulate\n"
    for module, array, forms in (
        ("torch", "torch.Tensor", (("", ""), ("_", ", in_place=True"))),
        ("jax", "jax.typing.ArrayLike", (("", ""),)),
    ):
        path = package / module / "_layers.py"
        replace(path, r"(?=from \.\.ops import simple_add as)", imported)
        functions = [FUNCTION.format(array=array, suffix=suffix, options=options) for suffix, options in forms]
        path.write_text(path.read_text() + "".join(functions))
        names = [f"accumulate{suffix}" for suffix, _ in forms]
        replace(package / module / "__init__.py", r"(from \._layers import \()", rf"\1{', '.join(names)}, ")
        replace(package / module / "__init__.py", r"(__all__ = \[)", rf"\1*{names}, ")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    cmake, settings = cmake_settings()
    tree = tmp_path_factory.mktemp("tree")
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    for name in ("ffi", "python", "third_party"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    add_operator(tree)
    options = ["-DXLA_GPU_CUDA=OFF", "-DXLA_GPU_WERROR=ON", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (
        [cmake, "-S", tree, "-B", tree / "build", *settings, *options],
        [cmake, "--build", tree / "build", "--parallel", str(os.cpu_count())],
    ):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return tree


def test_every_front_end_has_the_operator(tree):
    for module in ("torch_xla", "jax"):
        pytest.importorskip(module)
    environment = os.environ | {
        "PYTHONPATH": str(tree / "python"),
        "XLA_GPU_LIBRARY": str(tree / "build" / "ffi" / "libxla_gpu_ffi.so"),
        "PJRT_DEVICE": "CPU",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, FILES / "program.py"], env=environment, capture_output=True, text=True, cwd=tree
    )
    assert result.returncode == 0, result.stderr[-4000:]
    correct = ["eager: functional", "eager: in place", "torch_xla: functional", "torch_xla: in place"]
    correct += ["torch_xla: in place, compiled", "jax"]
    assert result.stdout.splitlines() == [f"correct: {what}" for what in correct]
