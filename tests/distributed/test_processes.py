"""Several processes by jax.distributed: two with two CPU devices each, as two hosts, and one for each GPU of a host."""

from __future__ import annotations

import textwrap

import pytest

from tests.distributed import processes

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


def test_two_processes():
    for out in processes.run(PROGRAM, 2):
        assert "OK" in out


ONE_GPU_EACH = textwrap.dedent("""
    import sys
    import numpy as np, jax
    count, rank = int(sys.argv[3]), int(sys.argv[2])
    jax.distributed.initialize(
        f"127.0.0.1:{sys.argv[1]}", num_processes=count, process_id=rank, local_device_ids=[rank]
    )
    import xla_gpu.jax as xg
    from tests.common import cases, compare, reference
    P, NamedSharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    assert len(jax.devices()) == count and len(jax.local_devices()) == 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
    group = xg.DeviceGroup(mesh, "tp", timeout_s=30, max_bytes=4 << 20)
    assert group.uses_peer_memory, group
    sharding = NamedSharding(mesh, P("tp"))
    step = jax.jit(
        jax.shard_map(
            lambda x: xg.all_reduce(x[0], group=group)[None],
            mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False,
        )
    )
    rng = np.random.default_rng(0)  # the same numbers in every process
    inputs, wants = [], []
    for i in range(30):
        size = int(2 ** rng.uniform(0, 22))
        parts = rng.standard_normal((count, size)).astype(cases.DTYPES[cases.FLOATS[i % 3]])
        wants.append(reference.all_reduce(parts))
        inputs.append(jax.make_array_from_callback(parts.shape, sharding, lambda index, x=parts: x[index]))
    for call in range(1000):
        i = int(rng.integers(len(inputs)))
        out = np.asarray(step(inputs[i]).addressable_shards[0].data)[0]
        compare.assert_bitwise_equal(out, wants[i], f"call {call}, rank {rank}")
    group.check()
    print("OK", flush=True)
""")


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
def test_a_process_for_each_gpu(count):
    """The peers' memory is opened through CUDA IPC: 1000 messages of random sizes, with the same bits on every rank."""
    jax = pytest.importorskip("jax")
    try:
        gpus = len(jax.devices("cuda"))
    except RuntimeError as error:
        pytest.skip(f"jax has no CUDA platform: {error}")
    if gpus < count:
        pytest.skip(f"needs {count} GPUs, and there are {gpus}")
    options = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}
    for out in processes.run(ONE_GPU_EACH, count, str(count), timeout=120, **options):
        assert "OK" in out
