"""The CPU client's FFI API, found in a file's symbol table."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from xla_gpu._torch_xla import host_ffi_api as host
from xla_gpu.errors import CompatibilityError

SOURCE = """
static int hidden_function(void) { return 1; }
int exported_function(void) { return hidden_function(); }
int tail_exported_function(void) { return 2; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler, strip = shutil.which("gcc") or shutil.which("cc"), shutil.which("strip")
    if not compiler or not strip:
        pytest.skip("no C compiler or strip")
    folder = tmp_path_factory.mktemp("elf")
    (folder / "a.c").write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O0", "-o", folder / "a.so", folder / "a.c"], check=True)
    shutil.copy(folder / "a.so", folder / "stripped.so")
    subprocess.run([strip, folder / "stripped.so"], check=True)
    return folder / "a.so"


def values(path, *names):
    return host.symbols(str(path), names)


def test_symbols_are_those_that_nm_prints(library):
    if not shutil.which("nm"):
        pytest.skip("no nm")
    lines = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {fields[2]: int(fields[0], 16) for line in lines if len(fields := line.split()) == 3}
    for name in ("hidden_function", "exported_function", "tail_exported_function"):
        assert values(library, name.encode()) == {name.encode(): expected[name]}


def test_stripped(library):
    stripped = library.with_name("stripped.so")
    assert values(stripped, b"exported_function") == values(library, b"exported_function")
    with pytest.raises(CompatibilityError, match=r"hidden_function was not found \(its symbol table was stripped\)"):
        values(stripped, b"hidden_function")


def test_unknown_symbol(library):
    with pytest.raises(CompatibilityError, match=r"does not name it.*torch_xla==2\.9\.0"):
        values(library, b"_function")


@pytest.mark.parametrize("size", [1, 63, 100, "half", "all but a few"])
def test_truncated(library, tmp_path, size):
    data = library.read_bytes()
    cut = tmp_path / "cut.so"
    cut.write_bytes(data[: {"half": len(data) // 2, "all but a few": len(data) - 100}.get(size, size)])
    with pytest.raises(CompatibilityError, match="cannot be read as a 64-bit little-endian ELF file"):
        values(cut, b"hidden_function")


def test_not_elf(tmp_path):
    (tmp_path / "text.so").write_text("no library, but longer than the header of one would be: " * 4)
    with pytest.raises(CompatibilityError, match="wrong magic bytes"):
        values(tmp_path / "text.so", b"x")


def test_the_real_one():
    pytest.importorskip("torch_xla")
    from xla_gpu._runtime.abi import api_version

    assert api_version(host.ffi_api()) == (0, 1)
