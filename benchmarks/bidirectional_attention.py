"""bidirectional_attention beside FlashAttention-3 and PyTorch, on a GPU: CUDA graphs over rotating inputs.

    python -m benchmarks.bidirectional_attention                          # encoders' shapes
    python -m benchmarks.bidirectional_attention 32x500 --uneven --heads 16 --head-dim 64 --window 65

A load 64x128 is 64 sequences of 128 tokens; with --uneven their lengths are drawn from an eighth of that to all of it.
FLOP/s count the products with the keys that a token sees. FlashAttention-3 needs FA3_LIBRARY (implementations.py);
PyTorch's scaled_dot_product_attention takes sequences of one length without a window, and is left out of others. Three
rows of each result are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
from collections.abc import Callable
from types import SimpleNamespace

import torch
from benchmarks import memory, timing
from benchmarks.argument_types import load_size, positive
from benchmarks.implementations import FlashAttention3

import xla_gpu.torch as xla_gpu

LOADS = [(256, 32), (64, 128), (16, 512), (4, 2048), (1, 8192)]
TOLERANCE = 2e-2  # of the largest element, in 16 bits; a wrong key or mask is far above it


def inputs_of(lengths: list[int], options: argparse.Namespace, seed: int) -> SimpleNamespace:
    """Q, K and V of all sequences, one behind the other, and where each begins."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, options.dtype)
    q, k, v = (
        torch.randn(sum(lengths), heads, options.head_dim, device="cuda", dtype=dtype, generator=generator)
        for heads in (options.heads, options.kv_heads or options.heads, options.kv_heads or options.heads)
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    return SimpleNamespace(q=q, k=k, v=v, starts=starts, num_seqs=torch.tensor([len(lengths)], device="cuda").int())


def ours(made: SimpleNamespace, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    settings = {"scale": options.head_dim**-0.5, "sliding_window": options.window}
    arguments = (made.q, made.k, made.v, made.starts, made.num_seqs)
    return lambda: xla_gpu.bidirectional_attention(*arguments, **settings)


def flash_attention_3(made: SimpleNamespace, lengths: list[int], options: argparse.Namespace):
    case = SimpleNamespace(
        sequences=[(length, length) for length in lengths],
        softmax_scale=options.head_dim**-0.5,
        sliding_window=options.window,
        soft_cap=None,
    )
    inputs = SimpleNamespace(case=case, query=made.q, query_start_loc=made.starts)
    return FlashAttention3().call(inputs, made.k, made.v, None, None, made.starts, causal=False)


def pytorch(
    made: SimpleNamespace, lengths: list[int], options: argparse.Namespace
) -> Callable[[], torch.Tensor] | None:
    if len(set(lengths)) > 1 or options.window:
        return None
    q, k, v = (x.view(len(lengths), lengths[0], -1, options.head_dim).transpose(1, 2) for x in (made.q, made.k, made.v))
    grouped = q.shape[1] != k.shape[1]
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, enable_gqa=grouped).transpose(1, 2).reshape(made.q.shape)


def largest_error(out: torch.Tensor, made: SimpleNamespace, lengths: list[int], options: argparse.Namespace) -> float:
    """Of three rows, the last among them, relative to the largest element of each."""
    worst, starts = 0.0, made.starts.tolist()
    for row in (0, len(out) // 2, len(out) - 1):
        s = next(i for i in range(len(lengths)) if starts[i] <= row < starts[i + 1])
        window = options.window or lengths[s]
        begin, end = max(starts[s], row + 1 - window), min(starts[s + 1], row + window)
        repeats = options.heads // (options.kv_heads or options.heads)
        k, v = (x[begin:end].double().repeat_interleave(repeats, dim=1) for x in (made.k, made.v))
        weights = (torch.einsum("hd,khd->hk", made.q[row].double(), k) * options.head_dim**-0.5).softmax(-1)
        expected = torch.einsum("hk,khd->hd", weights, v)
        worst = max(worst, float((out[row] - expected).abs().max() / expected.abs().max()))
    return worst


def measured(lengths: list[int], options: argparse.Namespace) -> dict[str, float]:
    """Microseconds by implementation."""
    keys = sum(
        sum(min(n, i + (options.window or n)) - max(0, i + 1 - (options.window or n)) for i in range(n))
        for n in lengths
    )
    made = inputs_of(lengths, options, 0)
    count = timing.sets_needed(sum(x.nbytes for x in (made.q, made.k, made.v)))
    sets = [made, *(inputs_of(lengths, options, seed) for seed in range(1, count))]
    calls = {"xla_gpu": [ours(each, options) for each in sets]}
    if os.environ.get("FA3_LIBRARY"):
        calls["FA3"] = [flash_attention_3(each, lengths, options) for each in sets]
    if pytorch(made, lengths, options):
        calls["PyTorch"] = [pytorch(each, lengths, options) for each in sets]
    found: dict[str, float] = {}
    for name, each in calls.items():
        if (error := largest_error(each[0](), made, lengths, options)) > TOLERANCE:
            raise SystemExit(f"{name}: off by {error:.3g} of the largest element")
        found[name] = timing.microseconds(each)
    found["TFLOP/s"] = 4 * keys * options.heads * options.head_dim / found["xla_gpu"] / 1e6
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", type=load_size, nargs="*", default=LOADS, help="sequences x tokens")
    parser.add_argument("--uneven", action="store_true", help="lengths drawn from an eighth of the tokens on")
    parser.add_argument("--seed", type=int, default=0, help="of these lengths (default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=12, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=positive, help="default: as many as query heads")
    parser.add_argument("--head-dim", type=positive, default=64, help="(default: %(default)s)")
    parser.add_argument("--window", type=positive, help="sliding_window; default: none")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"], help="(default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    options = parser.parse_args()
    rows = []
    for sequences, tokens in options.loads:
        draw = random.Random(options.seed)
        lengths = [draw.randint(max(1, tokens // 8), tokens) if options.uneven else tokens for _ in range(sequences)]
        with memory.left_out_if_too_large(f"{sequences}x{tokens}"):
            rows.append({"load": f"{sequences}x{tokens}", **measured(lengths, options)})
            values = "".join(f"  {name} {value:9.1f}" for name, value in rows[-1].items() if name != "load")
            print(f"{rows[-1]['load']:>9}{values}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
