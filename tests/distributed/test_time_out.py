"""A peer that never comes ends the call: NaN, then an error. In a process of its own, since a broken group stays so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.common.machine import ROOT

# Rank 1 leaves the second call out: the program sends it another way round.
PROGRAM = textwrap.dedent("""
    import os, sys, time
    import numpy as np, jax, xla_gpu.jax as xg
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices("cuda")[:2]), ("tp",))
    group = xg.DeviceGroup(mesh, "tp", timeout_s=0.5)
    assert group.uses_peer_memory
    shape = SHAPE

    def whole(x):
        return xg.all_reduce(x[0], group=group)[None]

    def without_rank_1(x):
        y = jax.lax.cond(jax.lax.axis_index("tp") == 0, lambda x: xg.all_reduce(x, group=group), lambda x: x, x[0])
        return y[None]

    def compiled(body):
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False))

    x = jax.device_put(np.ones((2, *shape), np.float32), jax.sharding.NamedSharding(mesh, P("tp")))
    assert (np.asarray(compiled(whole)(x)) == 2).all()
    group.check()
    began = time.perf_counter()
    try:
        out = np.asarray(compiled(without_rank_1)(x))
        print("nan on rank 0:", np.isnan(out[0]).all(), "rank 1 as it was:", (out[1] == 1).all())
    except Exception as error:
        print("raised:", error)
    print("seconds:", time.perf_counter() - began)
    try:
        group.check()
        print("check: nothing")
    except xg_errors.HandlerError as error:
        print("check:", error)
    try:
        out = np.asarray(compiled(whole)(x))
        print("later: nan", np.isnan(out).all())
    except Exception as error:
        print("later:", error)
    # JAX's threads of a failed program may end the process by a signal when it leaves the usual way.
    sys.stdout.flush()
    os._exit(0)
""")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024,), (1 << 20,)], ids=["small", "large"])
def test_a_missing_peer_ends_the_call(shape):
    jax = pytest.importorskip("jax")
    try:
        if len(jax.devices("cuda")) < 2:
            pytest.skip("needs two GPUs")
    except RuntimeError as error:
        pytest.skip(f"jax has no CUDA platform: {error}")
    program = "import xla_gpu.errors as xg_errors\n" + PROGRAM.replace("SHAPE", repr(shape))
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert "nan on rank 0" in result.stdout and "True rank 1 as it was: True" in result.stdout, result.stdout
    assert float(lines["seconds"]) < 60
    assert "rank 0 waited for rank 1 in call 2" in lines["check"] and "500 ms" in lines["check"]
    assert "waited" in lines["later"] or lines["later"] == "nan True"
