"""The operators that only move bytes, beside PyTorch's way of doing the same: simple_add, reshape_and_cache,
concat_and_cache_mla, merge_attention_states, rms_norm, rotary_and_cache, silu_and_mul; for a decode step's rows, and
for a prompt's.

    python -m benchmarks.memory_bound                  # on a GPU: CUDA graphs over rotating inputs
    python -m benchmarks.memory_bound --loads rotary   # those whose names contain it
    python -m benchmarks.memory_bound --device cpu     # on a CPU: wall time

Results are compared with PyTorch's before anything is timed. TB/s (GB/s on a CPU) count each byte that is read and each
that is written once.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

import torch
from benchmarks import memory, timing
from benchmarks.argument_types import containing, require_gpu

import xla_gpu.torch as xla_gpu

Call = Callable[[], object]
PAGE, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 16, 32, 8, 128, 4096, 14336  # of Llama 3 8B
ROWS = (1, 8, 64, 256, 1024, 2048, 8192, 32768)


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


def latent_updates(device: str, tokens: int) -> tuple[Call, Call, int]:
    """DeepSeek's: latents of 512, rotary keys of 64."""
    kv_c, k_pe = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in (512, 64))
    pages = 2 * tokens // PAGE + 1
    cache = torch.randn(pages, PAGE, 576, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    flat = cache.clone().view(-1, 576)

    def theirs() -> None:
        flat.index_copy_(0, slots, torch.cat([kv_c, k_pe], 1))

    theirs()
    xla_gpu.concat_and_cache_mla_(kv_c, k_pe, cache, slots)
    torch.testing.assert_close(cache.view_as(flat), flat, rtol=0, atol=0)
    amount = 2 * (kv_c.nbytes + k_pe.nbytes) + slots.nbytes
    return lambda: xla_gpu.concat_and_cache_mla_(kv_c, k_pe, cache, slots), theirs, amount


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


def rotations(
    device: str, tokens: int, head_dim: int = HEAD_DIM, cache: str = "bfloat16", **options: bool
) -> tuple[Call, Call, int]:
    """Llama 3 8B's widths, whatever the head's size."""
    heads, kv_heads = HEADS * HEAD_DIM // head_dim, KV_HEADS * HEAD_DIM // head_dim
    half, float8 = head_dim // 2, cache != "bfloat16"
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device, dtype=torch.bfloat16)
    positions = torch.arange(tokens, device=device, dtype=torch.int32)
    table = torch.randn(tokens, half, 2, device=device)
    pages = 2 * tokens // PAGE + 1
    kv_cache = torch.zeros(2, pages, PAGE, kv_heads, head_dim, device=device).to(getattr(torch, cache))
    order = torch.randperm(pages, device=device)[: -(-tokens // PAGE), None] * PAGE
    slots = (order + torch.arange(PAGE, device=device)).flatten()[:tokens].to(torch.int32)
    scales = {f"{n}_scale": torch.tensor([0.5], device=device) for n in "kv"} if float8 else {}
    flat = kv_cache.view(torch.uint8 if float8 else torch.bfloat16).clone().view(2, -1, kv_heads, head_dim)
    shape, of_slots = (tokens, -1, half, 2) if options.get("interleaved") else (tokens, -1, 2, half), slots.long()
    axis = 3 if options.get("interleaved") else 2

    def ours() -> torch.Tensor:
        return xla_gpu.rotary_and_cache_(qkv, positions, table, kv_cache, slots, **scales, **options)

    def theirs() -> torch.Tensor:
        both, value = qkv.view(tokens, -1, head_dim).split([heads + kv_heads, kv_heads], 1)
        cos, sin = table[positions][:, None].unbind(-1)
        a, b = both.reshape(shape).float().unbind(axis)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], axis).to(qkv.dtype).view(tokens, -1, head_dim)
        query, key = turned.split([heads, kv_heads], 1)
        new = torch.stack([key, value])
        if float8:
            new = (new.float() / 0.5).to(kv_cache.dtype).view(torch.uint8)
        flat.index_copy_(1, of_slots, new)
        return query

    torch.testing.assert_close(ours().view(tokens, heads, head_dim), theirs(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(kv_cache.view(flat.dtype).view_as(flat), flat, rtol=0, atol=0)
    stored = 2 * tokens * kv_heads * head_dim * kv_cache.element_size()
    return ours, theirs, qkv.nbytes + tokens * heads * head_dim * 2 + stored + table.nbytes + 2 * slots.nbytes


MAKERS = {"rms_norm with residual": norms, "silu_and_mul": activations, "rotary_and_cache": rotations}
LOADS = {
    "simple_add 64 Mi": lambda device: adds(device, 64 << 20),
    "simple_add 64 Ki": lambda device: adds(device, 64 << 10),
    "reshape_and_cache 16k tokens": lambda device: cache_updates(device, 16 << 10),
    "reshape_and_cache 64 tokens": lambda device: cache_updates(device, 64),
    "concat_and_cache_mla 16k tokens": lambda device: latent_updates(device, 16 << 10),
    "concat_and_cache_mla 64 tokens": lambda device: latent_updates(device, 64),
    "merge_attention_states 8k tokens": lambda device: merges(device, 8 << 10),
    "merge_attention_states 64 tokens": lambda device: merges(device, 64),
    **{
        f"{name} {rows} rows": lambda device, make=make, rows=rows: make(device, rows)
        for name, make in MAKERS.items()
        for rows in ROWS
    },
    "rotary_and_cache 8192 rows, float8": lambda device: rotations(device, 8192, cache="float8_e4m3fn"),
    "rotary_and_cache 8192 rows, interleaved": lambda device: rotations(device, 8192, interleaved=True),
    "rotary_and_cache 8192 rows, head_dim 64": lambda device: rotations(device, 8192, 64),
    "rotary_and_cache 8192 rows, head_dim 256": lambda device: rotations(device, 8192, 256),
}


def microseconds(calls: list[Call], device: str) -> float:
    return timing.microseconds(calls) if device == "cuda" else timing.WallTimes(calls).microseconds(repeats=10)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--loads", default="", metavar="TEXT", help="those whose names contain it")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        require_gpu(parser)
    rate, unit = (1e6, "TB/s") if arguments.device == "cuda" else (1e3, "GB/s")
    rows = []
    for name in containing("--loads", [arguments.loads], LOADS):
        make = LOADS[name]
        with memory.left_out_if_too_large(name):
            ours, theirs, amount = make(arguments.device)
            rest = [make(arguments.device) for _ in range(timing.sets_needed(amount) - 1)]
            mine = microseconds([ours, *(r[0] for r in rest)], arguments.device)
            other = microseconds([theirs, *(r[1] for r in rest)], arguments.device)
            rows.append({"load": name, "bytes": amount, "xla_gpu": mine, "torch": other})
            speed = f"{mine:10.1f} us {amount / mine / rate:7.2f} {unit}"
            print(f"{name:40} {speed}   PyTorch {other:10.1f} us {other / mine:5.2f} x", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": arguments.device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
