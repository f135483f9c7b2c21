"""xla_gpu.torch.compile_options: XLA's options for programs of torch_xla."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tests.common.machine import ROOT, default_pjrt_device

pytest.importorskip("torch_xla")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)
executable_cache = pytest.importorskip("xla_gpu._runtime.executable_cache")


@pytest.mark.parametrize("options", [{"xla_gpu_enable_cublaslt": "true"}, {"name": 1.0}, {3: True}, {"name": None}])
def test_what_is_no_option_is_named(options):
    text = r"compile_options: options: expected names of options and bools or ints, got"
    with pytest.raises(TypeError, match=text), xg.compile_options(options):
        pass


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ([("a", 1)], TypeError, "a mapping, got list"),
        ({"a": 2**63}, ValueError, "a to be of 64 bits, got 9223372036854"),
    ],
)
def test_misuse_is_named(options, error, text):
    with pytest.raises(error, match=f"compile_options: options: expected {text}"), xg.compile_options(options):
        pass


def test_a_context_inside_of_another(monkeypatch):
    """It adds to the outer options, and leaves them as they were."""
    appended = []

    class Library:
        def xla_gpu_append_compile_options(self, entries, size):
            assert len(entries) == size
            appended.append(entries)

    monkeypatch.setattr(executable_cache.library, "load", lambda: SimpleNamespace(cdll=Library()))
    override = executable_cache._override
    with xg.compile_options({"a": True, "b": 1}):
        with pytest.raises(KeyError), xg.compile_options({"b": 2}), xg.compile_options({}):
            raise KeyError
        assert appended == [override("a", True) + override("b", value) for value in (1, 2, 1)]
    assert appended[3:] == [b""]


# In a process of its own: torch_xla's client is one for each, and a refused program may leave it in any state.
PROGRAM = textwrap.dedent("""
    import torch, torch_xla, xla_gpu.torch as xg

    def product(n):
        x = torch.ones(n, n, device="xla")
        torch_xla.sync()
        return (x @ x).sum()

    with xg.compile_options({"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}):
        assert product(32).item() == 32.0**3
    try:
        with xg.compile_options({"xla_gpu_no_such_option": True}):
            print(product(48).item())
    except (RuntimeError, ValueError) as error:
        print(error)
    print("OK")
""")


@pytest.mark.gpu
def test_programs_get_the_options():
    if default_pjrt_device() != "GPU":
        pytest.skip("needs JAX's CUDA plug-in")
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.endswith("OK\n"), result.stdout + result.stderr[-3000:]
    assert "xla_gpu_no_such_option" in result.stdout


def test_on_the_cpu_they_have_no_effect():
    result = subprocess.run(
        [sys.executable, "-c", "import os; os.environ['PJRT_DEVICE'] = 'CPU'\n" + PROGRAM.replace("48", "8")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and result.stdout == "512.0\nOK\n", result.stdout + result.stderr[-3000:]
