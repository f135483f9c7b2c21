"""Calls of users' kernels on eager tensors: which are remembered, and which need PyTorch's dispatcher."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

from tests.user_kernels import sources  # noqa: E402 - after what may be missing
from xla_gpu._torch import user_call  # noqa: E402

X = torch.zeros(1000)


@pytest.fixture(scope="module")
def scale(compiler):
    return xg.cuda_kernel(sources.SCALE, "scale", arch="sm_90a")


@pytest.fixture
def launched(monkeypatch):
    """The custom calls that would run."""
    calls = []

    def run(call, tensors, in_place=False):
        calls.append(call)
        operands = {result: operand for operand, result in call.aliases}
        return tuple(
            tensors[operands[i]] if in_place and i in operands else torch.zeros(result.shape)
            for i, result in enumerate(call.results)
        )

    monkeypatch.setattr(user_call, "run", run)
    return calls


def attribute(call, name, dtype):
    (value,) = (value for each, value in call.attributes if each == name)
    return np.frombuffer(value.data, dtype)


def bits(call):
    """Of the second parameter of SCALE, a float."""
    return attribute(call, "parameters", np.int64)[1:].reshape(-1, 3)[1, 1].astype(np.int32)


def test_a_call_is_bound_once(scale, launched):
    call = xg.kernel_call(scale, X, grid=8, block=128)
    for _ in range(3):
        assert call(X, 2.0, 1000).shape == (1000,)
    assert len(launched) == 3 and len(set(launched)) == 1 and len(call._direct) == 1


def test_other_arguments_are_another_call(scale, launched):
    call = xg.kernel_call(scale, X, grid=8, block=128)
    numbers = (0.0, -0.0, math.nan, math.nan, 1.0, np.float32(1), np.float32(-0.0), np.float32(0.0))
    for number in numbers:
        call(X, number, 1000)
    assert [bits(each) for each in launched] == [np.float32(x).view(np.int32) for x in numbers]
    call(X[:500], 1.0, 500)
    call(X.double(), 1.0, 1000)
    assert [each.operands[0].shape for each in launched[-2:]] == [(500,), (1000,)]
    assert launched[-1].operands[0].dtype == "float64"
    with pytest.raises(ValueError, match="kernel_call: scale: arguments: expected 4"):
        call(X, 1.0)
    call(X, 1, 1000)
    assert bits(launched[-1]) == 1  # an int in the place of a float is another call than 1.0


def test_how_many_are_remembered(scale, launched, monkeypatch):
    monkeypatch.setattr(user_call, "_MAX_DIRECT", 4)
    call = xg.kernel_call(scale, X, grid=8, block=128)
    for i in range(10):
        call(X, float(i), 1000)
    assert len(call._direct) <= 4 and len(launched) == 10


def test_checks_of_inputs_are_another_call(scale, launched, monkeypatch):
    call = xg.kernel_call(scale, X, grid=8, block=128)
    call(X, 2.0, 1000)
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    call(X, 2.0, 1000)
    assert len(set(launched)) == 2 and len(call._direct) == 2


def test_what_the_dispatcher_must_see(scale, launched, monkeypatch):
    """Fake tensors, tracers, vmap and profilers get the operator; gradients get their error."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    call = xg.kernel_call(scale, X, grid=8, block=128)
    directly = []
    monkeypatch.setattr(call, "_run_directly", lambda bound, operands: directly.append(operands))
    call(X, 2.0, 1000)
    with FakeTensorMode() as mode:
        assert type(call(mode.from_tensor(X), 2.0, 1000)).__name__ == "FakeTensor"
    graph = make_fx(lambda x: call(x, 2.0, 1000))(X)
    assert "xla_gpu.kernel_call" in graph.code
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(X, 2.0, 1000)
    assert any(event.name == "xla_gpu::kernel_call" for event in profile.events())
    with pytest.raises(Exception, match="kernel_call: operands"):
        call(X.clone().requires_grad_(), 2.0, 1000)
    with torch.no_grad():
        call(X.clone().requires_grad_(), 2.0, 1000)
    assert len(directly) == 2  # the first call, and the last


def test_in_place_returns_the_operand(launched):
    kernel = xg.cuda_kernel(sources.INCREMENT, "increment", arch="sm_90a")
    call = xg.kernel_call_(kernel, X, grid=8, block=128, input_output_aliases={0: 0})
    x = X.clone()
    versions = []
    for _ in range(2):
        assert call(x, 1000) is x
        versions.append(x._version)
    assert versions[1] == versions[0] + 1


def test_a_grid_function_is_asked_each_time(launched):
    pytest.importorskip("triton")
    from tests.user_kernels import triton_functions as functions

    programs, grids = 4, []
    call = xg.triton_call(functions.add, X, grid=lambda meta: (programs,), BLOCK=256)
    for programs in (4, 4, 2):  # noqa: B007 - the grid function sees it
        call(X, X, 1000)
        grids.append(attribute(launched[-1], "grid", np.int64)[0])
    assert grids == [4, 4, 2] and launched[0] is launched[1]


def test_vmap_launches_once_for_each_element(scale, launched):
    call = xg.kernel_call(scale, X, grid=8, block=128)
    assert torch.vmap(lambda x: call(x, 2.0, 1000))(torch.zeros(3, 1000)).shape == (3, 1000)
    assert len(launched) == 3
    across = torch.vmap(lambda x: call(x, 2.0, 1000), in_dims=1, out_dims=1)
    assert across(torch.zeros(1000, 2)).shape == (1000, 2) and len(launched) == 5
    with pytest.raises(ValueError, match=r"kernel_call: torch\.vmap: expected a batch of 1 or more, got 0"):
        torch.vmap(lambda x: call(x, 2.0, 1000))(torch.zeros(0, 1000))
    kernel = xg.cuda_kernel(sources.INCREMENT, "increment", arch="sm_90a")
    update = xg.kernel_call_(kernel, X, grid=8, block=128, input_output_aliases={0: 0})
    with pytest.raises(RuntimeError, match=r"kernel_call_ cannot run under torch\.vmap"):
        torch.vmap(lambda x: update(x, 1000))(torch.zeros(3, 1000))
