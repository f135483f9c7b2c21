"""all_reduce over the GPUs of this machine beside XLA's own (NCCL): microseconds of one in a program of 256 of them.

python -m benchmarks.all_reduce --devices 2 --json all_reduce.json

Each all-reduce has a multiplication behind it, as a model's has something behind it; the time of the multiplications
alone is the row "nothing". The norm's rows: all_reduce_add_rms_norm, and the same written in jax.numpy after psum.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.argument_types import add_devices, positive

import xla_gpu.jax as xg
from xla_gpu._jax import device_group
from xla_gpu._runtime.device_groups import Settings

P = jax.sharding.PartitionSpec
CALLS = 256  # in a program: enough to hide the host's share
HIDDEN = 4096


class _Group(xg.DeviceGroup):
    """With a threshold of its own between packets and what larger messages take."""

    def __init__(self, mesh: jax.sharding.Mesh, axis: str, low_latency_bytes: int) -> None:
        self._mesh, self._axis = mesh, axis
        self._number = device_group.connected(mesh, axis, Settings(20_000, 16 << 20, low_latency_bytes))


def norm_after_psum(x: jax.Array, residual: jax.Array, weight: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    total = jax.lax.psum(x, axis) + residual
    wide = total.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight, total


def chains(group: xg.DeviceGroup) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Programs of CALLS all-reduces of x [rows, HIDDEN], by name."""
    half = jnp.bfloat16(0.5)

    def plain(reduce: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def body(x: jax.Array, weight: jax.Array) -> jax.Array:
            y = x[0]
            for _ in range(CALLS):
                y = reduce(y) * half
            return y[None]

        return body

    def normed(step: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def body(x: jax.Array, weight: jax.Array) -> jax.Array:
            y, total = x[0], x[0]
            for _ in range(CALLS):
                y, total = step(y * half, total, weight)
            return y[None]

        return body

    return {
        "nothing": plain(lambda y: jax.lax.optimization_barrier(y)),
        "psum": plain(lambda y: jax.lax.psum(y, group.axis)),
        "all_reduce": plain(lambda y: xg.all_reduce(y, group=group)),
        "psum, add, norm": normed(lambda y, r, w: norm_after_psum(y, r, w, group.axis)),
        "all_reduce_add_rms_norm": normed(lambda y, r, w: xg.all_reduce_add_rms_norm(y, r, w, eps=1e-5, group=group)),
    }


def with_weight(step: Callable[..., jax.Array], weight: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda x: step(x, weight)


def microseconds(step: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int) -> float:
    """Of one call. ``step`` donates what it takes: else its result has a new address each time, and XLA updates every
    kernel of its captured graph, which takes longer than the small ones run."""
    for _ in range(2):
        x = step(x).block_until_ready()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(4):
            x = step(x)
        x.block_until_ready()
        times.append((time.perf_counter() - begin) / 4 / CALLS * 1e6)
    return min(times)  # the host's noise is added to all others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_devices(parser, len(jax.devices()))
    parser.add_argument(
        "--kilobytes",
        type=positive,
        nargs="+",
        default=[8, 64, 256, 512, 1024, 2048, 8192],
        help="sizes of a message (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=15,
        help="times 4 calls of the program, of which the fastest count (default %(default)s)",
    )
    parser.add_argument("--thresholds", action="store_true", help="each kernel at all sizes, to find where they cross")
    parser.add_argument("--json", type=Path, help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    if arguments.devices > (there := len(jax.devices())):
        parser.error(f"--devices: expected at most {there}, the number of JAX's devices, got {arguments.devices}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: arguments.devices]), ("tp",))
    groups = {"": xg.DeviceGroup(mesh, "tp", timeout_s=20)}
    if arguments.thresholds:
        groups = {"packets": _Group(mesh, "tp", 16 << 20), "without": _Group(mesh, "tp", 0)}
    rows = []
    sharding = jax.sharding.NamedSharding(mesh, P("tp"))
    for kilobytes in arguments.kilobytes:
        tokens = max(1, kilobytes * 1024 // (2 * HIDDEN))
        values = np.random.default_rng(0).standard_normal((arguments.devices, tokens, HIDDEN)).astype(np.float32)
        values = values.astype(jnp.bfloat16)
        weight = jnp.ones(HIDDEN, jnp.bfloat16)
        for kernel, group in groups.items():
            for name, body in chains(group).items():
                if kernel and name not in ("all_reduce", "all_reduce_add_rms_norm"):
                    continue
                specs = (P("tp"), P())
                mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)
                step = with_weight(jax.jit(mapped, donate_argnums=0), weight)
                row = {"kilobytes": kilobytes, "what": f"{name} {kernel}".strip()}
                x = jax.device_put(values, sharding)
                row["microseconds"] = round(microseconds(step, x, arguments.repeats), 2)
                rows.append(row)
                print(json.dumps(row), flush=True)
            group.check()
    if arguments.json:
        device = jax.devices()[0].device_kind
        record = {"device": device, "devices": arguments.devices, "jax": jax.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
