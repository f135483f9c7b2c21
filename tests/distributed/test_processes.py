"""Two processes with two CPU devices each, a stand-in for two hosts: a mesh over both, by jax.distributed."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

import pytest

from tests.common.machine import ROOT

pytest.importorskip("jax")

PROGRAM = textwrap.dedent("""
    import os, sys
    os.environ |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    import numpy as np, jax
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    import xla_gpu.jax as xg
    from tests.common import cases
    P, NamedSharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2

    def spread(mesh, array, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    # The axis of the sum inside a host, and over hosts.
    x = cases.rng_for("processes").standard_normal((2, 2, 3, 64)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))
    for axis, want in (("tp", x[:, 0] + x[:, 1]), ("dp", x[0] + x[1])):
        group = xg.DeviceGroup(mesh, axis)
        other = "dp" if axis == "tp" else "tp"
        step = jax.shard_map(
            lambda x: xg.all_reduce(x[0, 0], group=group)[None], mesh=mesh, in_specs=P("dp", "tp"), out_specs=P(other)
        )
        out = jax.jit(step)(spread(mesh, x, "dp", "tp"))
        for shard in out.addressable_shards:
            assert (np.asarray(shard.data) == want[shard.index]).all()

    # Heads over all four devices under plain jit.
    case = cases.AttentionCase("processes", ((1, 20), (4, 9)), num_heads=8, num_kv_heads=4, page_size=8)
    a = cases.build(case, poison=False).arrays()
    names = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
    want = np.asarray(xg.paged_attention(a["query"], a["kv_cache"], *(a[n] for n in names), scale=0.1))
    flat = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
    query, cache = spread(flat, a["query"], None, "tp"), spread(flat, a["kv_cache"], None, None, "tp")
    metadata = [spread(flat, a[n]) for n in names]
    out = jax.jit(lambda q, c, *m: xg.paged_attention(q, c, *m, scale=0.1))(query, cache, *metadata)
    for shard in out.addressable_shards:
        assert (np.asarray(shard.data) == want[shard.index]).all()
    print("OK", flush=True)
""")


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(rank)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0 and "OK" in out, error[-3000:]
    finally:
        for process in processes:
            process.kill()
