"""Generated wrong calls of kernel_call: the process lives on, and each error names the kernel and what was wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.common.machine import ROOT
from xla_gpu._user_kernels import nvrtc
from xla_gpu.errors import CompatibilityError


def run(frontend, seed, count):
    try:
        nvrtc.load()
    except CompatibilityError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.user_kernels.hostile_calls", frontend.name, str(seed), str(count)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.stdout.splitlines()[-1:] == ["ok"], process.stdout[-1000:] + process.stderr[-3000:]


@pytest.mark.frontends("eager", "jax")
def test_on_the_cpu(frontend):
    run(frontend, seed=1, count=58)


@pytest.mark.gpu
@pytest.mark.frontends("eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_on_a_gpu(frontend):
    run(frontend, seed=2, count=145)
