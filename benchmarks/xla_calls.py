"""What a call costs inside an XLA program: 32 attention calls, each on the last one's result, in one program.

    python -m benchmarks.xla_calls --door eager                    # a captured CUDA graph: the kernels alone
    python -m benchmarks.xla_calls --door jax                      # jax.jit
    PJRT_DEVICE=GPU python -m benchmarks.xla_calls --door torch_xla    # torch.compile(backend="openxla")

Prints microseconds per call. On one machine, the difference to eager is XLA's price for the call. --device cpu runs the
same programs on the host, where eager calls are not captured.
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
from tests import cases

CALLS = 32
REPEATS = 30


def seconds(run: Callable[[], object]) -> float:
    """Median wall time of one program, which `run` starts and waits for."""
    run()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def chain(attention: Callable, query, rest: tuple, scale: float):
    for _ in range(CALLS):
        query = attention(query, *rest, scale=scale)
    return query


def eager(arrays: list[np.ndarray], scale: float, device: str) -> float:
    import torch
    from tests.arrays import to_torch

    import xla_gpu.torch

    query, *rest = (to_torch(array, device) for array in arrays)
    program = functools.partial(chain, xla_gpu.torch.paged_attention, query, tuple(rest), scale)
    with torch.no_grad():
        if device == "cpu":
            return seconds(program)
        from benchmarks import timing

        return timing.microseconds([program], REPEATS, minimum_calls=1) / 1e6


def jax(arrays: list[np.ndarray], scale: float, device: str) -> float:
    import jax

    import xla_gpu.jax

    where = jax.devices("cpu" if device == "cpu" else "cuda")[0]
    query, *rest = (jax.device_put(array, where) for array in arrays)
    program = jax.jit(functools.partial(chain, xla_gpu.jax.paged_attention, scale=scale))
    return seconds(lambda: program(query, tuple(rest)).block_until_ready())


def torch_xla(arrays: list[np.ndarray], scale: float, device: str) -> float:
    os.environ.setdefault("PJRT_DEVICE", "CPU" if device == "cpu" else "GPU")
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    from tests.arrays import to_torch

    import xla_gpu.torch

    query, *rest = (to_torch(array, torch_xla.device()) for array in arrays)
    program = torch.compile(
        functools.partial(chain, xla_gpu.torch.paged_attention, scale=scale), backend="openxla", fullgraph=True
    )

    def run() -> None:
        program(query, tuple(rest))
        xm.wait_device_ops()

    with torch.no_grad():
        run()
        return seconds(run)


DOORS = {"eager": eager, "jax": jax, "torch_xla": torch_xla}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=DOORS, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--load", default="8x1k llama3-8b", help="a decode load of loads.py (default %(default)s)")
    arguments = parser.parse_args()
    case = next(case for case in loads.DECODE if case.name == arguments.load)
    inputs = cases.build(case, poison=False)
    arrays = [
        *(inputs.query, inputs.kv_cache, inputs.context_lens, inputs.block_tables),
        *(inputs.query_start_loc, inputs.num_seqs),
    ]
    per_call = DOORS[arguments.door](arrays, case.softmax_scale, arguments.device) / CALLS * 1e6
    print(f"{arguments.door} {arguments.device}, {case.name}, {CALLS} calls in one program: {per_call:.2f} us per call")


if __name__ == "__main__":
    main()
