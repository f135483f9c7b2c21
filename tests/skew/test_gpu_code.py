"""A GPU that the library has no code for: what handlers say, from the function that all CUDA errors pass, and on a GPU
the whole way, with a library that was built for another architecture."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.common.process import error_of

ROOT = Path(__file__).parents[2]
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "ffi/base/device_code.h"
int main(int, char** v) {
  std::puts(xla_gpu::NoDeviceCodeText(v[1], std::atoi(v[2]), std::atoi(v[3]), "80-real,90a-real,120").c_str());
}
"""


@pytest.fixture(scope="module")
def text_of(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("device_code")
    (folder / "main.cc").write_text(PROGRAM)
    subprocess.run(["g++", "-std=c++17", "-I", ROOT, "main.cc", "-o", "main"], check=True, cwd=folder)
    return lambda *arguments: subprocess.check_output([folder / "main", *arguments], text=True).strip()


@pytest.mark.parametrize(
    ("gpu", "parts"),
    [
        (
            ("Tesla V100", "7", "0"),
            ["Tesla V100 (compute capability 7.0)", "needs? compute capability 8.0", "another GPU"],
        ),
        (
            ("NVIDIA L4", "8", "9"),
            [r"NVIDIA L4 \(compute capability 8.9\)", "CMAKE_CUDA_ARCHITECTURES=89-real pip install"],
        ),
        (("NVIDIA H200", "9", "0"), ["compute capability 9.0", "CMAKE_CUDA_ARCHITECTURES=90a-real"]),
        (("", "0", "0"), ["no code for this GPU;", "CMAKE_CUDA_ARCHITECTURES="]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else "",
)
def test_text(text_of, gpu, parts):
    text = text_of(*gpu)
    assert "built for 80-real,90a-real,120" in text
    for part in parts:
        assert re.search(part.replace("V100 (", r"V100 \(").replace("7.0)", r"7.0\)"), text), text


def test_every_cuda_error_passes_there():
    """Launchers report through XLA_GPU_RETURN_IF_CUDA, not by texts of their own."""
    own = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ffi" / "ops").rglob("*")
        if path.suffix in (".cu", ".cuh", ".h") and "cudaGetErrorString" in path.read_text()
    }
    assert own == set(), f"they call cudaGetErrorString themselves: {sorted(own)}"


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["simple_add", "paged_attention"])
def test_on_this_gpu(operator):
    """XLA_GPU_OTHER_LIBRARY names a library for another architecture: `make library-cuda CUDA_ARCH=100-real`."""
    library = os.environ.get("XLA_GPU_OTHER_LIBRARY")
    if not library:
        pytest.skip("XLA_GPU_OTHER_LIBRARY names no library without code for this GPU")
    pytest.importorskip("torch")
    code = """
import torch, xla_gpu.torch as xg
a = torch.ones(4, 2, 64, device="cuda", dtype=torch.bfloat16)
i = lambda *x: torch.tensor(x, dtype=torch.int32, device="cuda")
if OPERATOR == "simple_add":
    xg.simple_add(a, a)
else:
    cache = torch.ones(3, 16, 4, 64, device="cuda", dtype=torch.bfloat16)
    xg.paged_attention(a, cache, i(9), i(0).reshape(1, 1), i(0, 4), 1, scale=1.0)
""".replace("OPERATOR", repr(operator))
    text = error_of(code, XLA_GPU_LIBRARY=library)
    assert text.startswith(f"xla_gpu.errors.HandlerError: {operator}: "), text
    assert "this library has no code for NVIDIA" in text and "CMAKE_CUDA_ARCHITECTURES=" in text, text
