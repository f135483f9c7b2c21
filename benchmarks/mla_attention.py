"""mla_attention on a GPU: CUDA graphs over rotating inputs, beside the limits of memory and of tensor cores.

    python -m benchmarks.mla_attention                                  # decode of DeepSeek V3 and of its shards
    python -m benchmarks.mla_attention 128x64x4096 --tokens 2           # two new tokens of each sequence
    python -m benchmarks.mla_attention 16x8x1024 --device cpu           # the host's implementation

FlashMLA as vLLM builds it is timed beside where FLASHMLA_LIBRARY names `_flashmla_C.abi3.so` out of vllm's wheel: in
pages of 64, with the plan that it makes of the lengths made before.

A load 128x64x4096 is 64 sequences of 4096 tokens, the new ones included, and 128 heads. TB/s count the latents that the
sequences have, queries and results once each; FLOP/s the products with the keys that a token sees. The limit is the
larger one of both times, by the rates of --terabytes and --teraflops: an H200's data sheet has 4.8 TB/s, and 989
TFLOP/s in 16 bits. A row of each sequence, of three at most, is compared with float64.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Callable
from types import SimpleNamespace

import torch
from benchmarks import memory, timing
from benchmarks.argument_types import positive
from tests.common import cases

import xla_gpu.torch as xla_gpu

LOADS = [
    *((128, sequences, context) for sequences, context in ((1, 4096), (8, 4096), (64, 4096), (128, 1024), (1, 65536))),
    *((16, sequences, context) for sequences, context in ((1, 4096), (64, 4096), (128, 1024))),
]
TOLERANCE = 2e-2  # of the largest element, in 16 bits; a wrong key or mask is far above it


def load_size(text: str) -> tuple[int, int, int]:
    """Heads, sequences and tokens of each: "128x64x4096"."""
    try:
        heads, sequences, context = map(positive, text.split("x"))
    except (argparse.ArgumentTypeError, ValueError):
        expected = "heads x sequences x tokens, 128x64x4096 for example"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}") from None
    return heads, sequences, context


def inputs_of(load: tuple[int, int, int], options: argparse.Namespace, seed: int) -> SimpleNamespace:
    """Queries and a cache whose pages are shuffled."""
    heads, sequences, context = load
    generator = torch.Generator(options.device).manual_seed(seed)
    made = {"device": options.device, "dtype": getattr(torch, options.dtype), "generator": generator}
    pages = -(-context // options.page_size)
    query = torch.randn(sequences * options.tokens, heads, options.head_dim, **made)
    cache = torch.randn(sequences * pages, options.page_size, options.head_dim, **made)
    order = torch.randperm(sequences * pages, device=options.device, generator=generator)
    starts = torch.arange(sequences + 1, device=options.device) * options.tokens
    return SimpleNamespace(
        query=query,
        cache=cache,
        metadata=(
            torch.full((sequences,), context, dtype=torch.int32, device=options.device),
            order.view(sequences, pages).int(),
            starts.int(),
            torch.tensor([sequences], dtype=torch.int32, device=options.device),
        ),
    )


def call_of(made: SimpleNamespace, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    settings = {"scale": options.head_dim**-0.5, "value_dim": options.value_dim}
    return lambda: xla_gpu.mla_attention(made.query, made.cache, *made.metadata, **settings)


def flash_mla(made: SimpleNamespace, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    lens, tables, *_ = made.metadata
    query = made.query.unflatten(0, (len(lens), options.tokens))
    cache = made.cache[:, :, None]

    def call(plan: torch.Tensor | None, splits: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        given = (query, cache, options.value_dim, lens, tables, options.head_dim**-0.5, options.tokens > 1)
        return torch.ops._flashmla_C.dense_decode_fwd(*given, plan, splits, None)

    *_, plan, splits = call(None, None)
    return lambda: call(plan, splits)[0].flatten(0, 1)


def largest_error(out: torch.Tensor, made: SimpleNamespace, context: int, options: argparse.Namespace) -> float:
    """Of the last rows of three sequences, relative to the largest element of each."""
    worst, tables = 0.0, made.metadata[1]
    for s in sorted({0, len(tables) // 2, len(tables) - 1}):
        row = (s + 1) * options.tokens - 1
        keys = made.cache[tables[s].long()].flatten(0, 1)[:context].double()
        weights = (made.query[row].double() @ keys.T * options.head_dim**-0.5).softmax(-1)
        expected = weights @ keys[:, : options.value_dim]
        worst = max(worst, float((out[row] - expected).abs().max() / expected.abs().max()))
    return worst


def measured(load: tuple[int, int, int], options: argparse.Namespace) -> dict[str, float]:
    heads, sequences, context = load
    made = inputs_of(load, options, 0)
    out = call_of(made, options)()
    if (error := largest_error(out, made, context, options)) > TOLERANCE:
        raise SystemExit(f"mla_attention: off by {error:.3g} of the largest element")
    latents = sequences * context * options.head_dim * made.cache.element_size()
    moved = latents + made.query.nbytes + out.nbytes
    keys = sequences * sum(context - i for i in range(options.tokens))
    operations = 2 * keys * heads * (options.head_dim + options.value_dim)
    # Some at least: latents that are evicted first from L2 leave a part of the set before there.
    seeds = range(1, max(4, timing.sets_needed(moved)) if options.device == "cuda" else 1)
    inputs = [made, *(inputs_of(load, options, seed) for seed in seeds)]
    calls = [call_of(each, options) for each in inputs]
    microseconds = timing.microseconds(calls) if options.device == "cuda" else timing.WallTimes(calls).microseconds()
    found = {"us": microseconds, "TB/s": moved / microseconds / 1e6, "TFLOP/s": operations / microseconds / 1e6}
    if options.device == "cuda":
        found["limit us"] = max(moved / options.terabytes, operations / options.teraflops) / 1e6
        if os.environ.get("FLASHMLA_LIBRARY") and options.page_size == 64:
            peers = [flash_mla(each, options) for each in inputs]
            if (error := largest_error(peers[0](), made, context, options)) > TOLERANCE:
                raise SystemExit(f"FlashMLA: off by {error:.3g} of the largest element")
            found["FlashMLA us"] = timing.microseconds(peers)
            found["ratio"] = found["FlashMLA us"] / microseconds
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", type=load_size, nargs="*", default=LOADS, help="heads x sequences x tokens")
    parser.add_argument("--tokens", type=positive, default=1, help="new ones of each sequence (default: %(default)s)")
    parser.add_argument("--head-dim", type=positive, default=576, help="of a latent and its key (default: %(default)s)")
    parser.add_argument("--value-dim", type=positive, default=512, help="of a latent (default: %(default)s)")
    parser.add_argument("--page-size", type=positive, default=64, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=list(cases.FLOATS), help="(default: %(default)s)")
    parser.add_argument("--terabytes", type=float, default=4.8, help="a second, of the limit (default: %(default)s)")
    parser.add_argument("--teraflops", type=float, default=989.0, help="of the limit (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="(default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    options = parser.parse_args()
    if library := os.environ.get("FLASHMLA_LIBRARY"):
        torch.ops.load_library(library)
    rows = []
    for load in options.loads:
        if options.tokens > load[2]:
            parser.error(f"--tokens: expected at most a load's tokens, {load[2]}, got {options.tokens}")
        name = "x".join(map(str, load))
        with memory.left_out_if_too_large(name):
            rows.append({"load": name, **measured(load, options)})
            values = "".join(f"  {key} {value:9.2f}" for key, value in rows[-1].items() if key != "load")
            print(f"{name:>13}{values}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
