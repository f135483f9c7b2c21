"""all_reduce beside NCCL and vLLM's custom all-reduce in CUDA graphs of PyTorch, a process for each GPU: the program of
benchmarks.all_reduce.

python -m benchmarks.torch_all_reduce --devices 2 --vllm .../site-packages/vllm/_C.abi3.so

Microseconds of one of 256 sums with a multiplication behind each; the row "nothing" has the multiplications alone. vLLM
itself is not imported: its library needs the PyTorch that it was built for.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from benchmarks.argument_types import add_devices, positive

import xla_gpu.torch as xg

CALLS = 256
HIDDEN = 4096
MAX_BYTES = 32 << 20  # its class takes up to 8 MB and leaves larger ones to NCCL


class VllmAllReduce:
    """vLLM's operators as its class CustomAllreduce calls them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.ops = torch.ops._C_custom_ar
        self.rank, self.ranks = rank, ranks
        self.scratch = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        self.state = self.ops.init_custom_ar(self._shared(self.ops.meta_size() + MAX_BYTES), self.scratch, rank, True)
        self.ops.register_buffer(self.state, self._shared(MAX_BYTES))

    def _shared(self, size: int) -> list[int]:
        pointer, handle = self.ops.allocate_shared_buffer_and_handle(size)
        handles: list[Any] = [None] * self.ranks
        dist.all_gather_object(handles, handle)
        return [pointer if r == self.rank else self.ops.open_mem_handle(h) for r, h in enumerate(handles)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.ops.all_reduce(self.state, x, out, 0, 0)
        return out

    def after_capture(self) -> None:
        """Tells the peers the addresses that the captured graph reads."""
        handle, offset = self.ops.get_graph_buffer_ipc_meta(self.state)
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, (handle, offset))
        self.ops.register_graph_buffers(self.state, [h for h, _ in told], [o for _, o in told])


def nccl(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def nccl_in_place(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def microseconds(reduce: Callable[[torch.Tensor], torch.Tensor], after: Callable[[], None], x: torch.Tensor) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 1
        for _ in range(CALLS):
            y = reduce(y) * 0.5
    after()
    times = []
    for _ in range(10):
        dist.barrier()
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 4 / CALLS)
    return min(times)


def measure(rank: int, arguments: argparse.Namespace) -> None:
    ranks = arguments.devices
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
    dist.all_reduce(torch.zeros(1, device="cuda"))  # NCCL connects outside of the capture
    vllm = None
    if arguments.vllm:
        torch.ops.load_library(arguments.vllm)
        vllm = VllmAllReduce(rank, ranks)
    xg.all_reduce(torch.zeros(1, device="cuda"))  # opens the peers' memory
    rows = []
    for kilobytes in arguments.kilobytes:
        x = torch.randn(max(1, kilobytes * 1024 // (2 * HIDDEN)), HIDDEN, device="cuda").bfloat16()
        variants = {
            "nothing": (lambda t: t, lambda: None),
            "all_reduce": (xg.all_reduce, lambda: None),
            "NCCL": (nccl, lambda: None),
            "NCCL in place": (nccl_in_place, lambda: None),
        }
        if vllm is not None and x.nbytes < MAX_BYTES:
            variants["vLLM"] = vllm, vllm.after_capture
        for name, (reduce, after) in variants.items():
            row = {"kilobytes": kilobytes, "what": name, "microseconds": round(microseconds(reduce, after, x), 2)}
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    if rank == 0 and arguments.json:
        device = torch.cuda.get_device_name()
        record = {"device": device, "devices": ranks, "torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="its _C.abi3.so; default: without")
    add_devices(parser, 2)
    parser.add_argument(
        "--kilobytes",
        type=positive,
        nargs="+",
        default=[8, 64, 256, 2048],
        help="sizes of a message (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.multiprocessing.spawn(measure, (arguments,), arguments.devices)


if __name__ == "__main__":
    main()
