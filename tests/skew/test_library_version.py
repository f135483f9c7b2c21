"""A sound library that belongs to another version of the package."""

from __future__ import annotations

import pytest

from tests.common.process import error_of
from xla_gpu._runtime import library

CODE = "from xla_gpu._runtime import library; library.load()"


@pytest.fixture
def patched(tmp_path):
    """Copies of the library with a text changed for another of the same length."""

    def patch(before: bytes, after: bytes):
        data = library.find().read_bytes()
        assert before in data and len(before) == len(after)
        path = tmp_path / library.FILE_NAME
        path.write_bytes(data.replace(before, after))
        return path

    return patch


def test_another_version(patched):
    import xla_gpu

    version = xla_gpu.__version__.encode()
    other = patched(b'"version": "' + version, b'"version": "9' + version[1:])
    text = error_of(CODE, XLA_GPU_LIBRARY=str(other))
    assert text.startswith("xla_gpu.errors.LibraryError") and str(other) in text
    assert f"of version 9{version[1:].decode()}" in text and f"of version {version.decode()}:" in text


@pytest.mark.parametrize("function", ["xla_gpu_call", "xla_gpu_register_pjrt", "xla_gpu_handler_version"])
def test_a_function_is_missing(patched, function):
    """As in a library from before that function."""
    other = patched(b"\0" + function.encode() + b"\0", b"\0" + function[:-1].encode() + b"?\0")
    text = error_of(CODE, XLA_GPU_LIBRARY=str(other))
    assert text.startswith("xla_gpu.errors.LibraryError") and str(other) in text
    assert "has no function xla_gpu_" in text and "Build and install the package again" in text


def test_another_size_of_the_arguments():
    """xla_gpu_call of a library whose arguments have grown."""
    code = """
import ctypes as ct
from xla_gpu._runtime import abi, library
args = abi.CallArgs(struct_size=ct.sizeof(abi.CallArgs) + 8)
raise ValueError(library.load().cdll.xla_gpu_call(ct.byref(args), ct.byref(ct.c_int32())).decode())
"""
    text = error_of(code)
    assert "struct_size is" in text and "the caller and the library are of different versions" in text
