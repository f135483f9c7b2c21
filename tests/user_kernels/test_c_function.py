"""A kernel behind a plain C function: the handler that docs/guides/user_functions.md shows, built and called."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.common.machine import ROOT
from xla_gpu._runtime import library, targets

jax = pytest.importorskip("jax")

# The "existing library": it copies on the stream, through the driver, so that no CUDA headers are needed.
LAUNCH = r"""
#include <dlfcn.h>
#include <stdint.h>
void launch(void* stream, const float* x, float* y, int64_t n) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == 0) return;
  int (*copy)(uint64_t, uint64_t, uint64_t, void*) = dlsym(driver, "cuMemcpyDtoDAsync_v2");
  copy((uint64_t)y, (uint64_t)x, 4 * n, stream);
}
"""


@pytest.fixture(scope="module")
def handlers(tmp_path_factory):
    if shutil.which("g++") is None or shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("c_function")
    page = (ROOT / "docs" / "guides" / "user_functions.md").read_text()
    (handler,) = re.findall(r'^```cpp\n(#include "xla/ffi.*?)^```$', page, re.MULTILINE | re.DOTALL)
    (folder / "handler.cc").write_text(handler)
    (folder / "launch.c").write_text(LAUNCH)
    subprocess.run(["gcc", "-fPIC", "-c", "launch.c", "-o", "launch.o"], cwd=folder, check=True)
    command = ["g++", "-std=c++17", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir(), "handler.cc", "launch.o"]
    subprocess.run([*command, "-o", "libmine.so", "-ldl"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "libmine.so"))


def test_it_is_a_handler(handlers):
    """It answers with the FFI API of the headers, and with the trait that lets XLA capture it."""
    address = ctypes.cast(handlers.LaunchCuda, ctypes.c_void_p).value
    assert library.load().handler_version(address) >= (0, 1)
    major, minor, traits = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint32()
    cdll = library.load().cdll
    assert cdll.xla_gpu_handler_version(address, ctypes.byref(major), ctypes.byref(minor), ctypes.byref(traits)) is None
    assert traits.value & 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
    targets.register("test_c_function", handlers.LaunchCuda, platform="CUDA")


@pytest.mark.frontends("jax-cuda")
def test_it_runs_on_the_programs_stream(frontend, handlers):
    jax.ffi.register_ffi_target("test_c_function_jax", jax.ffi.pycapsule(handlers.LaunchCuda), platform="CUDA")
    x = np.zeros(1 << 20, np.float32)
    call = jax.ffi.ffi_call("test_c_function_jax", jax.ShapeDtypeStruct(x.shape, np.float32))

    def body(ops, x):
        for _ in range(10):
            x = call(x) + 1
        return x

    for _ in range(3):
        np.testing.assert_array_equal(frontend.run(body, {"x": x})[0], x + 10)
