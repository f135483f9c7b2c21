"""The operators that only move bytes, beside PyTorch's way of doing the same: simple_add, reshape_and_cache,
merge_attention_states, rms_norm, silu_and_mul.

    python -m benchmarks.memory_bound                  # on a GPU: CUDA graphs over rotating inputs
    python -m benchmarks.memory_bound --device cpu     # on a CPU: wall time

Results are compared with PyTorch's before anything is timed. TB/s (GB/s on a CPU) count each byte that is read and each
that is written once.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
from benchmarks import timing

import xla_gpu.torch as xla_gpu

Call = Callable[[], object]
PAGE, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 16, 32, 8, 128, 4096, 14336  # of Llama 3 8B


def adds(device: str, size: int) -> tuple[Call, Call, int]:
    a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.testing.assert_close(xla_gpu.simple_add(a, b), a + b, rtol=0, atol=0)
    return lambda: xla_gpu.simple_add(a, b), lambda: torch.add(a, b), 3 * a.nbytes


def cache_updates(device: str, tokens: int) -> tuple[Call, Call, int]:
    key, value = (torch.randn(tokens, KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    pages = 2 * tokens // PAGE + 1
    cache = torch.randn(2, pages, PAGE, KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    flat = cache.clone().view(2, -1, KV_HEADS, HEAD_DIM)
    pair = torch.stack([key, value])

    def theirs() -> None:
        flat.index_copy_(1, slots, pair)

    theirs()
    xla_gpu.reshape_and_cache_(key, value, cache, slots)
    torch.testing.assert_close(cache.view_as(flat), flat, rtol=0, atol=0)
    return lambda: xla_gpu.reshape_and_cache_(key, value, cache, slots), theirs, 4 * key.nbytes + slots.nbytes


def merges(device: str, tokens: int) -> tuple[Call, Call, int]:
    outs = [torch.randn(tokens, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(2)]
    lses = [torch.randn(tokens, HEADS, device=device) for _ in range(2)]

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(*lses)
        weighted = [(lse_i - lse).exp()[..., None] * out.float() for lse_i, out in zip(lses, outs, strict=True)]
        return (weighted[0] + weighted[1]).to(outs[0].dtype), lse

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return xla_gpu.merge_attention_states(outs[0], lses[0], outs[1], lses[1])

    for got, want in zip(ours(), theirs(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    return ours, theirs, 3 * (outs[0].nbytes + lses[0].nbytes)


def norms(device: str, rows: int) -> tuple[Call, Call, int]:
    x, residual = (torch.randn(rows, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(HIDDEN, device=device, dtype=torch.bfloat16)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return xla_gpu.rms_norm(x, weight, eps=1e-5, residual=residual)

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (HIDDEN,), weight, 1e-5), total

    for got, want in zip(ours(), theirs(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    return ours, theirs, 4 * x.nbytes


def activations(device: str, rows: int) -> tuple[Call, Call, int]:
    x = torch.randn(rows, 2 * INTERMEDIATE, device=device, dtype=torch.bfloat16)

    def theirs() -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    torch.testing.assert_close(xla_gpu.silu_and_mul(x), theirs(), rtol=2e-2, atol=2e-2)
    return lambda: xla_gpu.silu_and_mul(x), theirs, 3 * x.nbytes // 2


LOADS = {
    "simple_add 64 Mi": lambda device: adds(device, 64 << 20),
    "simple_add 64 Ki": lambda device: adds(device, 64 << 10),
    "reshape_and_cache 16k tokens": lambda device: cache_updates(device, 16 << 10),
    "reshape_and_cache 64 tokens": lambda device: cache_updates(device, 64),
    "merge_attention_states 8k tokens": lambda device: merges(device, 8 << 10),
    "merge_attention_states 64 tokens": lambda device: merges(device, 64),
    "rms_norm with residual, 8k rows": lambda device: norms(device, 8 << 10),
    "rms_norm with residual, 64 rows": lambda device: norms(device, 64),
    "silu_and_mul 8k rows": lambda device: activations(device, 8 << 10),
    "silu_and_mul 64 rows": lambda device: activations(device, 64),
}


def microseconds(calls: list[Call], device: str) -> float:
    if device == "cuda":
        return timing.microseconds(calls)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - begin) / len(calls) * 1e6)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--loads", default="", metavar="TEXT", help="those whose names contain it")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    rate, unit = (1e6, "TB/s") if arguments.device == "cuda" else (1e3, "GB/s")
    rows = []
    for name, make in LOADS.items():
        if arguments.loads not in name:
            continue
        ours, theirs, amount = make(arguments.device)
        rest = [make(arguments.device) for _ in range(timing.sets_needed(amount) - 1)]
        mine = microseconds([ours, *(r[0] for r in rest)], arguments.device)
        other = microseconds([theirs, *(r[1] for r in rest)], arguments.device)
        rows.append({"load": name, "bytes": amount, "xla_gpu": mine, "torch": other})
        speed = f"{mine:10.1f} us {amount / mine / rate:7.2f} {unit}"
        print(f"{name:34} {speed}   PyTorch {other:10.1f} us {other / mine:5.2f} x", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": arguments.device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
