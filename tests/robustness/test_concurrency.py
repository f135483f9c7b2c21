"""Threads, streams, devices and processes: concurrent calls give the results of single calls."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, frontends, layer_cases, machine, process, reference
from tests.common.cases import AttentionCase
from tests.fuzz.programs import program

CASE = AttentionCase(
    "threads", ((1, 300), (20, 60), (3, 40)), num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16"
)
THREADS, CALLS = 8, 200
THREAD_SAFE = pytest.mark.frontends("eager", "jax", "torch_xla", "eager-cuda", "jax-cuda", "torch_xla-cuda")


def two_gpus() -> str | None:
    return machine.no_gpu() or (None if machine.gpu_count() >= 2 else "one GPU; two are needed")


@THREAD_SAFE
def test_many_threads_through_one_program(frontend):
    batches = [cases.build(CASE, seed) for seed in range(THREADS)]
    step = program(frontend, "paged_attention_with_lse", CASE.options())
    want = [step(batch.arrays()) for batch in batches]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        got = list(pool.map(lambda i: step(batches[i % THREADS].arrays()), range(CALLS)))
    for i, results in enumerate(got):
        for g, w in zip(results, want[i % THREADS], strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name}: call {i}")


@pytest.mark.frontends("eager", "eager-cuda")
def test_threads_that_fail_and_threads_that_do_not(frontend, monkeypatch):
    """An error reaches the thread that made it, with its own text; frames and plans are shared."""
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    good = cases.build(CASE)
    (want,) = frontend.call("paged_attention", good.arrays(), **CASE.options())

    def call(i):
        if i % 2:
            return frontend.call("paged_attention", good.arrays(), **CASE.options())[0]
        bad = cases.build(CASE)
        bad.block_tables[i % 3, 0] = -1 - i
        with pytest.raises(ValueError, match=rf"sequence {i % 3}\).*got {-1 - i}$"):
            frontend.call("paged_attention", bad.arrays(), **CASE.options())
        return want

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for i, out in enumerate(pool.map(call, range(CALLS))):
            compare.assert_bitwise_equal(out, want, f"{frontend.name}: call {i}")


@pytest.mark.frontends("eager", "eager-cuda")
def test_all_operators_in_threads(frontend):
    """On GPUs each thread has a stream of its own. Between them the operators share plans, and counters in scratch."""
    import contextlib

    from tests.common.arrays import to_numpy

    samples = {name: (frontend.tensors(arrays), options) for name, (arrays, options) in layer_cases.samples().items()}

    def results(name):
        tensors, options = samples[name]
        out = getattr(frontend.module(), name)(**tensors, **options)
        return out if isinstance(out, tuple) else (out,)

    want = {name: [to_numpy(x) for x in results(name)] for name in samples}

    def work(thread):
        on_stream = contextlib.nullcontext()
        if frontend.platform == "cuda":
            import torch

            on_stream = torch.cuda.stream(torch.cuda.Stream())
        with on_stream:
            order = list(samples)[thread:] + list(samples)[:thread]
            return [(name, [to_numpy(x) for x in results(name)]) for _ in range(10) for name in order]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for of_thread in pool.map(work, range(4)):
            for name, got in of_thread:
                for g, w in zip(got, want[name], strict=True):
                    compare.assert_bitwise_equal(g, w, f"{frontend.name}: {name}")


@pytest.mark.parametrize("platform", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_frameworks_in_threads_at_once(platform):
    pair = [
        frontend
        for frontend in frontends.ALL.values()
        if frontend.platform == platform and frontend.name.startswith(("eager", "jax"))
    ]
    for frontend in pair:
        if reason := frontend.unavailable():
            pytest.skip(f"{frontend.name}: {reason}")
    arrays = cases.build(CASE).arrays()
    steps = [program(frontend, "paged_attention", CASE.options()) for frontend in pair]
    (want,) = steps[0](arrays)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for i, (out,) in enumerate(pool.map(lambda i: steps[i % 2](arrays), range(CALLS))):
            compare.assert_bitwise_equal(out, want, f"{pair[i % 2].name}: call {i}")


FIRST = """
import sys, threading
from tests.common import cases, compare, frontends
frontend = frontends.ALL[sys.argv[1]]
case = cases.AttentionCase("first", ((1, 30), (12, 20)), num_heads=4, num_kv_heads=2)
arrays = cases.build(case).arrays()
if frontend.framework == "jax": import jax
else: import torch
if frontend.name == "torch_xla-cuda":  # torch_xla's own start may hang with several threads: docs/reliability.md
    import torch_xla
    torch_xla.device()
barrier, results = threading.Barrier(8), []
def first():
    barrier.wait()
    try: results.append(frontend.call("paged_attention", arrays, **case.options())[0])
    except BaseException as e: results.append(e)
threads = [threading.Thread(target=first) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
want, = frontend.call("paged_attention", arrays, **case.options())
for out in results:
    if isinstance(out, BaseException): raise out
    compare.assert_bitwise_equal(out, want)
print(len(results))
"""


@THREAD_SAFE
def test_the_first_calls_of_a_process_from_eight_threads(frontend):
    """The library is loaded, targets are registered and plans are made once, whichever thread is first."""
    assert process.run(FIRST, frontend.name).split() == ["8"]


FORK = """
import os, sys
import numpy as np
from tests.common import cache_cases, cases, compare, frontends
frontend = frontends.ALL["eager"]
case = cases.AttentionCase("fork", ((1, 700), (90, 90)), num_heads=8, num_kv_heads=4)
arrays, update = cases.build(case).arrays(), cache_cases.build_cache(cache_cases.CACHE_CASES[1])
want, = frontend.call("paged_attention", arrays, **case.options())  # starts the library's threads
stored, = frontend.call("reshape_and_cache", update)

def child(depth):
    pid = os.fork()
    if pid: return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        for _ in range(3):
            out, = frontend.call("paged_attention", arrays, **case.options())
            compare.assert_bitwise_equal(out, want)
            compare.assert_bitwise_equal(frontend.call("reshape_and_cache", update)[0], stored)
        code = child(depth - 1) if depth else 0
    finally:
        os._exit(code)

codes = [child(1) for _ in range(4)]
out, = frontend.call("paged_attention", arrays, **case.options())
compare.assert_bitwise_equal(out, want)
print(codes)
"""


@pytest.mark.frontends("eager")
def test_children_and_grandchildren_after_use(frontend):
    del frontend
    assert process.run(FORK).split() == ["[0,", "0,", "0,", "0]"]


# ---- GPUs ------------------------------------------------------------------------------------------------------------
@pytest.mark.frontends("eager-cuda")
def test_two_streams(frontend):
    """Two streams at once, each with its own lengths and scratch; then one that must wait for the other."""
    import torch

    from tests.common.arrays import to_numpy

    batches = [cases.build(CASE, seed) for seed in (1, 2)]
    want = [frontend.call("paged_attention", batch.arrays(), **CASE.options())[0] for batch in batches]
    tensors = [frontend.tensors(batch.arrays()) for batch in batches]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(frontend.module().paged_attention(**tensors[turn % 2], **CASE.options()))
    torch.cuda.synchronize()
    for turn, out in enumerate(results):
        compare.assert_bitwise_equal(to_numpy(out), want[turn % 2], f"call {turn}")

    update = cache_cases.build_cache(cache_cases.CACHE_CASES[1])
    placed = frontend.tensors(update)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(20_000_000)
        frontend.module().reshape_and_cache_(**placed)
        written = streams[0].record_event()
    streams[1].wait_event(written)
    with torch.cuda.stream(streams[1]):
        copy = placed["kv_cache"].clone()
    streams[1].synchronize()
    compare.assert_bitwise_equal(to_numpy(copy), reference.reshape_and_cache(**update), "the second stream")


@pytest.mark.frontends("eager-cuda")
def test_two_graphs_replayed_on_two_streams(frontend):
    import torch

    from tests.common.arrays import to_numpy

    batches = [cases.build(CASE, seed) for seed in (3, 4)]
    want = [frontend.call("paged_attention", batch.arrays(), **CASE.options())[0] for batch in batches]
    captured = []
    for batch in batches:
        tensors = frontend.tensors(batch.arrays())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = frontend.module().paged_attention(**tensors, **CASE.options())
        captured.append((graph, out, torch.cuda.Stream(), tensors))
    for _ in range(200):
        for graph, _, stream, _ in captured:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, out, _, _), w in zip(captured, want, strict=True):
        compare.assert_bitwise_equal(to_numpy(out), w)


@pytest.mark.frontends("eager-cuda")
def test_a_thread_per_gpu(frontend):
    """The current device of each thread is never the tensors'."""
    if reason := two_gpus():
        pytest.skip(reason)
    import torch

    from tests.common.arrays import to_numpy, to_torch

    arrays = cases.build(CASE).arrays()
    update = cache_cases.build_cache(cache_cases.CACHE_CASES[1])
    (want,) = frontend.call("paged_attention", arrays, **CASE.options())

    def work(i):
        device = f"cuda:{i % 2}"
        torch.cuda.set_device((i + 1) % 2)
        tensors = {name: to_torch(x, device) for name, x in arrays.items()}
        out = frontend.module().paged_attention(**tensors, **CASE.options())
        stored = {name: to_torch(x, device) for name, x in update.items()}
        frontend.module().reshape_and_cache_(**stored)
        assert torch.cuda.current_device() == (i + 1) % 2
        return to_numpy(out), to_numpy(stored["kv_cache"])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, (out, cache) in enumerate(pool.map(work, range(64))):
            compare.assert_bitwise_equal(out, want, f"call {i}")
            compare.assert_bitwise_equal(cache, reference.reshape_and_cache(**update), f"call {i}")


@pytest.mark.frontends("jax-cuda")
def test_jax_on_the_second_gpu_and_on_both(frontend):
    if reason := two_gpus():
        pytest.skip(reason)
    import jax

    import xla_gpu.jax

    arrays = cases.build(CASE).arrays()
    (want,) = frontend.call("paged_attention", arrays, **CASE.options())
    step = jax.jit(lambda arrays: xla_gpu.jax.paged_attention(**arrays, **CASE.options()))
    placed = [jax.device_put(arrays, device) for device in jax.devices("cuda")[:2]]
    for _ in range(20):
        for out in [step(x) for x in placed]:  # both are queued before the first is waited for
            compare.assert_bitwise_equal(np.asarray(out), want)
