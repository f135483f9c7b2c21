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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

import xla_gpu.jax as xg

from . import kernel_times
from .memory import left_out_if_too_large

P = jax.sharding.PartitionSpec
BYTES_PER_SECOND = 4.5e12  # that an H200's memory gives a reader
T = jnp.bfloat16
PAGE_SIZE = 16
MAX_CONTEXT = 8192
EPS = 1e-5
SHAPES = {  # hidden, intermediate, layers, vocabulary, heads, kv heads, head_dim
    "llama3-8b": (4096, 14336, 32, 128256, 32, 8, 128),
    "llama3-70b": (8192, 28672, 80, 128256, 64, 8, 128),
    "tiny": (256, 512, 2, 512, 8, 4, 32),
}
Weights = dict[str, Any]
Weight = dict[str, jax.Array]  # weight, and scale where it is quantised


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)
    return (wide * scale).astype(x.dtype) * weight


def rotations(head_dim: int) -> np.ndarray:
    """float32 [MAX_CONTEXT, head_dim / 2, 2]: cosines and sines."""
    frequencies = 500000.0 ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angles = np.arange(MAX_CONTEXT, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    head_dim = x.shape[-1]
    frequencies = 500000.0 ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


# How a sublayer's partial sums become the next one's input: (partial, residual, weight) -> (normed, residual).
Join = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# What every rank has of a few float32 numbers, by rank: (numbers) -> [ranks, *numbers.shape].
Gather = Callable[[jax.Array], jax.Array]


def joins(group: xg.DeviceGroup | None) -> dict[str, Join]:
    if group is None:

        def alone(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = x + residual
            return norm(total, weight), total

        return {"one": alone}

    def with_psum(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jax.lax.psum(x, group.axis) + residual
        return norm(total, weight), total

    def with_all_reduce(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = xg.all_reduce(x, group=group) + residual
        return norm(total, weight), total

    def fused(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return xg.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group=group)

    return {"psum": with_psum, "all_reduce": with_all_reduce, "all_reduce_add_rms_norm": fused}


def gathers(group: xg.DeviceGroup | None, name: str) -> Gather | None:
    if group is None:
        return None
    if name == "psum":
        return functools.partial(jax.lax.all_gather, axis_name=group.axis)

    def by_sum(numbers: jax.Array) -> jax.Array:
        places = jnp.zeros((group.size, *numbers.shape), numbers.dtype)
        # A sum with zeros is exact; so the program holds no collective of XLA's, at which its threads would meet.
        return xg.all_reduce(places.at[jax.lax.axis_index(group.axis)].set(numbers), group=group)

    return by_sum


def most_likely(logits: jax.Array, axis: str | None, gather: Gather | None) -> jax.Array:
    """int32 [batch]: of each row the index of the largest logit over the ranks' parts of the vocabulary."""
    chosen = jnp.argmax(logits, -1).astype(jnp.int32)
    if gather is None:
        return chosen
    chosen += jax.lax.axis_index(axis) * logits.shape[-1]
    # Below 2 ** 24 an index is exact in float32.
    every = gather(jnp.stack([jnp.max(logits, -1).astype(jnp.float32), chosen.astype(jnp.float32)]))
    return jnp.take_along_axis(every[:, 1], jnp.argmax(every[:, 0], 0)[None], 0)[0].astype(jnp.int32)


def times(x: jax.Array, weight: Weight, linear: bool = False) -> jax.Array:
    """x @ weight.T: weights are [out, in], as checkpoints store them. With [in, out] and a single row XLA writes the
    products of all elements to memory and adds them up in a second kernel."""
    if linear or "scale" in weight:
        return xg.linear(x, weight["weight"], weight_scale=weight.get("scale"))
    return jax.lax.dot_general(x, weight["weight"], (((1,), (1,)), ((), ())))


def projections(layer: dict[str, Weight], *names: str) -> dict[str, jax.Array]:
    """The weights and scales of these products by the names of attention_block and gated_mlp."""
    return {f"{name}_{part}": value for name in names for part, value in layer[name].items()}


# XLA times its Triton kernels and cuBLAS's one product at a time, and mostly takes its own. In a step, cuBLAS's are
# faster but for a few rows (docs/scaling.md).
CUBLAS: Any = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}
CUBLAS_ROWS = 16


class Options(NamedTuple):
    fused: bool  # rotary_and_cache and silu_and_mul
    linear: bool  # products of plain weights too
    blocks: bool = False  # attention_block and gated_mlp, on each device's shard


def step(
    join: Join,
    gather: Gather | None,
    options: Options,
    heads: tuple[int, int, int],
    axis: str | None,
    weights: Weights,
    caches: list[jax.Array],
    tokens: jax.Array,
    context_lens: jax.Array,
    tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """One token of each sequence; a device's weights and heads are its shard's. Returns caches, tokens, lengths. With
    several tokens of each sequence, a prefill, tokens and lengths are such that the next call does the same."""
    num_heads, num_kv_heads, head_dim = heads
    batch, rows = tables.shape[0], tokens.shape[0]
    new = rows // batch
    product = functools.partial(times, linear=options.linear)
    lengths = context_lens + new
    positions = (context_lens[:, None] + jnp.arange(new, dtype=jnp.int32)).reshape(rows)
    slots = tables[jnp.arange(rows) // new, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    residual = weights["embed"][tokens]
    hidden = norm(residual, weights["norms"][0])
    stored = []
    for i, (layer, cache) in enumerate(zip(weights["layers"], caches, strict=True)):
        if options.blocks:
            partial, cache = xg.attention_block(
                hidden,
                positions=positions,
                table=weights["rotations"],
                kv_cache=cache,
                slot_mapping=slots,
                context_lens=lengths,
                block_tables=tables,
                query_start_loc=query_start_loc,
                num_seqs=num_seqs,
                scale=head_dim**-0.5,
                **projections(layer, "qkv", "out"),
            )
            stored.append(cache)
            hidden, residual = join(partial, residual, weights["norms"][2 * i + 1])
            partial = xg.gated_mlp(hidden, **projections(layer, "gate_up", "down"))
            hidden, residual = join(partial, residual, weights["norms"][2 * i + 2])
            continue
        qkv = product(hidden, layer["qkv"])
        if options.fused:
            query, cache = xg.rotary_and_cache(qkv, positions, weights["rotations"], cache, slots)
        else:
            cuts = [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
            query, key, value = (t.reshape(rows, -1, head_dim) for t in jnp.split(qkv, cuts, 1))
            query, key = rotate(query, positions), rotate(key, positions)
            cache = xg.reshape_and_cache(key, value, cache, slots)
        attended = xg.paged_attention(query, cache, lengths, tables, query_start_loc, num_seqs, scale=head_dim**-0.5)
        stored.append(cache)
        partial = product(attended.reshape(rows, -1), layer["out"])
        hidden, residual = join(partial, residual, weights["norms"][2 * i + 1])
        gate_up = product(hidden, layer["gate_up"])
        if options.fused:
            gated = xg.silu_and_mul(gate_up)
        else:
            gate, up = jnp.split(gate_up, 2, 1)
            gated = jax.nn.silu(gate) * up
        partial = product(gated, layer["down"])
        hidden, residual = join(partial, residual, weights["norms"][2 * i + 2])
    hidden = hidden.reshape(batch, new, -1)[:, -1]
    chosen = most_likely(product(hidden, weights["head"]), axis, gather)
    return stored, *((chosen, lengths) if new == 1 else (tokens.at[:batch].set(chosen), context_lens))


def on_all(mesh: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
    """A copy on each device. An argument that lies on one device is copied to the others by Python at every call of a
    jitted function over several: some 30 to 60 microseconds of the host's time each."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P()))


SPECS = {"qkv": P("tp", None), "out": P(None, "tp"), "gate_up": P("tp", None), "down": P(None, "tp")}
CACHE_SPEC = P(None, None, "tp", None)


def make_weights(
    shape: tuple[int, ...], mesh: jax.sharding.Mesh, weight_format: str = "bfloat16"
) -> tuple[Weights, Weights, int]:
    """Random weights drawn shard by shard on their devices, their specs, and their bytes. Rows of a shard's qkv and
    gate_up stand together: its own q, k and v, and its own gate and up. In float8 with a scale for each row; the head
    stays bfloat16."""
    hidden, intermediate, layers, vocabulary, heads, kv_heads, head_dim = shape
    total = 0

    @functools.cache
    def maker(dims: tuple[int, ...], spec: jax.sharding.PartitionSpec, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        spread = 0.02 if dtype == T else 1.0
        return jax.jit(lambda key: (jax.random.normal(key, dims, T) * spread).astype(dtype), out_shardings=sharding)

    def make(seed: int, dims: tuple[int, ...], spec: jax.sharding.PartitionSpec, quantised: bool = False) -> Weight:
        nonlocal total
        dtype = jnp.float8_e4m3fn if quantised else T
        total += dtype.dtype.itemsize * int(np.prod(dims))
        made = {"weight": maker(dims, spec, dtype)(jax.random.PRNGKey(seed))}
        if quantised:
            sharding = jax.sharding.NamedSharding(mesh, P(spec[0]))
            made["scale"] = jax.device_put(np.full(dims[0], 0.02, np.float32), sharding)
        return made

    def specs_of(spec: jax.sharding.PartitionSpec, quantised: bool = False) -> Weights:
        return {"weight": spec, "scale": P(spec[0])} if quantised else {"weight": spec}

    sizes = {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "out": (hidden, heads * head_dim),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    float8 = weight_format == "float8"
    blocks = [
        {n: make(10 * i + j, d, SPECS[n], float8) for j, (n, d) in enumerate(sizes.items())} for i in range(layers)
    ]
    weights: Weights = {"layers": blocks, "head": make(1, (vocabulary, hidden), P("tp", None))}
    read = total  # of the embedding only some rows are
    weights["embed"] = make(2, (vocabulary, hidden), P())["weight"]
    weights["norms"] = [on_all(mesh, np.ones(hidden, T)) for _ in range(2 * layers + 1)]
    weights["rotations"] = on_all(mesh, rotations(head_dim))
    specs = {
        "rotations": P(),
        "layers": [{n: specs_of(SPECS[n], float8) for n in sizes} for _ in range(layers)],
        "head": specs_of(P("tp", None)),
        "embed": P(),
        "norms": [P()] * (2 * layers + 1),
    }
    return weights, specs, read


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--cases", nargs="+", default=["1x1024", "32x1024", "64x2048"], metavar="SEQUENCESxCONTEXT")
    names = "psum, all_reduce, all_reduce_add_rms_norm"
    parser.add_argument("--joins", nargs="+", help=f"{names} (default: all)")
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
        type=int,
        default=30,
        help="programs in flight at once (default %(default)s): the host's time for the first counts once",
    )
    parser.add_argument("--steps-per-program", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="what each kernel adds to a step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ranks, shape = arguments.tensor_parallel, SHAPES[arguments.shape]
    *_, layers, _, heads, kv_heads, head_dim = shape
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    group = xg.DeviceGroup(mesh, "tp", timeout_s=60) if ranks > 1 else None
    weights, specs, weight_bytes = make_weights(shape, mesh, arguments.weights)
    rows = []
    for case in arguments.cases:
        caches = state = None  # the case before may have ended early
        with left_out_if_too_large(case):
            batch, context = map(int, case.split("x"))
            new = context if arguments.prefill else 1
            most = 2 * arguments.steps * arguments.steps_per_program  # steps of a chain, and of the profile after it
            pages = -(-(context + most + 8) // PAGE_SIZE)
            cache_shape = (pages * batch, PAGE_SIZE, 2 * kv_heads, head_dim)
            sharding = jax.sharding.NamedSharding(mesh, CACHE_SPEC)
            caches = [jax.jit(lambda: jnp.zeros(cache_shape, T), out_shardings=sharding)() for _ in range(layers)]  # noqa: B023
            order = np.random.default_rng(0).permutation(pages * batch).astype(np.int32)
            rest = (
                on_all(mesh, order.reshape(batch, pages)),
                on_all(mesh, np.arange(batch + 1, dtype=np.int32) * new),
                on_all(mesh, np.array([batch], np.int32)),
            )
            limit = (weight_bytes + batch * context * layers * kv_heads * head_dim * 4) / BYTES_PER_SECOND / ranks * 1e3
            for name, join in joins(group).items():
                if arguments.joins and name not in arguments.joins:
                    continue
                local = (heads // ranks, kv_heads // ranks, head_dim)
                axis = "tp" if ranks > 1 else None
                options = Options(arguments.fused, arguments.linear, arguments.blocks)
                body = functools.partial(step, join, gathers(group, name), options, local, axis)
                if ranks > 1:
                    cache_specs = [CACHE_SPEC] * layers
                    in_specs = (specs, cache_specs, P(), P(), P(), P(), P())
                    out_specs = (cache_specs, P(), P())
                    body = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
                if arguments.steps_per_program > 1:
                    body = many(body, arguments.steps_per_program)
                cublas = arguments.products == "cublas" or (
                    arguments.products == "by-rows" and batch * new >= CUBLAS_ROWS
                )
                # All that a step hands to the next is donated, tokens and lengths too: their addresses stay the same
                # then, and XLA replays its captured graphs as they are.
                compiled = functools.partial(
                    jax.jit(body, donate_argnums=(1, 2, 3), compiler_options=CUBLAS if cublas else None), weights
                )
                lengths = on_all(mesh, np.full(batch, 0 if arguments.prefill else context, np.int32))
                state = (caches, on_all(mesh, np.zeros(batch * new, np.int32)), lengths)
                milliseconds, launch, state = measure(compiled, state, rest, arguments.steps)
                if arguments.profile:
                    state = profile(compiled, state, rest, arguments.steps, arguments.steps_per_program)
                caches, tokens, _ = state
                milliseconds, launch = (x / arguments.steps_per_program for x in (milliseconds, launch))
                row = {"case": case, "join": name, "milliseconds": round(milliseconds, 3), "limit": round(limit, 3)}
                row["launch"] = round(launch, 3)
                if arguments.prefill:
                    row["tokens_per_second"] = round(batch * new / milliseconds * 1e3)
                    del row["limit"]  # of a decode step
                row["tokens"] = np.asarray(tokens)[:4].tolist()
                rows.append(row)
                print(json.dumps(row), flush=True)
            if group is not None:
                group.check()
    if arguments.json:
        record = {"device": jax.devices()[0].device_kind, "tensor_parallel": ranks, "shape": arguments.shape}
        arguments.json.write_text(json.dumps(record | {"jax": jax.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
