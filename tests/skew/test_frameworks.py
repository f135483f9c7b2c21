"""Frameworks that are missing or of another version: an exception that says what was found, what is needed and what to
do. Stand-ins take their places, since no environment holds them all."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from tests.common.process import error_of, errors_of

needs_torch_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")


def stand_in(folder, name: str, text: str):
    module = folder / name
    module.mkdir()
    (module / "__init__.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("framework", "needed", "remedy", "old"),
    [
        ("jax", "jax 0.7 or newer", ".[jax]", "0.6.2"),
        ("torch", "torch 2.9 or newer", ".[torch]", "2.8.1"),
        ("torchax", "torchax 0.0.13 or newer", ".[torchax]", "0.0.12"),
    ],
)
class TestFrontEnds:
    def test_missing(self, framework, needed, remedy, old):
        text = error_of(f"import sys; sys.modules[{framework!r}] = None; import xla_gpu.{framework}")
        assert text.startswith("builtins.ModuleNotFoundError")
        assert needed in text and "not installed" in text and f"pip install '{remedy}'" in text

    @pytest.mark.parametrize("version", ["the last before", "0.0", "unknown"])
    def test_too_old(self, framework, needed, remedy, old, version, tmp_path):
        version = old if version == "the last before" else version
        path = stand_in(tmp_path, framework, f"__version__ = {version!r}")
        text = error_of(f"import xla_gpu.{framework}", path)
        assert text.startswith("xla_gpu.errors.CompatibilityError") and needed in text
        assert f"{framework} {version} is installed" in text and f"pip install '{remedy}'" in text

    def test_without_a_version(self, framework, needed, remedy, old, tmp_path):
        text = error_of(f"import xla_gpu.{framework}", stand_in(tmp_path, framework, ""))
        assert (
            text.startswith("xla_gpu.errors.CompatibilityError") and "of an unknown version" in text and needed in text
        )

    def test_half_installed(self, framework, needed, remedy, old, tmp_path):
        """What the framework itself lacks is named, not the framework."""
        text = error_of(f"import xla_gpu.{framework}", stand_in(tmp_path, framework, "import a_module_of_its_own"))
        assert "a_module_of_its_own" in text and "not installed" not in text


SETUP = """
import torch, torch_xla, xla_gpu.torch
a = torch.ones(3, device="xla")
"""
CALL = (
    SETUP
    + """
{change}
print(xla_gpu.torch.simple_add(a, a))
"""
)


def errors_of_calls(changes: Sequence[str]) -> list[str]:
    return errors_of(SETUP, [f"{change}\nxla_gpu.torch.simple_add(a, a)" for change in changes], PJRT_DEVICE="CPU")


@needs_torch_xla
def test_another_torch_xla():
    versions = ("2.5.1", "2.8.0", "2.10.0", "3.0.0+abc")
    texts = errors_of_calls([f"torch_xla.__version__ = {version!r}" for version in versions])
    for version, text in zip(versions, texts, strict=True):
        assert text.startswith("xla_gpu.errors.CompatibilityError: the torch_xla front end needs torch_xla 2.9, and")
        assert f"torch_xla {version} is installed: pip install torch==2.9.0 torch_xla==2.9.0" in text


@needs_torch_xla
def test_another_torch_xla_on_gpu(fake_plugin):
    code = (
        "import torch_xla; torch_xla.__version__ = '2.8.1'\n"
        "from xla_gpu._torch_xla.plugin import GpuPlugin\nGpuPlugin().library_path()"
    )
    text = error_of(code, XLA_GPU_PJRT_PLUGIN=str(fake_plugin), PJRT_DEVICE="CPU")
    assert "PJRT_DEVICE=GPU needs torch_xla 2.9, and torch_xla 2.8.1 is installed" in text


@needs_torch_xla
def test_torch_xla_without_jaxlib():
    text = error_of(CALL.format(change="import sys; sys.modules['jaxlib'] = None"), PJRT_DEVICE="CPU")
    assert text.startswith("xla_gpu.errors.LibraryError: lowering for torch_xla needs jaxlib 0.7")


@needs_torch_xla
def test_jaxlib_whose_converter_changed():
    """It is gone, takes other arguments, or returns something else."""
    import jaxlib

    changes = (
        "_jax.mlir.mlir_module_to_xla_computation = lambda module: None",
        "_jax.mlir.mlir_module_to_xla_computation = lambda *a, **k: object()",
        "del _jax.mlir.mlir_module_to_xla_computation",
    )
    for text in errors_of_calls([f"from jaxlib import _jax; {change}" for change in changes]):
        assert text.startswith("xla_gpu.errors.CompatibilityError: lowering for torch_xla needs")
        assert f"jaxlib {jaxlib.__version__}" in text and "pip install 'jaxlib>=0.7" in text


@needs_torch_xla
def test_torch_xla_without_the_symbol():
    """A build of torch_xla whose _XLAC does not name GetXlaFfiApi."""
    change = "from xla_gpu._torch_xla import host_ffi_api; host_ffi_api._GET_API = b'_ZN3xla3ffi6AbsentEv'"
    text = error_of(CALL.format(change=change), PJRT_DEVICE="CPU")
    assert text.startswith("xla_gpu.errors.CompatibilityError") and "_XLAC" in text
    assert "_ZN3xla3ffi6AbsentEv was not found" in text and "torch_xla==2.9.0" in text


@needs_torch_xla
@pytest.mark.parametrize("version", [(1, 0), (0, 0)])
def test_torch_xla_with_another_ffi_api(version):
    """The runtime tells a version that the library's handlers do not fit."""
    change = f"""
import ctypes as ct
from xla_gpu._torch_xla import host_ffi_api
api = (ct.c_char * 400).from_buffer_copy(ct.string_at(host_ffi_api.ffi_api(), 200) + bytes(200))
ct.c_int.from_buffer(api, 32).value, ct.c_int.from_buffer(api, 36).value = {version}
host_ffi_api.ffi_api = lambda: ct.addressof(api)
"""
    text = error_of(CALL.format(change=change), PJRT_DEVICE="CPU")
    assert text.startswith("xla_gpu.errors.TargetError: FFI target 'xla_gpu_simple_add'") and "FFI API 0.1" in text
    assert f"{version[0]}.{version[1]}" in text
