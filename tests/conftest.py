"""Settings that must be made before any framework is imported, and the front ends as parameters of tests."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tests.common import frontends, machine

# torch_xla fixes its platform per process; PJRT_DEVICE=CPU on a machine with a GPU tests the host's front ends there.
os.environ.setdefault("PJRT_DEVICE", machine.default_pjrt_device())
# JAX, torch_xla and eager PyTorch share one GPU in these tests; none may take most of its memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Several CPU devices for tests/distributed; other tests use the first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "frontends(*names, platform=None, framework=None): which frontends the fixture `frontend` takes; default: all",
    )


def pytest_generate_tests(metafunc):
    if "frontend" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("frontends")
    names, wanted = (mark.args, mark.kwargs) if mark else ((), {})
    chosen = [
        frontend
        for frontend in frontends.ALL.values()
        if (not names or frontend.name in names)
        and wanted.get("platform", frontend.platform) == frontend.platform
        and wanted.get("framework", frontend.framework) == frontend.framework
    ]
    assert chosen, f"{metafunc.definition.nodeid}: no frontend matches {mark}"
    marks = {"host": (), "cuda": (pytest.mark.gpu,)}
    metafunc.parametrize(
        "frontend", [pytest.param(d.name, marks=marks[d.platform]) for d in chosen], indirect=True, scope="session"
    )


@pytest.fixture(scope="session")
def frontend(request) -> frontends.Frontend:
    frontend = frontends.ALL[request.param]
    if reason := frontend.unavailable():
        pytest.skip(f"{frontend.name}: {reason}")
    return frontend


@pytest.fixture(scope="session")
def third_party() -> ctypes.CDLL:
    """The library of ffi/testing: handlers that know nothing of ours."""
    path = os.environ.get("XLA_GPU_TEST_HANDLERS")
    if not path:
        pytest.skip(
            "XLA_GPU_TEST_HANDLERS is not set; `make test` builds them, or CMake with -DXLA_GPU_TEST_HANDLERS=ON"
        )
    library = ctypes.CDLL(path)
    library.xla_gpu_test_ticks.restype = ctypes.c_int64
    library.xla_gpu_test_stage_calls.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="session")
def fake_plugin() -> Path:
    """The PJRT plug-in without a device, of ffi/testing."""
    handlers = os.environ.get("XLA_GPU_TEST_HANDLERS")
    path = Path(handlers).with_name("libxla_gpu_fake_pjrt_plugin.so") if handlers else None
    if path is None or not path.is_file():
        pytest.skip("the fake plug-in stands beside XLA_GPU_TEST_HANDLERS; `make test` builds both")
    return path
