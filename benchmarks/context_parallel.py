"""Decode of one long context over several GPUs beside one: microseconds of a call in a program of many.

python -m benchmarks.context_parallel --devices 2 --contexts 131072 524288

Llama-3-8B's heads (32 query, 8 KV, head_dim 128) in bfloat16, pages of 16 tokens in random order. Rows: paged_attention
on one GPU with the whole context, context_parallel_paged_attention with XLA's all-gathers, and with a DeviceGroup.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import memory
from benchmarks.argument_types import add_devices, positive

import xla_gpu.jax as xg

P = jax.sharding.PartitionSpec
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
CALLS = 32  # in a program: enough to hide the host's share


def microseconds(step: Callable[[], jax.Array], repeats: int) -> float:
    step().block_until_ready()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(3):
            out = step()
        out.block_until_ready()
        times.append((time.perf_counter() - begin) / 3 / CALLS * 1e6)
    return min(times)


def chained(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(query: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            query = attend(query, *rest)
        return query

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_devices(parser, len(jax.devices()))
    parser.add_argument(
        "--contexts",
        type=positive,
        nargs="+",
        default=[131072, 524288],
        help="tokens of the sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=positive, default=6, help="runs, of which the fastest counts (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    if arguments.devices > (there := len(jax.devices())):
        parser.error(f"--devices: expected at most {there}, the number of JAX's devices, got {arguments.devices}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: arguments.devices]), ("cp",))
    group = xg.DeviceGroup(mesh, "cp", timeout_s=20)
    alone = jax.sharding.Mesh(mesh.devices[:1], ("cp",))
    rows = []
    for context in arguments.contexts:
        for name, where, given in (("one device", alone, None), ("all-gather", mesh, None), ("group", mesh, group)):
            with memory.left_out_if_too_large(f"{context} {name}"):
                pages = -(-context // PAGE_SIZE // where.size)  # of a device

                def put(x: np.ndarray, *spec: str, where: jax.sharding.Mesh = where) -> jax.Array:
                    return jax.device_put(x, jax.sharding.NamedSharding(where, P(*spec)))

                shape = (where.size * pages, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM)
                draw = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
                cache = jax.jit(draw, out_shardings=jax.sharding.NamedSharding(where, P("cp")))(jax.random.key(0))
                tables = np.stack([np.random.default_rng(r).permutation(pages) for r in range(where.size)]).astype(
                    np.int32
                )
                query = np.random.default_rng(0).standard_normal((1, HEADS, HEAD_DIM)).astype(jnp.bfloat16)
                metadata = (put(np.array([context], np.int32)), put(tables, "cp"), put(np.array([0, 1], np.int32)))
                args = (put(query), cache, *metadata, put(np.array([1], np.int32)))
                if name == "one device":
                    step = chained(functools.partial(xg.paged_attention, scale=HEAD_DIM**-0.5))
                else:
                    attend = functools.partial(
                        xg.context_parallel_paged_attention, axis="cp", scale=HEAD_DIM**-0.5, group=given
                    )
                    in_specs = (P(), P("cp"), P(), P("cp"), P(), P())
                    step = jax.shard_map(chained(attend), mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
                compiled = jax.jit(step)
                row = {"context": context, "devices": where.size, "what": name}
                row["microseconds"] = round(microseconds(lambda: compiled(*args), arguments.repeats), 1)  # noqa: B023
                rows.append(row)
                print(json.dumps(row), flush=True)
                cache.delete()
        group.check()
    if arguments.json:
        record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
