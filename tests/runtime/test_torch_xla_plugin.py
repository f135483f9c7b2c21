"""PJRT_DEVICE=GPU where something is missing: an exception that says what, and `import torch_xla` that always works."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_xla")

from tests.common import machine, process

CODE = """
import torch_xla
from torch_xla.experimental import plugins
from xla_gpu._torch_xla.plugin import GpuPlugin

if not isinstance(plugins._plugin_registry.get("GPU"), GpuPlugin):  # a checkout: no entry points
    plugins.use_dynamic_plugins()
    plugins.register_plugin("GPU", GpuPlugin())
try:
    torch_xla.device()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def run(code: str = CODE, **environment: str) -> str:
    return process.run(code, **{"PJRT_DEVICE": "GPU", **environment})


@pytest.mark.skipif(machine.gpu_count() > 0, reason="this machine has a GPU")
def test_without_plugin_or_driver():
    text = run(XLA_GPU_PJRT_PLUGIN="")
    assert text.startswith("CompatibilityError: PJRT_DEVICE=GPU")
    assert ".[cuda12]" in text or "libcuda.so.1" in text


def test_a_plugin_that_is_not_there():
    text = run(XLA_GPU_PJRT_PLUGIN="/nowhere.so")
    assert text == "CompatibilityError: XLA_GPU_PJRT_PLUGIN names /nowhere.so, which is not a file"


def test_a_truncated_plugin(fake_plugin, tmp_path):
    cut = tmp_path / "xla_cuda_plugin.so"
    data = fake_plugin.read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    text = run(XLA_GPU_PJRT_PLUGIN=str(cut))
    assert text.startswith("CompatibilityError") and str(cut) in text and "truncated" in text


@pytest.mark.parametrize(("mode", "fragment"), [("old", "PJRT API 0.50"), ("null", "GetPjrtApi returned null")])
def test_a_plugin_that_does_not_fit(fake_plugin, mode, fragment):
    text = run(XLA_GPU_PJRT_PLUGIN=str(fake_plugin), FAKE_PJRT=mode)
    assert text.startswith("CompatibilityError: PJRT_DEVICE=GPU") and fragment in text


def test_a_plugin_that_fails(fake_plugin):
    """Its own words reach Python."""
    assert run(XLA_GPU_PJRT_PLUGIN=str(fake_plugin)) == "RuntimeError: the fake plug-in does nothing else"


def test_a_missing_library(fake_plugin, tmp_path):
    text = run(XLA_GPU_PJRT_PLUGIN=str(fake_plugin), XLA_GPU_LIBRARY=str(tmp_path / "nowhere.so"))
    assert text.startswith("LibraryError") and "nowhere.so" in text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"preallocate": False}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, {"preallocate": True}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"memory_fraction": 0.5}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.25"}, {"memory_fraction": 0.25}),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "PLATFORM"}, {"allocator": "platform"}),
        ({"XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": "64"}, {"collective_memory_size": 64 << 20}),
    ],
)
def test_client_options(environment, expected):
    """The variables that JAX reads, with JAX's meaning."""
    from xla_gpu._torch_xla.plugin import client_options

    assert client_options(environment) == {"platform_name": "cuda", "allocator": "default", **expected}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "magic"}, "expected one of default, platform, bfc, cuda_async, got magic"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "half"}, "XLA_PYTHON_CLIENT_MEM_FRACTION: expected a number, got 'half'"),
        ({"XLA_CLIENT_MEM_FRACTION": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "1"}, "got both"),
    ],
)
def test_bad_client_options(environment, text):
    from xla_gpu._torch_xla.plugin import client_options

    with pytest.raises(ValueError, match=text):
        client_options(environment)


def test_one_gpu_for_each_process_of_torchrun(monkeypatch):
    from xla_gpu._torch_xla.plugin import GpuPlugin
    from xla_gpu.errors import CompatibilityError

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    alone, many = GpuPlugin(), GpuPlugin()
    alone.configure_multiprocess(0, 1)
    assert not alone.requires_xla_coordinator() and "num_nodes" not in alone.client_create_options()
    with pytest.raises(CompatibilityError, match="expected torchrun to start 2 processes, which sets RANK, WORLD_SIZE"):
        many.configure_multiprocess(1, 2)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    many.configure_multiprocess(1, 4)
    options = many.client_create_options()
    assert many.requires_xla_coordinator()
    assert (options["node_id"], options["num_nodes"], options["visible_devices"]) == (5, 8, [1])


@pytest.mark.gpu
def test_the_threads_gpu_stays_the_current_one():
    if machine.default_pjrt_device() != "GPU" or machine.gpu_count() < 2:
        pytest.skip("needs two GPUs and JAX's CUDA plug-in")
    code = f"""
import ctypes
{CODE}
device = ctypes.c_int(-1)
assert ctypes.CDLL("libcuda.so.1").cuCtxGetDevice(ctypes.byref(device)) == 0
print(device.value, torch_xla.device())
"""
    assert run(code).startswith("0 ")
