"""linear for few rows: the shapes of Llama 3 8B, every format of the weight, beside cuBLAS (PyTorch) and XLA (JAX), and
int4 beside vLLM's Marlin and Machete where VLLM_LIBRARY names its library (see linear_peers.py).

    python -m benchmarks.linear                     # on a GPU: PyTorch's CUDA graphs over rotating weights
    python -m benchmarks.linear --jax               # programs of JAX that hold many products, and XLA's dot
    python -m benchmarks.linear --rows 1 32 --formats bfloat16 int4 --shapes qkv down

Results are compared with a float32 product before anything is timed. TB/s count each byte of the weight, its scales, x
and the result once.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import memory
from benchmarks.argument_types import positive, require_gpu

SHAPES = {  # name: n, k
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
FORMATS = ("bfloat16", "float8", "float8_block", "int8", "int4")
ROWS = (1, 8, 16, 32, 64)
ROTATION_BYTES = 200e6  # weights that are used in turn exceed every GPU's L2
Case = tuple[dict[str, Any], dict[str, Any], int]  # operands but the weights, the weights, bytes of a call


def make(xp: Any, weight_format: str, rows: int, n: int, k: int, seed: int) -> Case:
    """Operands by a framework's functions ``xp`` (see TorchArrays), random."""
    bytes_of_weight = {"bfloat16": 2.0, "float8": 1.0, "float8_block": 1.0, "int8": 1.0, "int4": 0.5}[weight_format]
    if weight_format == "bfloat16":
        weight = {"weight": xp.normal((n, k), k**-0.5, seed)}
    elif weight_format == "int4":
        scale = xp.normal((n, k // 128), 0.0, seed) + 0.2 * k**-0.5
        weight = {"weight": xp.bytes((n, k // 2), seed), "weight_scale": scale}
    else:
        shape = (-(-n // 128), -(-k // 128)) if weight_format == "float8_block" else (n,)
        weight = {"weight": xp.cast(xp.normal((n, k), 1.0 if weight_format != "int8" else 40.0, seed), weight_format)}
        weight["weight_scale"] = xp.full(shape, k**-0.5 * (1.0 if weight_format != "int8" else 1 / 40))
    scale_bytes = {"float8_block": n * k / 128 / 128 * 4, "int4": n * k / 128 * 2}.get(weight_format, 0)
    amount = int(n * k * bytes_of_weight + scale_bytes + 2 * rows * (n + k))
    return {"x": xp.normal((rows, k), 1.0, seed + 1)}, weight, amount


class TorchArrays:
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def normal(self, shape: tuple[int, ...], spread: float, seed: int) -> Any:
        generator = self.torch.Generator("cuda").manual_seed(seed)
        return spread * self.torch.randn(shape, device="cuda", dtype=self.torch.bfloat16, generator=generator)

    def bytes(self, shape: tuple[int, ...], seed: int) -> Any:
        generator = self.torch.Generator("cuda").manual_seed(seed)
        return self.torch.randint(0, 256, shape, device="cuda", dtype=self.torch.uint8, generator=generator)

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        return self.torch.full(shape, value, device="cuda", dtype=self.torch.float32)

    def cast(self, array: Any, weight_format: str) -> Any:
        return array.to(self.torch.int8 if weight_format == "int8" else self.torch.float8_e4m3fn)


class JaxArrays:
    def __init__(self) -> None:
        import jax

        self.jax, self.jnp = jax, jax.numpy

    def normal(self, shape: tuple[int, ...], spread: float, seed: int) -> Any:
        return spread * self.jax.random.normal(self.jax.random.key(seed), shape, self.jnp.bfloat16)

    def bytes(self, shape: tuple[int, ...], seed: int) -> Any:
        return self.jax.random.bits(self.jax.random.key(seed), shape, self.jnp.uint8)

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        return self.jnp.full(shape, value, self.jnp.float32)

    def cast(self, array: Any, weight_format: str) -> Any:
        return array.astype(self.jnp.int8 if weight_format == "int8" else self.jnp.float8_e4m3fn)


def with_torch(weight_format: str, rows: int, n: int, k: int) -> tuple[float, dict[str, float], int]:
    """Microseconds of one product, of others' for a weight in bfloat16 or int4, and its bytes."""
    import torch
    from benchmarks import linear_peers, timing

    import xla_gpu.torch as xg

    arrays = TorchArrays()
    x, weight, amount = make(arrays, weight_format, rows, n, k, 0)
    got = xg.linear(**x, **weight)
    wide = torch.cat([x["x"], x["x"].new_zeros(65, k)])  # above 64 rows: PyTorch's product
    torch.testing.assert_close(got, xg.linear(wide, **weight)[:rows], rtol=2e-2, atol=2e-2)
    sets = [weight]
    for seed in range(2, 1 + max(1, min(16, -(-int(ROTATION_BYTES) // amount)))):
        sets.append(make(arrays, weight_format, rows, n, k, seed)[1])
    ours = [lambda w=w: xg.linear(**x, **w) for w in sets]
    theirs: dict[str, list[Callable[[], Any]]] = {}
    if weight_format == "bfloat16":
        theirs["cuBLAS"] = [lambda w=w: torch.nn.functional.linear(x["x"], w["weight"]) for w in sets]
    elif weight_format == "int4" and (peers := linear_peers.int4_peers()) is not None:
        for of_peers in (peers.calls(x["x"], **w) for w in sets):
            for name, call in of_peers.items():
                theirs.setdefault(name, []).append(call)
        for name, calls in theirs.items():
            torch.testing.assert_close(calls[0](), got, rtol=2e-2, atol=2e-2, msg=lambda text, n=name: f"{n}: {text}")
    mine = timing.microseconds(ours, repeats=7)
    return mine, {name: timing.microseconds(calls, repeats=7) for name, calls in theirs.items()}, amount


def with_jax(weight_format: str, rows: int, n: int, k: int) -> tuple[float, dict[str, float], int]:
    """The same in JAX, beside XLA's dot of the converted weight: a program of several products, whose results all
    remain."""
    import jax

    import xla_gpu.jax as xg
    from xla_gpu import quantization

    arrays = JaxArrays()
    x, weight, amount = make(arrays, weight_format, rows, n, k, 0)
    count = max(2, min(16, -(-int(ROTATION_BYTES) // amount)))
    sets = [weight, *(make(arrays, weight_format, rows, n, k, seed)[1] for seed in range(2, 1 + count))]

    def xla(x: Any, **weight: Any) -> Any:
        return x @ quantization.dequantize(quantization.LinearWeight(**weight)).astype(x.dtype).T

    times = []
    for function in (xg.linear, xla):
        program = jax.jit(lambda x, sets, f=function: [f(x, **w) for w in sets])
        times.append(_wall(lambda program=program: program(x["x"], sets)) / len(sets))
    return times[0], {"XLA": times[1]}, amount


def _wall(call: Callable[[], Any], repeats: int = 10, inner: int = 10) -> float:
    import jax

    for _ in range(3):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        results = [call() for _ in range(inner)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - begin) * 1e6 / inner)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jax", action="store_true", help="programs of JAX, beside XLA's product, instead of PyTorch's CUDA graphs"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of Llama 3 8B's matrices (default: all)"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights (default: all)"
    )
    parser.add_argument(
        "--rows", nargs="+", type=positive, default=list(ROWS), help="tokens of a call (default: %(default)s)"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    if not arguments.jax:
        require_gpu(parser)
    measure = with_jax if arguments.jax else with_torch
    rows_of_table = []
    for weight_format in arguments.formats:
        for name in arguments.shapes:
            for rows in arguments.rows:
                with memory.left_out_if_too_large(f"{weight_format} {name} {rows} rows"):
                    mine, theirs, amount = measure(weight_format, rows, *SHAPES[name])
                    text = f"{weight_format:12} {name:8} {rows:3} rows {mine:8.1f} us {amount / mine / 1e6:6.2f} TB/s"
                    for other, microseconds in theirs.items():
                        text += f"   {other} {microseconds:8.1f} us {microseconds / mine:5.2f} x"
                    print(text, flush=True)
                    rows_of_table.append(
                        {
                            "format": weight_format,
                            "shape": name,
                            "rows": rows,
                            "us": mine,
                            **theirs,
                            "bytes": amount,
                        }
                    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows_of_table, indent=1))


if __name__ == "__main__":
    main()
