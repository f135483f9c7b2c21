"""Programs with users' kernels in other processes than those that made them: exported, serialised, cached.

Without a GPU the other process must reach the handler, which names the kernel that it was to launch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.common.machine import ROOT

pytestmark = pytest.mark.usefixtures("compiler")

MAKE = """
import sys
import numpy as np
from tests.user_kernels import sources
way, path = sys.argv[1:]
x = np.arange(1000, dtype=np.float32)

def program(ops, like, x):
    kernel = ops.cuda_kernel(sources.SCALE, "scale")
    y = ops.kernel_call(kernel, like, grid=8, block=128)(x, 2.0, 1000)
    try:
        from tests.user_kernels import triton_functions
    except ImportError:
        return y + y
    return y + ops.triton_call(triton_functions.add, like, grid=4, BLOCK=256)(x, x, 1000)
"""
MAKE_JAX = """
import pickle, jax, jax.export
import xla_gpu.jax as xj
jitted = jax.jit(lambda x: program(xj, x, x))
if way == "jax-export":
    checks = [jax.export.DisabledSafetyCheck.custom_call("xla_gpu_kernel_call")]
    data = jax.export.export(jitted, disabled_checks=checks)(x).serialize()
else:
    from jax.experimental import serialize_executable
    data = pickle.dumps(serialize_executable.serialize(jitted.lower(x).compile()))
open(path, "wb").write(data)
"""
LOAD_JAX = """
import pickle, sys, jax, jax.export, numpy as np
import xla_gpu.jax
way, path = sys.argv[1:]
data = open(path, "rb").read()
if way == "jax-export":
    call = jax.export.deserialize(bytearray(data)).call
else:
    from jax.experimental import serialize_executable
    call = serialize_executable.deserialize_and_load(*pickle.loads(data))
x = np.arange(1000, dtype=np.float32)
try:
    print("same" if np.array_equal(call(x), 4 * x) else "other values")
except Exception as error:
    print(error)
"""
MAKE_TORCH = """
import torch, torch_xla
import xla_gpu.torch as xg
from torch_xla.stablehlo import exported_program_to_stablehlo
like = torch.empty(1000, device="meta")
if way == "torch_xla-export":
    class Model(torch.nn.Module):
        def forward(self, x):
            return program(xg, like, x)
    exported_program_to_stablehlo(torch.export.export(Model(), (torch.from_numpy(x),), strict=False)).save(path)
else:
    try:
        print(program(xg, like, torch.from_numpy(x).to(torch_xla.device())).cpu().sum())
    except Exception as error:
        print(error)
"""
LOAD_TORCH = """
import sys, numpy as np, torch, torch_xla
import xla_gpu.torch
xla_gpu.torch.register_targets()
from torch_xla.stablehlo import StableHLOGraphModule
x = torch.arange(1000, dtype=torch.float32)
module = StableHLOGraphModule.load(sys.argv[2])
try:
    print("same" if torch.equal(module(x.to(torch_xla.device())).cpu(), 4 * x) else "other values")
except Exception as error:
    print(error)
"""
CACHED = (
    MAKE
    + MAKE_TORCH
    + """
from xla_gpu._runtime import library
import ctypes
counts = (ctypes.c_int64 * 4)()
library.load().cdll.xla_gpu_executable_cache_counts(counts)
print("loaded", counts[0], "compiled", counts[1])
"""
)
NEEDS_GPU = "kernel_call: (scale|add): a CUDA kernel runs on an NVIDIA GPU alone"


def python(code, *arguments, **environment):
    process = subprocess.run(
        *([sys.executable, "-c", code, *map(str, arguments)],),
        **dict(cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120),
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.strip()


def another_process(frontend, way, folder):
    make, load = (MAKE + MAKE_JAX, LOAD_JAX) if way.startswith("jax") else (MAKE + MAKE_TORCH, LOAD_TORCH)
    if way == "jax-export":
        pytest.importorskip("flatbuffers")
    on_cpu = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", "JAX_NUM_CPU_DEVICES": "1"}
    environment = {} if frontend.name.endswith("-cuda") else on_cpu
    python(make, way, folder / "program", **environment)
    # Neither NVRTC nor Triton may compile there.
    empty = {"XLA_GPU_CACHE_DIR": str(folder / "empty"), "TRITON_CACHE_DIR": str(folder / "empty")}
    out = python(load, way, folder / "program", **environment, **empty)
    assert not (folder / "empty").exists()
    return out


@pytest.mark.frontends("jax")
@pytest.mark.parametrize("way", ["jax-export", "jax-executable"])
def test_jax(frontend, way, tmp_path):
    assert re.search(NEEDS_GPU, another_process(frontend, way, tmp_path))


@pytest.mark.frontends("torch_xla")
def test_torch_xla(frontend, tmp_path):
    assert re.search(NEEDS_GPU, another_process(frontend, "torch_xla-export", tmp_path))


@pytest.mark.gpu
@pytest.mark.frontends("jax-cuda")
@pytest.mark.parametrize("way", ["jax-export", "jax-executable"])
def test_jax_on_a_gpu(frontend, way, tmp_path):
    assert another_process(frontend, way, tmp_path) == "same"


@pytest.mark.gpu
@pytest.mark.frontends("torch_xla-cuda")
def test_torch_xla_on_a_gpu(frontend, tmp_path):
    assert another_process(frontend, "torch_xla-export", tmp_path) == "same"


@pytest.mark.gpu
@pytest.mark.frontends("torch_xla-cuda")
def test_kept_executables(frontend, tmp_path):
    """The second process compiles nothing for XLA, and launches the kernels that the kept executable holds."""
    del frontend
    cache = {"XLA_GPU_EXECUTABLE_CACHE": str(tmp_path)}
    outs = [python(CACHED, "run", "none", **cache).splitlines()[-2:] for _ in range(2)]
    assert [out[0] for out in outs] == ["tensor(1998000.)"] * 2
    assert outs[0][1].startswith("loaded 0") and outs[1][1].endswith("compiled 0"), outs
