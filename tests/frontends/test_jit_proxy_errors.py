"""Errors of torch_xla while a program of xla_gpu.torch.jit and its proxy are recorded or forgotten: nothing is kept."""

from __future__ import annotations

import contextlib
import ctypes as ct
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_xla")

from xla_gpu._torch_xla import proxy_programs
from xla_gpu._torch_xla.proxy_programs import ProxyProgram


def fail(*_):
    raise RuntimeError("of this test")


@pytest.fixture
def destroyed(monkeypatch):
    """What the library was told to destroy."""
    handles = []
    cdll = SimpleNamespace(
        xla_gpu_execution_note=lambda: None,
        xla_gpu_execution_record=lambda: None,
        xla_gpu_execution_take=lambda: 5,
        xla_gpu_proxy_expect=lambda recorded, places, number: None,
        xla_gpu_proxy_take=lambda: 7,
        xla_gpu_execution_destroy=lambda handle: handles.append(handle.value),
        xla_gpu_proxy_destroy=lambda handle: handles.append(handle.value),
    )
    monkeypatch.setattr(proxy_programs.library, "load", lambda: SimpleNamespace(cdll=cdll))
    return handles


def test_a_proxy_whose_last_wait_tells_of_an_error(destroyed, monkeypatch):
    monkeypatch.setattr(proxy_programs.xm, "wait_device_ops", fail)
    proxy = object.__new__(ProxyProgram)
    proxy._handle, proxy._recorded = ct.c_void_p(7), ct.c_void_p()
    with pytest.raises(RuntimeError, match="of this test"):
        proxy.__del__()
    proxy._handle = ct.c_void_p()
    assert destroyed == [7]


@pytest.mark.parametrize("fails", ["program", "proxy"])
def test_an_execution_that_fails_while_it_is_expected(destroyed, fails):
    def program(name):
        return SimpleNamespace(
            name=name,
            arguments=lambda given: [],
            num_arguments=lambda: 0,
            places=list,
            run=fail if name == fails else lambda given: [],
        )

    proxy = object.__new__(ProxyProgram)
    proxy._handle, proxy._recorded = ct.c_void_p(), ct.c_void_p()
    proxy._proxy, proxy._program = program("proxy"), program("program")
    for name in ("program", "proxy"):
        with pytest.raises(RuntimeError, match="of this test") if name == fails else contextlib.nullcontext():
            proxy.run([])
    proxy.__del__()
    proxy._handle, proxy._recorded = ct.c_void_p(), ct.c_void_p()
    assert destroyed == [5, 7]
