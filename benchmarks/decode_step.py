"""A whole decode step of a Llama in one jitted JAX program, tensor parallel over the GPUs of this machine.

python -m benchmarks.decode_step --tensor-parallel 2 --json decode_step.json

Random weights in bfloat16. Milliseconds of a step when steps follow one another without waiting, beside the limit:
weights and KV cache read once from memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

import xla_gpu.jax as xg

from . import kernel_times
from .argument_types import load_size, positive
from .decode_model import (
    CACHE_SPEC,
    JOINS,
    PAGE_SIZE,
    SHAPES,
    Options,
    P,
    T,
    Weights,
    gathers,
    joins,
    make_weights,
    on_all,
    step,
)
from .memory import left_out_if_too_large

BYTES_PER_SECOND = 4.5e12  # that an H200's memory gives a reader

# XLA times its Triton kernels and cuBLAS's one product at a time, and mostly takes its own. In a step, cuBLAS's are
# faster but for a few rows (docs/scaling.md).
CUBLAS: Any = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}
CUBLAS_ROWS = 16
# Of rows in parts: XLA's collective permute copies to the other GPU's memory (3: peer), which takes no SM from the
# products, and the products of the parts are not joined again.
OVERLAP: Any = {"xla_gpu_collective_permute_mode": 3, "xla_gpu_dot_merger_threshold_mb": 0}


def many(body: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """So many steps as one program, as a server may decode: the host launches it once."""

    def run(weights: Weights, caches: Any, tokens: Any, context_lens: Any, *rest: Any) -> Any:
        def once(_: Any, state: Any) -> Any:
            return body(weights, *state, *rest)

        return jax.lax.fori_loop(0, steps, once, (caches, tokens, context_lens))

    return run


def measure(
    run: Callable[..., Any], state: tuple[Any, ...], rest: tuple[Any, ...], steps: int
) -> tuple[float, float, Any]:
    """Milliseconds of a step, those that the host needs to launch one, and the state after it."""
    times, launches = [], []
    lengths = np.asarray(state[2])
    for repeat in range(6):  # each begins with the same context
        state = jax.block_until_ready((*state[:2], jax.device_put(lengths, state[2].sharding)))
        begin = time.perf_counter()
        for _ in range(steps if repeat else 2):  # the first warms up
            state = run(*state, *rest)
        launches.append((time.perf_counter() - begin) / steps * 1e3)
        state[1].block_until_ready()
        times.append((time.perf_counter() - begin) / steps * 1e3)
    return statistics.median(times[1:]), statistics.median(launches[1:]), state


def profile(
    run: Callable[..., Any], state: tuple[Any, ...], rest: tuple[Any, ...], programs: int, steps_per_program: int
) -> tuple[Any, ...]:
    """Prints what each kernel adds to a step on the first GPU; returns the state after it."""

    def chain() -> None:
        nonlocal state
        for _ in range(programs):
            state = run(*state, *rest)
        jax.block_until_ready(state[1])

    kernel_times.report(chain, programs * steps_per_program)
    return state


def can_exchange(rows: int, ranks: int, parts: int) -> bool:
    """Whether the rows of a part are divided over the ranks in equal shares."""
    return ranks == 2 or rows // parts % ranks == 0


def wrong_option(arguments: argparse.Namespace) -> str | None:
    """What is wrong with options that do not fit together, or this machine, if anything."""
    parts, ranks = arguments.row_parts, arguments.tensor_parallel
    if ranks > (devices := len(jax.devices())):
        return f"--tensor-parallel: expected at most {devices}, the number of JAX's devices, got {ranks}"
    known = JOINS if ranks > 1 else ("one",)
    if unknown := set(arguments.joins or ()) - set(known):
        return f"--joins: expected some of {', '.join(known)} over {ranks} GPUs, got {min(unknown)}"
    if parts > 1 and (arguments.blocks or not arguments.prefill):
        return "--row-parts: expected --prefill, and no --blocks"
    for batch, context in arguments.cases:
        rows = batch * (context if arguments.prefill else 1)
        of_case = f"of {batch}x{context}"
        if rows % parts:
            return f"--row-parts: expected a divisor of the {rows} rows {of_case}, got {parts}"
        if "exchange" in (arguments.joins or ()) and not can_exchange(rows, ranks, parts):
            return f"--joins: exchange: expected a multiple of {ranks} rows in each part, got {rows // parts} {of_case}"
    return None


class Model(NamedTuple):
    """Weights over the devices of ``mesh``, which ``group`` sums over where there are several."""

    mesh: jax.sharding.Mesh
    group: xg.DeviceGroup | None
    layers: int
    heads: tuple[int, int, int]  # of queries, of keys and values, and their size
    weights: Weights
    specs: Any
    weight_bytes: int

    @property
    def ranks(self) -> int:
        return self.mesh.size


def make_model(arguments: argparse.Namespace) -> Model:
    ranks, shape = arguments.tensor_parallel, SHAPES[arguments.shape]
    *_, layers, _, heads, kv_heads, head_dim = shape
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    group = xg.DeviceGroup(mesh, "tp", timeout_s=60) if ranks > 1 else None
    return Model(mesh, group, layers, (heads, kv_heads, head_dim), *make_weights(shape, mesh, arguments.weights))


def compiled_step(
    arguments: argparse.Namespace, model: Model, name: str, join: Callable[..., Any], rows: int
) -> Callable[..., Any]:
    """A program of ``arguments.steps_per_program`` steps of so many rows, whose sums over the GPUs are ``join``."""
    heads, kv_heads, head_dim = model.heads
    local = (heads // model.ranks, kv_heads // model.ranks, head_dim)
    axis = "tp" if model.ranks > 1 else None
    options = Options(arguments.fused, arguments.linear, arguments.blocks, arguments.row_parts)
    body = functools.partial(step, join, gathers(model.group, name), options, local, axis)
    if model.ranks > 1:
        cache_specs = [CACHE_SPEC] * model.layers
        in_specs = (model.specs, cache_specs, P(), P(), P(), P(), P())
        out_specs = (cache_specs, P(), P())
        body = jax.shard_map(body, mesh=model.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if arguments.steps_per_program > 1:
        body = many(body, arguments.steps_per_program)
    cublas = arguments.products == "cublas" or (arguments.products == "by-rows" and rows >= CUBLAS_ROWS)
    chosen = {**(CUBLAS if cublas else {}), **(OVERLAP if arguments.row_parts > 1 else {})}
    # All that a step hands to the next is donated, tokens and lengths too: their addresses stay the same then, and XLA
    # replays its captured graphs as they are.
    jitted = jax.jit(body, donate_argnums=(1, 2, 3), compiler_options=chosen or None)
    return functools.partial(jitted, model.weights)


def measured(arguments: argparse.Namespace, model: Model, batch: int, context: int) -> Iterator[dict[str, Any]]:
    """A row of the result for each way to sum over the GPUs."""
    _, kv_heads, head_dim = model.heads
    new = context if arguments.prefill else 1
    rows = batch * new
    most = 2 * arguments.steps * arguments.steps_per_program  # steps of a chain, and of the profile after it
    pages = -(-(context + most + 8) // PAGE_SIZE)
    cache_shape = (pages * batch, PAGE_SIZE, 2 * kv_heads, head_dim)
    sharding = jax.sharding.NamedSharding(model.mesh, CACHE_SPEC)
    caches = [jax.jit(lambda: jnp.zeros(cache_shape, T), out_shardings=sharding)() for _ in range(model.layers)]
    order = np.random.default_rng(0).permutation(pages * batch).astype(np.int32)
    rest = (
        on_all(model.mesh, order.reshape(batch, pages)),
        on_all(model.mesh, np.arange(batch + 1, dtype=np.int32) * new),
        on_all(model.mesh, np.array([batch], np.int32)),
    )
    kv_bytes = batch * context * model.layers * kv_heads * head_dim * 4
    limit = (model.weight_bytes + kv_bytes) / BYTES_PER_SECOND / model.ranks * 1e3
    for name, join in joins(model.group).items():
        if arguments.joins and name not in arguments.joins:
            continue
        if name == "exchange" and not can_exchange(rows, model.ranks, arguments.row_parts):
            continue
        run = compiled_step(arguments, model, name, join, rows)
        lengths = on_all(model.mesh, np.full(batch, 0 if arguments.prefill else context, np.int32))
        state = (caches, on_all(model.mesh, np.zeros(rows, np.int32)), lengths)
        milliseconds, launch, state = measure(run, state, rest, arguments.steps)
        if arguments.profile:
            state = profile(run, state, rest, arguments.steps, arguments.steps_per_program)
        caches, tokens, _ = state
        milliseconds, launch = (x / arguments.steps_per_program for x in (milliseconds, launch))
        row = {"case": f"{batch}x{context}", "join": name, "milliseconds": round(milliseconds, 3)}
        if arguments.prefill:
            row["tokens_per_second"] = round(rows / milliseconds * 1e3)
        else:
            row["limit"] = round(limit, 3)
        yield row | {"launch": round(launch, 3), "tokens": np.asarray(tokens)[:4].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, help="devices that share the model (default %(default)s)"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="of the model (default %(default)s)")
    cases = [(1, 1024), (32, 1024), (64, 2048)]
    parser.add_argument(
        "--cases",
        type=load_size,
        nargs="+",
        default=cases,
        metavar="SEQUENCESxCONTEXT",
        help="sequences, and tokens that each has (default: 1x1024 32x1024 64x2048)",
    )
    parser.add_argument("--joins", nargs="+", help=f"{', '.join(JOINS)} (default: all that take the rows)")
    parser.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="rotary_and_cache and silu_and_mul instead of jax.numpy (default: yes)",
    )
    parser.add_argument("--linear", action="store_true", help="products of plain weights by the operator linear too")
    parser.add_argument("--blocks", action="store_true", help="attention_block and gated_mlp on each device's shard")
    parser.add_argument("--weights", choices=("bfloat16", "float8"), default="bfloat16", help="float8: by linear")
    parser.add_argument("--prefill", action="store_true", help="all tokens of the context at once, instead of one more")
    parser.add_argument(
        "--products",
        choices=("by-rows", "xla", "cublas"),
        default="by-rows",
        help=f"xla: by its Triton kernels or cuBLAS, as it times them; cublas: by that alone; by-rows: cublas from "
        f"{CUBLAS_ROWS} rows (default)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=30,
        help="programs in flight at once (default %(default)s): the host's time for the first counts once",
    )
    parser.add_argument(
        "--steps-per-program", type=positive, default=1, help="steps of one program, in a loop (default %(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="what each kernel adds to a step")
    parser.add_argument(
        "--row-parts",
        type=positive,
        default=1,
        help="parts of the rows, of which one is summed while another is multiplied: with --prefill --joins exchange",
    )
    parser.add_argument("--json", type=Path, help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    if wrong := wrong_option(arguments):
        parser.error(wrong)
    model = make_model(arguments)
    rows = []
    for batch, context in arguments.cases:
        with left_out_if_too_large(f"{batch}x{context}"):
            for row in measured(arguments, model, batch, context):
                rows.append(row)
                print(json.dumps(row), flush=True)
            if model.group is not None:
                model.group.check()
    if arguments.json:
        record = {"device": jax.devices()[0].device_kind, "tensor_parallel": model.ranks, "shape": arguments.shape}
        arguments.json.write_text(json.dumps(record | {"jax": jax.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
