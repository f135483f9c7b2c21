"""Two frameworks in one process, whichever starts first: the same target in both, the same bits from both."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import os
import numpy as np
a = np.arange(1000, dtype=np.float32) * np.float32(0.1)

def with_jax():
    import jax, xla_gpu.jax
    return np.asarray(jax.jit(xla_gpu.jax.simple_add)(a, a[::-1].copy()))

def with_torch_xla():
    import torch, torch_xla, xla_gpu.torch
    to = lambda x: torch.from_numpy(x).to(torch_xla.device())
    return xla_gpu.torch.simple_add(to(a), to(a[::-1].copy())).cpu().numpy()

def with_eager():
    import torch, xla_gpu.torch
    return xla_gpu.torch.simple_add(torch.from_numpy(a), torch.from_numpy(a[::-1].copy())).numpy()

def same(*results):
    for r in results:
        assert (r.view(np.uint32) == (a + a[::-1]).view(np.uint32)).all()
"""


def run(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-3000:]}"


@pytest.mark.parametrize(
    "order",
    [
        "with_jax(), with_torch_xla(), with_eager(), with_jax()",
        "with_torch_xla(), with_jax(), with_eager(), with_torch_xla()",
    ],
    ids=["jax-first", "torch_xla-first"],
)
def test_each_first(order):
    pytest.importorskip("jax")
    pytest.importorskip("torch_xla")
    run(f"same({order})")


def test_user_registers_ours_with_jax_too():
    """The same pointer under the same name twice is no conflict."""
    pytest.importorskip("jax")
    run(
        "import jax\nfrom xla_gpu import _library\n"
        "import ctypes\n"
        "for h in _library.load().handlers():\n"
        "    if h.platform == 'Host':\n"
        "        f = ctypes.cast(h.address, ctypes.c_void_p)\n"
        "        jax.ffi.register_ffi_target(h.target, jax.ffi.pycapsule(f), platform='cpu')\n"
        "same(with_jax())\n"
    )
