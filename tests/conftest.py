"""Settings that must be made before any framework is imported, and the doors as parameters of tests."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tests import doors, machine

# torch_xla fixes its platform per process; PJRT_DEVICE=CPU on a machine with a GPU tests the host's doors there.
os.environ.setdefault("PJRT_DEVICE", machine.default_pjrt_device())
# JAX, torch_xla and eager PyTorch share one GPU in these tests; none may take most of its memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "doors(*names, platform=None, framework=None): which doors the fixture `door` takes; default: all"
    )


def pytest_generate_tests(metafunc):
    if "door" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("doors")
    names, wanted = (mark.args, mark.kwargs) if mark else ((), {})
    chosen = [
        door
        for door in doors.ALL.values()
        if (not names or door.name in names)
        and wanted.get("platform", door.platform) == door.platform
        and wanted.get("framework", door.framework) == door.framework
    ]
    assert chosen, f"{metafunc.definition.nodeid}: no door matches {mark}"
    marks = {"host": (), "cuda": (pytest.mark.gpu,)}
    metafunc.parametrize(
        "door", [pytest.param(d.name, marks=marks[d.platform]) for d in chosen], indirect=True, scope="session"
    )


@pytest.fixture(scope="session")
def door(request) -> doors.Door:
    door = doors.ALL[request.param]
    if reason := door.unavailable():
        pytest.skip(f"{door.name}: {reason}")
    return door


@pytest.fixture(scope="session")
def foreign() -> ctypes.CDLL:
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
