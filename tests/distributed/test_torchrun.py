"""all_reduce under torchrun with torch_xla: a GPU for each process, and two processes on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.common import machine
from tests.common.machine import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")


@pytest.mark.parametrize(
    ("platform", "ranks", "messages"),
    [
        ("CPU", 2, 10),
        pytest.param("GPU", 2, 1000, marks=pytest.mark.gpu),
        pytest.param("GPU", 4, 1000, marks=pytest.mark.gpu),
    ],
)
def test_a_process_for_each_rank(platform, ranks, messages):
    """On GPUs the peers' memory is opened through CUDA IPC."""
    if platform == "GPU" and (machine.default_pjrt_device() != "GPU" or machine.gpu_count() < ranks):
        pytest.skip(f"needs {ranks} GPUs and JAX's CUDA plug-in")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.distributed.torchrun_program", "gloo" if platform == "CPU" else "xla", str(messages)]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PJRT_DEVICE": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    assert result.stdout.count(f"OK {messages}") == ranks, result.stdout
