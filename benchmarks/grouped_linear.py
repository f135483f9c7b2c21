"""grouped_linear at the shapes of models with experts, in every format, beside torch._grouped_mm in bfloat16.

    python -m benchmarks.grouped_linear
    python -m benchmarks.grouped_linear --models gpt-oss-20b --rows 1 32 --formats mxfp4

Each row of a batch chooses its experts at random, so that the rows of the product are top_k times those of the batch.
Calls follow one another in CUDA graphs, each with a choice of its own, so that weights come from memory. Results are
compared with products in bfloat16 before anything is timed. TB/s count each byte of the weights of experts that have
rows, their scales, x and the result once; TFLOP/s count rows that are chosen.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from benchmarks import memory
from benchmarks.argument_types import positive, require_gpu

MODELS = {  # name: experts, top_k, products with their n and k
    "gpt-oss-20b": (32, 4, {"gate_up": (5760, 2880), "down": (2880, 2880)}),
    "Qwen3-30B-A3B": (128, 8, {"gate_up": (1536, 2048), "down": (2048, 768)}),
}
FORMATS = ("bfloat16", "float8", "float8_block", "int8", "int4", "mxfp4")
ROWS = (1, 8, 32, 64, 256, 1024, 4096)
_CHOICES = 8  # calls with experts of their own


def make_weight(weight_format: str, experts: int, n: int, k: int) -> tuple[dict[str, Any], float]:
    """A weight of all experts as grouped_linear takes it, random, and the bytes of one expert's."""
    import torch

    def random_bytes(*shape: int) -> Any:
        return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)

    if weight_format == "bfloat16":
        weight = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5)
        return {"weight": weight}, 2.0 * n * k
    if weight_format == "mxfp4":
        scale = torch.randint(118, 122, (experts, n, k // 32), device="cuda", dtype=torch.uint8)
        return {"weight": random_bytes(experts, n, k // 2), "weight_scale": scale}, n * k * (1 / 2 + 1 / 32)
    if weight_format == "int4":
        scale = torch.full((experts, n, k // 128), 0.2 * k**-0.5, device="cuda", dtype=torch.bfloat16)
        return {"weight": random_bytes(experts, n, k // 2), "weight_scale": scale}, n * k * (1 / 2 + 1 / 64)
    shape = (experts, -(-n // 128), -(-k // 128)) if weight_format == "float8_block" else (experts, n)
    scale = torch.full(shape, k**-0.5 / (60 if weight_format == "int8" else 1), device="cuda")
    bytes_of_one = float(n * k + 4 * scale[0].numel())
    if weight_format == "int8":
        return {"weight": random_bytes(experts, n, k).view(torch.int8), "weight_scale": scale}, bytes_of_one
    values = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16).normal_().to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, bytes_of_one


def choices(rows: int, experts: int, top_k: int) -> list[Any]:
    """int32[experts], how many rows each expert has, of several batches."""
    import torch

    made = []
    for seed in range(_CHOICES):
        scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed))
        made.append(scores.topk(top_k).indices.flatten().bincount(minlength=experts).to(torch.int32).cuda())
    return made


def dequantised(weight_format: str, weight: Any, weight_scale: Any = None) -> Any:
    """bfloat16[n, k] of one expert."""
    import torch

    from xla_gpu import quantization

    if weight_format == "bfloat16":
        return weight
    if weight_format != "mxfp4":
        return quantization.dequantize(quantization.LinearWeight(weight, weight_scale)).to(torch.bfloat16)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
    values = torch.where(codes > 7, -table[codes & 7], table[codes & 7])
    return (values * torch.exp2(weight_scale.float() - 127).repeat_interleave(32, -1)).to(torch.bfloat16)


def check(weight_format: str, x: Any, sizes: Any, weight: dict[str, Any]) -> None:
    """Compares the groups of most rows."""
    import torch

    import xla_gpu.torch as xg

    got = xg.grouped_linear(x, group_sizes=sizes, **weight)
    ends = sizes.cumsum(0).tolist()
    for expert in sizes.argsort(descending=True)[:4].tolist():
        if (size := int(sizes[expert])) == 0:
            continue
        begin = ends[expert] - size
        want = x[begin : ends[expert]] @ dequantised(weight_format, **{n: p[expert] for n, p in weight.items()}).T
        torch.testing.assert_close(got[begin : ends[expert]], want, rtol=2e-2, atol=3e-2)


def measure(weight_format: str, experts: int, top_k: int, n: int, k: int, rows: int, weight: Any) -> dict[str, float]:
    """Microseconds of the calls."""
    import torch
    from benchmarks import timing

    import xla_gpu.torch as xg

    x = torch.randn(rows * top_k, k, device="cuda", dtype=torch.bfloat16)
    batches = choices(rows, experts, top_k)
    check(weight_format, x, batches[0], weight)
    times = {
        "us": timing.microseconds(
            [lambda s=s: xg.grouped_linear(x, group_sizes=s, **weight) for s in batches], repeats=7
        )
    }
    if weight_format == "bfloat16" and hasattr(torch, "_grouped_mm"):
        transposed = weight["weight"].transpose(1, 2)
        ends = [sizes.cumsum(0).to(torch.int32) for sizes in batches]
        times["torch"] = timing.microseconds(
            [lambda e=e: torch._grouped_mm(x, transposed, offs=e) for e in ends], repeats=7
        )
    times["used"] = sum(int((sizes > 0).sum()) for sizes in batches) / len(batches)
    return times


def measure_product(model: str, weight_format: str, name: str, numbers_of_rows: list[int]) -> list[dict[str, Any]]:
    """Prints a line for each number of rows, and returns what it says."""
    experts, top_k, products = MODELS[model]
    n, k = products[name]
    weight, bytes_of_one = make_weight(weight_format, experts, n, k)
    made = []
    for rows in numbers_of_rows:
        times = measure(weight_format, experts, top_k, n, k, rows, weight)
        pairs, us = rows * top_k, times["us"]
        amount = times["used"] * bytes_of_one + 2 * pairs * (n + k)
        text = f"{model:14} {weight_format:12} {name:8} {rows:5} rows {us:8.1f} us "
        text += f"{amount / us / 1e6:6.2f} TB/s {2 * pairs * n * k / us / 1e6:6.1f} TFLOP/s"
        if "torch" in times:
            text += f"   torch._grouped_mm {times['torch']:8.1f} us"
        print(text, flush=True)
        of_case = {"model": model, "format": weight_format, "product": name, "rows": rows}
        made.append({**of_case, **times, "bytes": amount})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument("--rows", nargs="+", type=positive, default=list(ROWS), help="of the batch")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    require_gpu(parser)
    table = []
    for model in arguments.models:
        for weight_format in arguments.formats:
            for name, (_, k) in MODELS[model][2].items():
                if weight_format == "int4" and k % 128:
                    continue
                with memory.left_out_if_too_large(f"{model} {weight_format} {name}"):
                    table += measure_product(model, weight_format, name, arguments.rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
