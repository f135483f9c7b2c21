"""What a call costs inside an XLA program: 32 attention calls, each on the last one's result, in one program.

    python -m benchmarks.xla_calls --frontend eager jax    # a captured CUDA graph: the kernels alone; then jax.jit
    PJRT_DEVICE=GPU python -m benchmarks.xla_calls --frontend torch_xla    # torch.compile(backend="openxla")

Prints microseconds per call of programs that are queued one after the other. Where eager is the first front end, also
the difference to it: what XLA adds to the call. --device cpu runs the same programs on the host, where eager calls are
not captured.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
from benchmarks import loads
from tests.common import cases, machine

CALLS = 32
REPEATS = 20
QUEUED = 10  # programs in a row, so that the start of one hides behind the last


def seconds(run: Callable[[], object], wait: Callable[[object], object]) -> float:
    """Median wall time of one program of several that `run` starts; `wait` waits for what the last has returned."""
    wait(run())
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(QUEUED):
            result = run()
        wait(result)
        times.append((time.perf_counter() - begin) / QUEUED)
    return statistics.median(times)


def chain(attention: Callable, query, rest: tuple, scale: float):
    for _ in range(CALLS):
        query = attention(query, *rest, scale=scale)
    return query


def eager(arrays: list[np.ndarray], scale: float, device: str) -> float:
    import torch
    from tests.common.arrays import to_torch

    import xla_gpu.torch

    query, *rest = (to_torch(array, device) for array in arrays)
    program = functools.partial(chain, xla_gpu.torch.paged_attention, query, tuple(rest), scale)
    with torch.no_grad():
        if device == "cpu":
            return seconds(program, lambda result: result)
        from benchmarks import timing

        return timing.microseconds([program], REPEATS, minimum_calls=1) / 1e6


def jax(arrays: list[np.ndarray], scale: float, device: str) -> float:
    import jax

    import xla_gpu.jax

    where = jax.devices("cpu" if device == "cpu" else "cuda")[0]
    query, *rest = (jax.device_put(array, where) for array in arrays)
    program = jax.jit(functools.partial(chain, xla_gpu.jax.paged_attention, scale=scale))
    return seconds(lambda: program(query, tuple(rest)), lambda result: result.block_until_ready())


def torch_xla(arrays: list[np.ndarray], scale: float, device: str) -> float:
    os.environ.setdefault("PJRT_DEVICE", "CPU" if device == "cpu" else "GPU")
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    from tests.common.arrays import to_torch

    import xla_gpu.torch

    query, *rest = (to_torch(array, torch_xla.device()) for array in arrays)
    program = torch.compile(
        functools.partial(chain, xla_gpu.torch.paged_attention, scale=scale), backend="openxla", fullgraph=True
    )

    with torch.no_grad():
        return seconds(lambda: program(query, tuple(rest)), lambda result: xm.wait_device_ops())


FRONTENDS = {"eager": eager, "jax": jax, "torch_xla": torch_xla}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontend", choices=FRONTENDS, nargs="+", required=True, help="one or more")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    names = ("1x1k llama3-8b", "8x1k llama3-8b")
    parser.add_argument("--load", nargs="+", default=names, help="decode loads of loads.py (default %(default)s)")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the front ends share the GPU
    known = {case.name: case for case in loads.DECODE}
    for name in arguments.load:
        if name not in known:
            parser.error(f"--load: expected some of {', '.join(known)}, got {name}")
    if arguments.device == "cuda" and (reason := machine.no_gpu()):
        parser.error(f"expected a GPU, or --device cpu: {reason}")
    for name in arguments.load:
        case = known[name]
        inputs = cases.build(case, poison=False)
        arrays = [
            *(inputs.query, inputs.kv_cache, inputs.context_lens, inputs.block_tables),
            *(inputs.query_start_loc, inputs.num_seqs),
        ]
        times: dict[str, float] = {}
        for frontend in arguments.frontend:
            times[frontend] = FRONTENDS[frontend](arrays, case.softmax_scale, arguments.device) / CALLS * 1e6
            text = f"{frontend} {arguments.device}, {name}, {CALLS} calls in one program: "
            text += f"{times[frontend]:.2f} us per call"
            if frontend != "eager" and "eager" in times:
                text += f", {times[frontend] - times['eager']:+.2f} us beside eager"
            print(text, flush=True)


if __name__ == "__main__":
    main()
