"""Finding and loading the library: every way to go wrong names the file, the reason and the remedy; none is a crash."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from xla_gpu._runtime import library


def load(path: str | os.PathLike | None, code: str = "from xla_gpu._runtime import library; library.load()") -> str:
    """What loading the library at `path` in a process of its own ends with: the last line of its stderr."""
    environment = {k: v for k, v in os.environ.items() if k != library.ENVIRONMENT}
    if path is not None:
        environment[library.ENVIRONMENT] = str(path)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode in (0, 1), f"died of signal {-result.returncode}: {result.stderr}"
    return result.stderr.strip().splitlines()[-1] if result.returncode else "loaded"


@pytest.fixture(scope="module")
def real() -> Path:
    return library.find()


def test_the_real_one_loads(real):
    assert load(real) == "loaded"


def test_a_name_without_a_folder(real, tmp_path, monkeypatch):
    """Of which the dynamic linker would search its own folders."""
    (tmp_path / "mine.so").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    assert load(Path("mine.so")) == "loaded"
    assert "mine.so, which is not a file" in load(Path("other/mine.so"))


def test_missing(tmp_path):
    text = load(tmp_path / "nowhere.so")
    assert text.startswith("xla_gpu.errors.LibraryError") and "nowhere.so" in text and "XLA_GPU_LIBRARY" in text


def test_a_folder_instead(tmp_path):
    assert "LibraryError" in load(tmp_path) and str(tmp_path) in load(tmp_path)


@pytest.mark.parametrize("size", [0, 3, 40, 64, 1000, "half", "all but a page"])
def test_truncated(real, tmp_path, size):
    """The dynamic linker would map a file that is cut short, and die of SIGBUS while relocating it."""
    whole = real.stat().st_size
    size = {"half": whole // 2, "all but a page": whole - 4096}.get(size, size)
    cut = tmp_path / library.FILE_NAME
    shutil.copy(real, cut)
    os.truncate(cut, size)
    text = load(cut)
    assert "LibraryError" in text and str(cut) in text
    assert "truncated" in text or "not an ELF library" in text


def test_another_architecture(real, tmp_path):
    other = tmp_path / library.FILE_NAME
    data = bytearray(real.read_bytes())
    struct.pack_into("<H", data, 0x12, 183)  # e_machine: aarch64
    other.write_bytes(data)
    text = load(other)
    assert "LibraryError" in text and "aarch64" in text and "x86_64" in text


def test_another_library():
    """A sound library that is not ours."""
    import ctypes.util

    name = ctypes.util.find_library("m")
    path = next(
        (p for d in ("/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib") if (p := Path(d) / name).exists()),
        None,
    )
    if path is None:
        pytest.skip(f"{name} is in none of the usual places")
    text = load(path)
    assert "LibraryError" in text and str(path) in text and "xla_gpu_" in text


def test_text_instead(tmp_path):
    text_file = tmp_path / library.FILE_NAME
    text_file.write_text("not a library\n")
    assert "not an ELF library" in load(text_file)


def test_the_frontends_pass_the_error_on(tmp_path):
    pytest.importorskip("torch")
    code = "import torch, xla_gpu.torch; xla_gpu.torch.simple_add(torch.ones(1), torch.ones(1))"
    assert "LibraryError" in load(tmp_path / "nowhere.so", code)
