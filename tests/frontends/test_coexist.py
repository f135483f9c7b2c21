"""Two frameworks in one process, whichever starts first: the same target in both, the same bits from both."""

from __future__ import annotations

import pytest

from tests.common import frontends, process

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

def with_eager(device="cpu"):
    import torch, xla_gpu.torch
    to = lambda x: torch.from_numpy(x).to(device)
    return xla_gpu.torch.simple_add(to(a), to(a[::-1].copy())).cpu().numpy()

def with_eager_cuda():
    return with_eager("cuda")

def same(*results):
    for r in results:
        assert (r.view(np.uint32) == (a + a[::-1]).view(np.uint32)).all()
"""


def run(code: str, platform: str = "host") -> None:
    names = {"host": ("CPU", "cpu"), "cuda": ("GPU", "cuda,cpu")}[platform]
    process.run(SETUP + code, **dict(zip(("PJRT_DEVICE", "JAX_PLATFORMS"), names, strict=True)))


@pytest.mark.parametrize(
    "order",
    [
        "with_jax(), with_torch_xla(), with_eager(), with_jax()",
        "with_torch_xla(), with_jax(), with_eager(), with_torch_xla()",
    ],
    ids=["jax-first", "torch_xla-first"],
)
@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_each_first(frontend, order):
    jax = frontends.ALL["jax" if frontend.platform == "host" else "jax-cuda"]
    if reason := jax.unavailable():
        pytest.skip(f"{jax.name}: {reason}")
    run(f"same({order})", frontend.platform)


@pytest.mark.parametrize(
    "order",
    ["with_jax(), with_eager_cuda(), with_eager(), with_jax()", "with_eager_cuda(), with_jax(), with_eager_cuda()"],
    ids=["jax-first", "eager-first"],
)
@pytest.mark.frontends("eager-cuda")
def test_each_first_on_one_gpu(frontend, order):
    if reason := frontends.ALL["jax-cuda"].unavailable():
        pytest.skip(f"jax-cuda: {reason}")
    run(f"same({order})", frontend.platform)


def test_user_registers_ours_with_jax_too():
    """The same pointer under the same name twice is no conflict."""
    pytest.importorskip("jax")
    run(
        "import jax\nfrom xla_gpu._runtime import library\n"
        "import ctypes\n"
        "for h in library.load().handlers():\n"
        "    if h.platform == 'Host':\n"
        "        f = ctypes.cast(h.execute, ctypes.c_void_p)\n"
        "        jax.ffi.register_ffi_target(h.target, jax.ffi.pycapsule(f), platform='cpu')\n"
        "same(with_jax())\n"
    )
