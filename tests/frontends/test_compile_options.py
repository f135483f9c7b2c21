"""xla_gpu.torch.compile_options: XLA's options for programs of torch_xla."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.common.machine import ROOT, default_pjrt_device

pytest.importorskip("torch_xla")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)


@pytest.mark.parametrize("options", [{"xla_gpu_enable_cublaslt": "true"}, {"name": 1.0}, {3: True}, {"name": None}])
def test_what_is_no_option_is_named(options):
    text = r"compile_options: options: expected names of options and bools or ints, got"
    with pytest.raises(TypeError, match=text), xg.compile_options(options):
        pass


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
