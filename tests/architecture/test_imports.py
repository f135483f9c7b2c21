"""`import xla_gpu` imports no framework; one front end does not import the other's."""

from __future__ import annotations

import pytest

from tests.common import process

FRAMEWORKS = ("torch", "torch_xla", "torchax", "jax", "jaxlib", "numpy.f2py", "transformers")


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(m for m in {FRAMEWORKS!r} if m in sys.modules))"
    return set(process.run(code).split())


def test_package_imports_no_framework():
    assert imported_by("import xla_gpu, xla_gpu.errors, xla_gpu.ops") == set()


def test_the_check_above_can_fail():
    pytest.importorskip("torch")
    assert "torch" in imported_by("import xla_gpu, torch")


def test_jax_frontend_does_not_import_torch():
    pytest.importorskip("jax")
    loaded = imported_by("import xla_gpu.jax")
    assert "jax" in loaded and not loaded & {"torch", "torch_xla", "torchax"}


def test_torchax_front_end_does_not_import_torch_xla():
    pytest.importorskip("torchax")
    loaded = imported_by("import xla_gpu.torchax")
    assert {"torch", "torchax", "jax"} <= loaded and "torch_xla" not in loaded


def test_torch_frontend_works_without_torch_xla_and_jax():
    """As on a machine that has PyTorch alone."""
    pytest.importorskip("torch")
    block = "import sys\nfor m in ('torch_xla', '_XLAC', 'jax', 'jaxlib', 'jax_plugins'): sys.modules[m] = None\n"
    use = """
import torch, xla_gpu.torch as xg
print(xg.simple_add(torch.ones(3), torch.ones(3)).tolist())
for needs_torch_xla in (xg.jit, xg.to_xla, torch.compile(xg.silu_and_mul, backend="xla_gpu")):
    try:
        needs_torch_xla(torch.ones(2))
    except Exception as error:
        print("needs torch_xla 2.9, which is not installed: pip install" in str(error))
"""
    assert process.run(block + use).splitlines() == ["[2.0, 2.0, 2.0]", "True", "True", "True"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quantization", "'quantization' before import xla_gpu.quantization"),
        ("paged_attention", "'paged_attention': the operators are in xla_gpu.torch and xla_gpu.jax"),
        ("__wrapped__", "no attribute '__wrapped__'\n"),
    ],
)
def test_what_is_not_in_the_package_is_said_where(name, text):
    code = f"import xla_gpu\ntry: xla_gpu.{name}\nexcept AttributeError as error: print(error, end='\\n\\n')"
    assert text in process.run(code) + "\n"


def test_every_public_module_is_named():
    import pathlib

    import xla_gpu

    files = pathlib.Path(xla_gpu.__file__).parent.iterdir()
    found = {file.stem for file in files if not file.stem.startswith("_") and (file.is_dir() or file.suffix == ".py")}
    assert found - {"lib"} == {*xla_gpu._MODULES, "ops"}
