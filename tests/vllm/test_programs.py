"""Programs: captured once, launched through torch_xla or directly, compiled in threads, and what they refuse."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_xla

from xla_gpu._runtime import executable_cache
from xla_gpu._torch_xla import direct_launch
from xla_gpu.vllm.program import FallbackError, Program, compilations, compiled_together


def test_program_runs_without_compiling_and_takes_its_state_over():
    device = torch_xla.device()
    weight = torch.tensor([2.0, 3.0]).to(device)
    state, x = torch.zeros(2, device=device), torch.tensor([1.0, 1.0]).to(device)

    def step(x, state):
        state.add_(x * weight)
        return [state.sum()]

    program = Program("test", step, [x], [state])
    assert state.cpu().tolist() == [0, 0]  # tracing changed nothing
    compiled = compilations()
    states = [state]
    for number in (1, 2, 3):
        (total,), states = program([x], states)
        assert total.item() == 5.0 * number
    assert states[0].cpu().tolist() == [6, 9] and compilations() == compiled
    with pytest.raises(RuntimeError):  # its memory is the program's
        state.cpu()


@pytest.mark.parametrize("seen", [True, False])
def test_programs_are_recorded_once_and_launched_directly(monkeypatch, seen):
    """Against an adapter that is none: what programs of a warm-up do with what it recorded, or did not."""
    device = torch_xla.device()
    recorded, launched, said = [], [], []

    class Launch:
        def __init__(self, handle, places, state_order, forms, keep):
            launched.append((handle, places, state_order, forms))

        def note(self, tensor, **which):
            launched.append(which)

        def __call__(self, inputs, state):
            return ["directly"], state

    def record(run, arguments, results):
        recorded.append((arguments, results))
        return (len(recorded) if seen or len(recorded) == 1 else None), run()

    monkeypatch.setattr(direct_launch, "available", lambda: True)
    monkeypatch.setattr(direct_launch, "record", record)
    monkeypatch.setattr("xla_gpu._torch_xla.program.DirectLaunch", Launch)
    logger = SimpleNamespace(debug=lambda *_: None, warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr("xla_gpu._torch_xla.program.logger", logger)
    state, x = torch.zeros(2, device=device), torch.tensor([1.0, 1.0]).to(device)

    def step(x, state):
        state.add_(x)
        return [state.sum()]

    with compiled_together(1):
        first, second = Program("first", step, [x], [state]), Program("second", lambda x: [x + x], [x])
    assert state.cpu().tolist() == [1, 1]  # the first one ran once
    assert recorded == [(2, 2), (1, 1)]
    if not seen:
        assert said == ["second: the adapter did not see its launch: steps go through torch_xla"]
        (doubled,), _ = second([np.array([1.0, 2.0], np.float32)])
        assert first.direct is second.direct is None and doubled.cpu().tolist() == [2, 4]
        return
    (handle, places, state_order, forms), *notes = launched[:3]
    assert (handle, state_order, forms) == (1, [0], [(torch.Size([]), torch.float32)]) and sorted(places) == [0, 1]
    assert notes == [{"argument": places[0]}, {"result": 1}]
    assert first([x], [state]) == (["directly"], [state]) and second([x])[0] == ["directly"]


@pytest.mark.parametrize("direct", [False, True])
def test_large_inputs_are_not_kept_while_programs_are_made(monkeypatch, direct):
    """They would take memory that XLA tries kernels in."""
    monkeypatch.setattr(direct_launch, "available", lambda: direct)
    monkeypatch.setattr(direct_launch, "record", lambda run, arguments, results: (None, run()))
    device = torch_xla.device()
    inputs = [torch.ones(size, device=device) for size in (4, 1 << 20)]
    alive = [weakref.ref(tensor) for tensor in inputs]
    with compiled_together(1):
        program = Program("large", lambda small, large: [small.sum() + large.sum()], inputs)
        del inputs
        gc.collect()
        assert [reference() is not None for reference in alive] == [direct, False]
    given = [torch.ones(size, device=device) for size in (4, 1 << 20)]
    torch_xla.sync()
    (total,), _ = program(given)
    assert total.item() == 4 + (1 << 20)


def test_program_refuses_what_would_run_on_the_host():
    """Each time: a program would go on with what the host computed while it was captured."""
    x = torch.zeros(4, dtype=torch.int32, device=torch_xla.device())
    for _ in range(2):
        with pytest.raises(FallbackError, match="aten::view_copy"):
            Program("test", lambda x: [x.view(torch.float32)], [x])


def unknown_call(x: torch.Tensor) -> torch.Tensor:
    """A program with it cannot be compiled."""
    return torch_xla._XLAC._xla_custom_call([x], "no_such_target", [[2]], [torch.float32], False, "", 2, {})[0]


@pytest.mark.parametrize("failures", [1, 2])
def test_programs_whose_compilation_fails_are_captured_again(failures):
    """As on a GPU: the first capture leaves programs to be compiled together, which the memory may be too small for."""
    device = torch_xla.device()
    state, x = torch.zeros(2, device=device), torch.tensor([1.0, 2.0]).to(device)
    captures = []

    def step(x, state):
        captures.append(None)
        state.add_(x)
        return [unknown_call(state) if len(captures) <= failures else state * 2]

    with compiled_together(2):
        first = Program("first", step, [x], [state])
        second = Program("second", lambda x, state: [state.sub_(x) * 3], [x], [state])
    assert len(captures) == failures + 1 and first.outputs == [(torch.Size([2]), torch.float32)]
    one_more = (x + 1).cpu().to(device)
    compiled = compilations()
    (doubled,), states = first([x], [state])
    (tripled,), states = second([one_more], states)
    assert doubled.cpu().tolist() == [2, 4] and tripled.cpu().tolist() == [-3, -3]
    assert states[0].cpu().tolist() == [-1, -1]
    assert compilations() == compiled


def test_a_program_that_cannot_be_compiled_says_so():
    x = torch.zeros(2, device=torch_xla.device())
    with pytest.raises((RuntimeError, ValueError), match="no_such_target"), compiled_together(2):
        Program("wrong", lambda x: [unknown_call(x)], [x])
    assert torch.equal(Program("right", lambda x: [x + 1], [x])([x])[0][0].cpu(), torch.ones(2))


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_leaves_no_program_to_be_compiled(monkeypatch, threads):
    """On a GPU the recorded programs are dropped; the next ones are compiled for themselves."""
    calls = []

    @contextlib.contextmanager
    def compile_recorded(threads):
        calls.append(threads)
        try:
            yield 0
        except KeyError:
            calls.append("dropped")
            raise

    monkeypatch.setattr(executable_cache, "compile_recorded", compile_recorded)
    x = torch.zeros(2, device=torch_xla.device())
    with pytest.raises(KeyError, match="weights"), compiled_together(threads):
        assert calls == [threads]  # they compile while programs are captured
        Program("fails once", lambda x: [unknown_call(x)], [x])
        raise KeyError("weights")
    assert calls == [threads, "dropped"]
    assert torch.equal(Program("right", lambda x: [x + 1], [x])([x])[0][0].cpu(), torch.ones(2))
