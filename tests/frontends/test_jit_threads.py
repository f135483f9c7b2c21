"""xla_gpu.torch.jit beside other threads."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")

import xla_gpu.torch as xg  # noqa: E402


def test_a_trace_beside_which_another_thread_takes_a_value_begins_anew():
    x, traces = torch.tensor([1.0, 2.0]).to(torch_xla.device()), []

    def function(y):
        traces.append(None)
        if len(traces) == 1:  # as another thread would
            (x * 3).cpu()
        return y + x

    assert xg.jit(function)(torch.ones(2)).tolist() == [2, 3] and len(traces) == 2


def test_threads_trace_and_call_in_turn():
    torch_xla.device()  # one thread starts the client
    totals, failed = {}, []

    def serve(number):
        try:
            step = xg.jit(lambda x: (x * number).sum())
            totals[number] = [step(torch.full((8,), float(count))) for count in range(5)]
        except Exception as error:  # reported by the main thread
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number in range(1, 4):
        assert [total.item() for total in totals[number]] == [8.0 * number * count for count in range(5)]
