"""all_reduce under torchrun: a GPU for each process, by torch_xla and by eager tensors; two processes on the CPU."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from tests.common import machine
from tests.common.machine import ROOT

GPUS = [pytest.param(backend, n, 1000, marks=pytest.mark.gpu) for backend in ("xla", "nccl") for n in (2, 4)]


@pytest.mark.parametrize(("backend", "ranks", "messages"), [("gloo", 2, 10), *GPUS])
def test_a_process_for_each_rank(backend, ranks, messages):
    """On GPUs the peers' memory is opened through CUDA IPC."""
    if backend != "nccl" and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    if backend == "xla" and machine.default_pjrt_device() != "GPU":
        pytest.skip("needs JAX's CUDA plug-in")
    if backend == "nccl" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    if backend != "gloo" and machine.gpu_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    command += ["-m", "tests.distributed.torchrun_program", backend, str(messages)]
    platform = "CPU" if backend == "gloo" else "GPU"
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PJRT_DEVICE": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    assert result.stdout.count(f"OK {messages}") == ranks, result.stdout
