"""What CUDA tensors in torch_xla programs cost the host: microseconds a tensor, in and out, and a parameter.

    PJRT_DEVICE=GPU python -m benchmarks.cuda_tensors

Needs a PyTorch with CUDA beside torch_xla.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import xla_gpu.torch

COUNTS = (1, 17, 65)
REPEATS = 30


def microseconds(run: Callable[[], Any]) -> float:
    """Median time of the host for a call; the GPU is idle at its start."""
    times = []
    for i in range(REPEATS + 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = run()
        end = time.perf_counter()
        del result
        if i >= 5:
            times.append(end - begin)
    return statistics.median(times) * 1e6


def calls(count: int) -> dict[str, Callable[[], Any]]:
    """Compiled calls with ``count`` arguments, parameters or results, by what there are so many of.

    "moving" are arguments at one of six addresses, as PyTorch's allocator hands them out; "new" ones are at addresses
    that no call had before.
    """
    tensors = [torch.ones(256, device="cuda") for _ in range(count)]
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in tensors]
    compiled = lambda function: torch.compile(function, backend="xla_gpu", fullgraph=True)  # noqa: E731
    arguments, moving, new = (compiled(lambda *x: torch.stack(x).sum()) for _ in range(3))
    others, more = (
        itertools.cycle([[torch.ones(256, device="cuda") for _ in range(count)] for _ in range(sets)])
        for sets in (6, REPEATS + 5)
    )
    many = compiled(lambda x: [x + i for i in range(count)])

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(parameters)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.stack(list(self.weights)).sum()

    module = compiled(Module())
    return {
        "argument": lambda: arguments(*tensors),
        "moving": lambda: moving(*next(others)),
        "new": lambda: new(*next(more)),
        "parameter": lambda: module(tensors[0]),
        "result": lambda: many(tensors[0]),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device")
    torch._dynamo.config.recompile_limit = 64
    by_count = {count: calls(count) for count in COUNTS}
    with torch.no_grad():
        for what in by_count[1]:
            times = [microseconds(by_count[count][what]) for count in COUNTS]
            each = (times[-1] - times[0]) / (COUNTS[-1] - COUNTS[0])
            calls_text = ", ".join(f"{count}: {t:.0f}" for count, t in zip(COUNTS, times, strict=True))
            print(f"{what:<10} {each:6.2f} us each   (us per call by their number: {calls_text})", flush=True)
    single()


def single() -> None:
    """Tensors outside of torch.compile, beside torch_xla's own transfer of a CPU tensor of this size."""
    import torch_xla

    x, on_cpu, device = torch.ones(256, device="cuda"), torch.ones(256), torch_xla.device()
    on_xla = xla_gpu.torch.to_xla(x)
    torch_xla.sync()
    for what, call in {
        "to_xla": lambda: xla_gpu.torch.to_xla(x),
        "to_cuda": lambda: xla_gpu.torch.to_cuda(on_xla),
        "torch_xla's own transfer of a CPU tensor": lambda: on_cpu.to(device),
    }.items():
        print(f"{what:<10} {microseconds(lambda call=call: [call() for _ in range(64)]) / 64:6.2f} us", flush=True)


if __name__ == "__main__":
    main()
