"""all_reduce where each rank is a process with one device; torchrun starts it.

python -m torch.distributed.run --nproc-per-node=2 -m tests.distributed.torchrun_program BACKEND MESSAGES

BACKEND: xla, torch_xla's GPUs; nccl, eager CUDA tensors; gloo, torch_xla on the CPU, which knows one process alone
there: the parts travel through the host.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

import xla_gpu.torch as xg

PROGRAM_MESSAGES = 5  # in one program
PROGRAMS = 8


def main(backend: str, messages: int) -> None:
    if backend == "nccl":
        device, sync = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.cuda.synchronize
        torch.cuda.set_device(device)
        dist.init_process_group(backend)
    else:
        import torch_xla
        import torch_xla.distributed.xla_backend  # registers the backend

        dist.init_process_group(backend, init_method="xla://" if backend == "xla" else None)
        device, sync = torch_xla.device(), torch_xla.sync
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert ranks == int(os.environ["WORLD_SIZE"])

    def parts(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(ranks, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def total(x: torch.Tensor) -> torch.Tensor:
        """In float32, in the order of ranks."""
        result = x[0].float()
        for part in x[1:]:
            result = result + part.float()
        return result.to(x.dtype)

    with warnings.catch_warnings():
        if backend != "gloo":
            warnings.filterwarnings("error", "process group .*: no peer memory")
        xg.all_reduce(torch.ones(2).to(device))

    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    exponents = torch.rand(PROGRAMS * PROGRAM_MESSAGES, generator=torch.Generator().manual_seed(7)) * 22
    inputs = [parts(i, int(2**e), dtype=dtypes[i % 3]) for i, e in enumerate(exponents.tolist())]
    wants = [total(x) for x in inputs]
    mine = [x[rank].to(device) for x in inputs]
    done = 0
    while done < messages:
        start = done % len(inputs)
        results = [xg.all_reduce(x) for x in mine[start : start + PROGRAM_MESSAGES]]
        sync()
        for i, result in enumerate(results, start):
            assert torch.equal(result.cpu(), wants[i]), f"message {done} of {wants[i].numel()}, rank {rank}"
            done += 1

    x, residual, weight = parts(1, 4, 512), parts(2, 4, 512)[0], parts(3, 512)[0]
    out, added = xg.all_reduce_add_rms_norm(
        x[rank].to(device), residual.to(device), weight.to(device), eps=1e-5, group=dist.group.WORLD
    )
    want, want_added = torch.ops.xla_gpu.all_reduce_add_rms_norm(x, residual, weight, eps=1e-5)
    assert torch.equal(added.cpu(), want_added)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return xg.all_reduce(x * 2) + 1

    compiled = torch.compile(doubled, backend="eager" if backend == "nccl" else "openxla")
    for seed in (4, 5):
        x = parts(seed, 100)
        assert torch.equal(compiled(x[rank].to(device)).cpu(), total(x * 2) + 1), seed
    if backend == "nccl":
        x = parts(8, 3000)
        place, graph = x[rank].to(device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = doubled(place)
        for seed in (8, 9):
            x = parts(seed, 3000)
            place.copy_(x[rank])
            graph.replay()
            assert torch.equal(captured.cpu(), total(x * 2) + 1), seed

    again, first = dist.new_group(list(range(ranks))), dist.new_group([0])
    x = parts(6, 33)
    assert torch.equal(xg.all_reduce(x[rank].to(device), group=again).cpu(), total(x))
    if rank == 0:
        assert torch.equal(xg.all_reduce(x[0].to(device), group=first).cpu(), x[0])
    print(f"OK {done}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
