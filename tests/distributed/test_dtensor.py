"""torch.distributed.tensor: the operators take a rank's own part through local_map, and refuse DTensors by name."""

from __future__ import annotations

import textwrap

import pytest

from tests.distributed import processes

pytest.importorskip("torch")

PROGRAM = textwrap.dedent("""
    import sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map
    import xla_gpu.torch as xg
    from tests.common import cases

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    case = cases.AttentionCase("dtensor", ((1, 20), (4, 9)), num_heads=8, num_kv_heads=4, page_size=8)
    a = {name: torch.from_numpy(x) for name, x in cases.build(case, poison=False).arrays().items()}
    metadata = [a[name] for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")]
    want = xg.paged_attention(a["query"], a["kv_cache"], *metadata, scale=0.1)

    heads = Shard(1), Shard(2)  # of the query, and of the cache
    query, cache = (distribute_tensor(a[name], mesh, [at]) for name, at in zip(("query", "kv_cache"), heads))
    attention = local_map(
        lambda query, cache: xg.paged_attention(query, cache, *metadata, scale=0.1),
        out_placements=[heads[0]],
        in_placements=([heads[0]], [heads[1]]),
        device_mesh=mesh,
    )
    assert torch.equal(attention(query, cache).full_tensor(), want)

    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in metadata]
    try:
        xg.paged_attention(query, cache, *whole, scale=0.1)
    except NotImplementedError as error:
        assert "xla_gpu.paged_attention" in str(error), error
    else:
        raise AssertionError("a DTensor was taken for a tensor")
    dist.destroy_process_group()
    print("OK", flush=True)
""")


def test_heads_over_two_ranks():
    for out in processes.run(PROGRAM, 2):
        assert "OK" in out
