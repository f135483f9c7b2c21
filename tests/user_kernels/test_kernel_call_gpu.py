"""kernel_call on a GPU, in every front end."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.common.machine import ROOT
from tests.user_kernels import sources
from xla_gpu._user_kernels.cuda_kernel import cuda_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.frontends("eager-cuda", "jax-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled"),
]

X = np.arange(1000, dtype=np.float32)


class Like:
    """A result's shape and dtype."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


def test_values_and_numbers(frontend):
    kernel = cuda_kernel(sources.SCALE, "scale")
    for factor in (2.0, -0.0, 2.0):
        (y,) = frontend.run(
            lambda ops, x, factor=factor: ops.kernel_call(kernel, x, grid=8, block=128)(x, factor, 1000), {"x": X}
        )
        np.testing.assert_array_equal(y, X * np.float32(factor))
        assert np.array_equal(np.signbit(y), np.signbit(X * np.float32(factor)))


@pytest.mark.frontends("eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_numbers_of_every_width(frontend):
    kernel = cuda_kernel(sources.WIDTHS, "widths")
    numbers = (
        *(np.int8(-100), np.uint8(200), np.int16(-30000), np.uint16(60000), np.int32(-(2**31)), np.uint32(2**32 - 1)),
        *(np.int64(-(2**53)), np.uint64(2**63), np.float16(0.1), np.float32(0.1), np.float64(0.1), np.bool_(True)),
    )
    call = lambda ops, x: ops.kernel_call(kernel, Like((13,), np.float64), grid=1, block=32)(x, *numbers, None)  # noqa: E731
    (y,) = frontend.run(call, {"x": np.zeros(1, np.float64).astype(np.float64)})
    np.testing.assert_array_equal(y, [*map(float, numbers), 1.0])


def test_python_numbers_take_the_parameters_width(frontend):
    kernel = cuda_kernel(sources.WIDTHS, "widths")
    numbers = (-1, 255, -2, 65535, -3, 2**32 - 1, -(2**40), 2**63, np.float16(0.5), 0.1, 0.1, True)
    if frontend.name.endswith("compiled"):
        pytest.skip("a float of 2 bytes needs NumPy's scalar, of which torch.compile makes a tensor")
    call = lambda ops, x: ops.kernel_call(kernel, Like((13,), np.float64), grid=1, block=32)(x, *numbers, None)  # noqa: E731
    (y,) = frontend.run(call, {"x": np.zeros(1)})
    np.testing.assert_array_equal(y, [*numbers[:8], 0.5, np.float32(0.1), 0.1, 1, 1])


def test_alias_keeps_the_operand(frontend):
    kernel = cuda_kernel(sources.INCREMENT, "increment")

    def body(ops, x):
        return ops.kernel_call(kernel, x, grid=8, block=128, input_output_aliases={0: 0})(x, 1000), x + 0

    y, kept = frontend.run(body, {"x": X})
    np.testing.assert_array_equal(y, X + 1)
    np.testing.assert_array_equal(kept, X)


@pytest.mark.frontends("eager-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled")
def test_in_place(frontend):
    kernel = cuda_kernel(sources.INCREMENT, "increment")

    def body(ops, x):
        y = ops.kernel_call_(kernel, x, grid=8, block=128, input_output_aliases={0: 0})(x, 1000)
        return y, x + 0

    for result in frontend.run(body, {"x": X}):
        np.testing.assert_array_equal(result, X + 1)


def test_dynamic_shared_memory_above_48_kib(frontend):
    kernel = cuda_kernel(sources.SHARED, "reverse")
    for kib in (4, 100, 200, 60):
        (y,) = frontend.run(
            lambda ops, x, n=kib * 256: ops.kernel_call(kernel, x, grid=1, block=256, shared=4 * n)(x, n),
            {"x": X[:256]},
        )
        np.testing.assert_array_equal(y, X[:256][::-1])


@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_clusters(frontend, cluster):
    kernel = cuda_kernel(sources.CLUSTER, "ranks")
    result = Like((16, 2), np.int32)
    (y,) = frontend.run(
        lambda ops, x: ops.kernel_call(kernel, result, grid=16, block=32, cluster=cluster)(x), {"x": X[:1]}
    )
    np.testing.assert_array_equal(y, [[i % cluster, cluster] for i in range(16)])


def test_cooperative_with_scratch(frontend):
    kernel = cuda_kernel(sources.COOPERATIVE, "total")

    def body(ops, x, arrived):
        call = ops.kernel_call(*(kernel, [arrived, x]), grid=64, block=1, cooperative=True, input_output_aliases={1: 0})
        return call(x, arrived, ops.Scratch(64 * 4), ops.Result(1))

    arrived, y = frontend.run(body, {"x": X[:64], "arrived": np.zeros(1, np.int32)})
    np.testing.assert_array_equal(y, np.full(64, X[:64].sum()))
    assert arrived[0] == 64


def test_cooperative_launch_that_is_too_large(frontend):
    """The driver refuses it before anything runs."""
    kernel = cuda_kernel(sources.SCALE, "scale")
    call = lambda ops, x: ops.kernel_call(kernel, x, grid=65536, block=1024, cooperative=True)(x, 2.0, 0)  # noqa: E731
    with pytest.raises(Exception, match=r"kernel_call: scale: the launch: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        frontend.run(call, {"x": X})
    works(frontend)


def test_dependent_launches(frontend):
    kernel = cuda_kernel(sources.DEPENDENT, "twice")

    def body(ops, x):
        for _ in range(8):
            x = ops.kernel_call(kernel, x, grid=8, block=128, pdl=True)(ops.Result(0), x, 1000)
        return x

    np.testing.assert_array_equal(frontend.run(body, {"x": X})[0], X * 256)


def test_template(frontend):
    kernel = cuda_kernel(sources.TEMPLATE, "multiply<int, 3>")
    x = np.arange(32, dtype=np.int32)
    (y,) = frontend.run(lambda ops, x: ops.kernel_call(kernel, x, grid=1, block=32)(x), {"x": x})
    np.testing.assert_array_equal(y, 3 * x)


# ---- Errors, after which the next call works -------------------------------------------------------------------------
def works(frontend):
    kernel = cuda_kernel(sources.SCALE, "scale")
    (y,) = frontend.run(lambda ops, x: ops.kernel_call(kernel, x, grid=8, block=128)(x, 3.0, 1000), {"x": X})
    np.testing.assert_array_equal(y, X * 3)


def test_cubin_for_another_gpu(frontend):
    kernel = cuda_kernel(sources.SCALE, "scale", arch="sm_120a")
    with pytest.raises(
        Exception, match=r"kernel_call: scale: cubin: expected code for GPU 0 of.*got a cubin for sm_120a"
    ):
        frontend.run(lambda ops, x: ops.kernel_call(kernel, x, grid=8, block=128)(x, 2.0, 1000), {"x": X})
    works(frontend)


def test_too_much_shared_memory(frontend):
    kernel = cuda_kernel(sources.SHARED, "reverse")
    call = lambda ops, x: ops.kernel_call(kernel, x, grid=1, block=256, shared=300 << 10)(x, 256)  # noqa: E731
    with pytest.raises(Exception, match=r"kernel_call: reverse: shared: expected at most \d+ bytes on GPU 0"):
        frontend.run(call, {"x": X[:256]})
    works(frontend)


FAULT = """
import os, sys, numpy as np
from tests.common import frontends
from tests.user_kernels import sources
from xla_gpu._user_kernels.cuda_kernel import cuda_kernel
frontend = frontends.ALL[sys.argv[1]]
bad, good = cuda_kernel(sources.FAULT, "writes_to_null"), cuda_kernel(sources.SCALE, "scale")
for kernel, arguments in ((bad, (None,)), (good, (2.0, 32))):
    try:
        call = lambda ops, x: ops.kernel_call(kernel, x, grid=1, block=32)(x, *arguments)
        frontend.run(call, {"x": np.ones(32, np.float32)})
        print("no error")
    except Exception as error:
        print(str(error).replace(chr(10), " ")[:1000])
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.frontends("eager-cuda", "jax-cuda", "torch_xla-cuda")
def test_a_kernel_that_faults_is_named(frontend):
    environment = {**os.environ, "XLA_GPU_CHECK_INPUTS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", FAULT, frontend.name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = process.stdout.splitlines()
    assert lines, process.stderr[-2000:]
    assert "kernel_call: writes_to_null: the kernel faulted: cudaErrorIllegalAddress" in lines[0], process.stdout
    assert "no error" not in process.stdout


# ---- CUDA graphs and executables -------------------------------------------------------------------------------------
@pytest.mark.frontends("eager-cuda")
def test_first_launch_inside_a_capture(frontend):
    """The kernel is loaded while the stream is captured, with its shared memory above 48 KiB."""
    del frontend
    import torch

    import xla_gpu.torch as xg

    kernel = cuda_kernel(sources.SHARED + "// in a capture", "reverse")
    x = torch.arange(256, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = xg.kernel_call(kernel, x, grid=1, block=256, shared=100 << 10)(x, 25 << 8)
    x += 1
    graph.replay()
    assert torch.equal(y, x.flip(0))


EXPORTED = """
import sys, jax, jax.export, numpy as np
import xla_gpu.jax
call = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call
np.testing.assert_array_equal(call(np.arange(1000, dtype=np.float32)), np.arange(1000) * 2)
print("same")
"""


@pytest.mark.frontends("jax-cuda")
def test_exported_program_in_another_process(frontend, tmp_path):
    """The program carries the cubin: the other process neither compiles nor knows the kernel."""
    del frontend
    pytest.importorskip("flatbuffers")
    import jax
    import jax.export

    import xla_gpu.jax as xg

    kernel = cuda_kernel(sources.SCALE, "scale")
    call = jax.jit(lambda x: xg.kernel_call(kernel, x, grid=8, block=128)(x, 2.0, 1000))
    checks = [jax.export.DisabledSafetyCheck.custom_call("xla_gpu_kernel_call")]
    file = tmp_path / "program"
    file.write_bytes(jax.export.export(call, disabled_checks=checks)(X).serialize())
    command = [sys.executable, "-c", EXPORTED, str(file)]
    environment = {**os.environ, "XLA_GPU_CACHE_DIR": str(tmp_path / "empty")}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert process.stdout.strip() == "same", process.stderr[-3000:]
