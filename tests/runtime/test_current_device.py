"""Calls of eager tensors on another GPU than the thread's current one: no context where the process had none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.common import machine
from tests.common.machine import ROOT

CODE = """
import ctypes, threading
import torch, xla_gpu.torch as xg

driver = ctypes.CDLL("libcuda.so.1")

def has_context(device):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)

def current_context():
    context = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value

def in_a_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]

x = torch.arange(1000.0, device="cuda:1")
assert has_context(1) and not has_context(0)

def call():
    before = current_context()
    y = xg.rms_norm(x[None], torch.ones_like(x), eps=0.0)
    return current_context() == before, y.cpu(), torch.cuda.current_device()

same, y, current = in_a_new_thread(call)
want = x.cpu() / x.cpu().square().mean().sqrt()
torch.testing.assert_close(y[0], want)
assert not has_context(0), "the call made a context on device 0"

# With device 0 current: it stays so, and a call on device 1 gives the same bits.
torch.zeros(1, device="cuda:0")
with torch.cuda.device(0):
    before = current_context()
    again = xg.rms_norm(x[None], torch.ones_like(x), eps=0.0)
    assert current_context() == before and torch.cuda.current_device() == 0
assert torch.equal(again.cpu(), y)
print("OK", same, current)
"""


@pytest.mark.gpu
def test_no_context_on_a_gpu_that_the_process_does_not_use():
    if not pytest.importorskip("torch").cuda.is_available() or machine.gpu_count() < 2:
        pytest.skip("needs PyTorch with CUDA and two GPUs")
    result = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert result.stdout.startswith("OK"), result.stdout
