"""What a call of a user's kernel costs: chains of calls of a kernel that does next to nothing.

    python -m benchmarks.user_kernels                       # JAX, in command buffers (CUDA graphs)
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.user_kernels    # JAX, each call launched by itself
    python -m benchmarks.user_kernels --frontend eager      # PyTorch's CUDA tensors: in a CUDA graph, and call by call
    PJRT_DEVICE=GPU python -m benchmarks.user_kernels --frontend torch_xla          # torch.compile(backend="openxla")

Prints microseconds per call of a chain: of kernel_call, of triton_call where Triton is installed, of simple_add (an
operator of the library), and of an addition that XLA compiles itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CALLS = 512
REPEATS = 20
ELEMENTS = 1024

SOURCE = r"""
extern "C" __global__ void plus(const float* x, float y, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i] + y;
}
"""


def programs(ops: Any, x: Any, barrier: Callable[[Any], Any], length: int = CALLS) -> dict[str, Callable[[Any], Any]]:
    """Chains of calls by name. `barrier` keeps XLA from merging its own additions into one."""
    kernel = ops.cuda_kernel(SOURCE, "plus")
    call = ops.kernel_call(kernel, x, grid=ELEMENTS // 128, block=128)
    calls = {"kernel_call": lambda x: call(x, 1.0), "simple_add": lambda x: ops.simple_add(x, x)}
    if importlib.util.find_spec("triton"):
        from benchmarks import triton_plus

        triton = ops.triton_call(triton_plus.plus, x, grid=ELEMENTS // 128, BLOCK=128)
        calls["triton_call"] = lambda x: triton(x, 1.0)
    calls["the framework's own"] = lambda x: barrier(x + 1.0)

    def chain(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for _ in range(length):
                x = one(x)
            return x

        return run

    return {name: chain(one) for name, one in calls.items()}


def microseconds(run: Callable[[], Any], wait: Callable[[Any], Any], length: int = CALLS) -> float:
    """Median wall time of one of the chain's calls. Programs are queued: the start of one hides behind the last."""
    for _ in range(3):
        wait(run())
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(4):
            result = run()
        wait(result)
        times.append((time.perf_counter() - begin) / 4)
    return statistics.median(times) / length * 1e6


def jax() -> None:
    import jax

    import xla_gpu.jax

    x = jax.device_put(np.zeros(ELEMENTS, np.float32), jax.devices("cuda")[0])
    for name, program in programs(xla_gpu.jax, x, jax.lax.optimization_barrier).items():
        compiled = jax.jit(program)
        report("jax", name, microseconds(lambda: compiled(x), lambda y: y.block_until_ready()))  # noqa: B023


def eager() -> None:
    import torch
    from benchmarks import timing

    import xla_gpu.torch

    x = torch.zeros(ELEMENTS, device="cuda")
    with torch.no_grad():
        for name, program in programs(xla_gpu.torch, x, lambda y: y).items():
            run = lambda: program(x)  # noqa: B023, E731
            report("eager, CUDA graph", name, timing.microseconds([run], REPEATS, minimum_calls=1) / CALLS)
            report("eager, call by call", name, microseconds(run, lambda y: torch.cuda.synchronize()))


def torch_xla() -> None:
    os.environ.setdefault("PJRT_DEVICE", "GPU")
    import torch
    import torch_xla

    import xla_gpu.torch

    x = torch.zeros(ELEMENTS).to(torch_xla.device())
    # By chains of two lengths: a program's start costs torch_xla's host more than the calls of a short one.
    lengths = (CALLS // 8, CALLS // 2)
    with torch.no_grad():
        by_length = [programs(xla_gpu.torch, x, lambda y: y, length) for length in lengths]
        for name in by_length[0]:
            if name == "the framework's own":  # merged into one addition, which says nothing about a call
                continue
            times = []
            for length, chains in zip(lengths, by_length, strict=True):
                torch._dynamo.reset()
                compiled = torch.compile(chains[name], backend="openxla", fullgraph=True)
                times.append(length * microseconds(lambda: compiled(x), lambda y: y.cpu(), length))  # noqa: B023
            report("torch_xla", name, (times[1] - times[0]) / (lengths[1] - lengths[0]))
            print(f"    {times[0]:.0f} us for {lengths[0]}, {times[1]:.0f} us for {lengths[1]} calls", flush=True)


def report(frontend: str, name: str, each: float) -> None:
    print(f"{frontend:<20} {name:<20} {each:7.2f} us per call in a chain", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frontend", nargs="+", choices=["jax", "eager", "torch_xla"], default=["jax"], help="default: %(default)s"
    )
    for chosen in parser.parse_args().frontend:
        {"jax": jax, "eager": eager, "torch_xla": torch_xla}[chosen]()
