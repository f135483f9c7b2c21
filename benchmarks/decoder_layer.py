"""gated_mlp and attention_block beside the operators that they are made of: Llama 3 8B's sizes, every weight format.

    python -m benchmarks.decoder_layer                        # on a GPU: PyTorch's CUDA graphs over rotating weights
    python -m benchmarks.decoder_layer --rows 1 32 --formats bfloat16 --operators gated_mlp

Prints one JSON object per case: microseconds of the composite call and of its parts, and TB/s of the weights' bytes.
Results are compared bit by bit before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks import memory, timing
from benchmarks.argument_types import positive, require_gpu
from benchmarks.linear import TorchArrays, make

import xla_gpu.torch as xg

HIDDEN, INTERMEDIATE = 4096, 14336
FORMATS = ("bfloat16", "float8", "int8", "int4")
Call = Callable[[], torch.Tensor]


def weights(weight_format: str, prefix: str, n: int, k: int, seed: int) -> tuple[dict[str, torch.Tensor], int]:
    """A projection's operands by the composite's names, and their bytes."""
    _, made, _ = make(TorchArrays(), weight_format, 1, n, k, seed)
    names = {"weight": f"{prefix}_weight", "weight_scale": f"{prefix}_scale"}
    return {names[name]: x for name, x in made.items()}, sum(x.nbytes for x in made.values())


def product(x: torch.Tensor, given: dict[str, Any], prefix: str, **options: Any) -> torch.Tensor:
    return xg.linear(x, given[f"{prefix}_weight"], weight_scale=given.get(f"{prefix}_scale"), **options)


def gated_mlp(weight_format: str, rows: int, seed: int) -> tuple[Call, Call, int]:
    """A call of the composite, one of its parts, and the bytes of its weights."""
    gate_up, bytes_up = weights(weight_format, "gate_up", 2 * INTERMEDIATE, HIDDEN, seed)
    down, bytes_down = weights(weight_format, "down", HIDDEN, INTERMEDIATE, seed + 1000)
    arrays = TorchArrays()
    x, norm_weight = arrays.normal((rows, HIDDEN), 1.0, seed), arrays.normal((HIDDEN,), 0.1, seed) + 1
    given = {**gate_up, **down}

    def composite() -> torch.Tensor:
        return xg.gated_mlp(x, norm_weight=norm_weight, residual=x, eps=1e-5, **given)

    def parts() -> torch.Tensor:
        h = product(xg.rms_norm(x, norm_weight, eps=1e-5), given, "gate_up", activation="silu_and_mul")
        return product(h, given, "down", residual=x)

    return composite, parts, bytes_up + bytes_down


def attention_block(weight_format: str, rows: int, seed: int, context: int = 1024) -> tuple[Call, Call, int]:
    """The same of a decode step behind `context` tokens, with the bytes of K and V that it reads."""
    heads, kv_heads, head_dim, page_size = 32, 8, 128, 16
    qkv, bytes_qkv = weights(weight_format, "qkv", (heads + 2 * kv_heads) * head_dim, HIDDEN, seed)
    out, bytes_out = weights(weight_format, "out", HIDDEN, heads * head_dim, seed + 1000)
    arrays = TorchArrays()
    x, norm_weight = arrays.normal((rows, HIDDEN), 1.0, seed), arrays.normal((HIDDEN,), 0.1, seed) + 1
    pages = -(-(context + 1) // page_size)
    cache = arrays.normal((rows * pages, page_size, 2 * kv_heads, head_dim), 1.0, seed)

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device="cuda")

    tables = ints(torch.randperm(rows * pages).reshape(rows, pages))
    slots = tables[:, context // page_size] * page_size + context % page_size
    angles = torch.rand(context + 1, head_dim // 2, device="cuda")
    rotation = {"positions": ints([context] * rows), "table": torch.stack([angles.cos(), angles.sin()], -1)}
    metadata = {"context_lens": ints([context + 1] * rows), "block_tables": tables}
    metadata |= {"query_start_loc": ints(range(rows + 1)), "num_seqs": ints([rows])}
    given, scale = {**qkv, **out}, head_dim**-0.5

    def composite() -> torch.Tensor:
        return xg.attention_block_(
            x, kv_cache=cache, slot_mapping=slots, norm_weight=norm_weight, residual=x, eps=1e-5, scale=scale,
            **given, **rotation, **metadata,
        )  # fmt: skip

    def parts() -> torch.Tensor:
        h = product(xg.rms_norm(x, norm_weight, eps=1e-5), given, "qkv")
        query = xg.rotary_and_cache_(h, kv_cache=cache, slot_mapping=slots, **rotation)
        attended = xg.paged_attention(query, cache, scale=scale, **metadata)
        return product(attended.view(rows, -1), given, "out", residual=x)

    return composite, parts, bytes_qkv + bytes_out + rows * (context + 1) * 2 * kv_heads * head_dim * cache.itemsize


OPERATORS = {"gated_mlp": gated_mlp, "attention_block": attention_block}


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    for operator in arguments.operators:
        for weight_format in arguments.formats:
            for rows in arguments.rows:
                yield operator, weight_format, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS), help="of them, these (default: both)"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights (default: all)"
    )
    parser.add_argument(
        "--rows", nargs="+", type=positive, default=[1, 8, 32, 64], help="tokens of a call (default: %(default)s)"
    )
    arguments = parser.parse_args()
    require_gpu(parser)
    for operator, weight_format, rows in cases(arguments):
        with memory.left_out_if_too_large(f"{operator} {weight_format} {rows} rows"):
            _, _, amount = first = OPERATORS[operator](weight_format, rows, 0)
            sets = [
                first,
                *(OPERATORS[operator](weight_format, rows, s) for s in range(1, timing.sets_needed(amount) + 1)),
            ]
            assert torch.equal(first[0](), first[1]()), f"{operator} {weight_format} {rows}: not the parts' bits"
            composite, parts = (timing.microseconds([one[i] for one in sets], repeats=7) for i in (0, 1))
            row = {"operator": operator, "weights": weight_format, "rows": rows, "microseconds": round(composite, 1)}
            row |= {"parts": round(parts, 1), "TB/s": round(amount / composite * 1e-6, 2)}
            print(json.dumps(row), flush=True)
            del sets, first


if __name__ == "__main__":
    main()
