"""Programs over sharded arrays beyond their process: JAX's compilation cache on disk."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.common.machine import ROOT

pytest.importorskip("jax")
pytest.importorskip("xla_gpu.jax", exc_type=ImportError)

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import xla_gpu.jax as xg
folder, mesh_of, eps, name = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
hits = []
kind = jax.sharding.AxisType.Explicit if mesh_of == "explicit" else jax.sharding.AxisType.Auto
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",), axis_types=(kind,))
x = np.linspace(-0.1, 0.1, 4 * 128, dtype=np.float32).reshape(4, 128)
want = np.asarray(xg.rms_norm(xg.simple_add(getattr(xg, name)(x), x[:, :64]), np.ones(64, np.float32), eps=float(eps)))
sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")))
with (getattr(jax, "set_mesh", None) or jax.sharding.use_mesh)(mesh):
    jax.monitoring.register_event_listener(lambda event, **_: hits.extend([event] if "/cache_hits" in event else []))
    def program(x):
        half = xg.simple_add(getattr(xg, name)(x), x[:, :64])
        return xg.rms_norm(half, np.ones(64, np.float32), eps=float(eps))
    got = np.asarray(jax.jit(program)(sharded))
print(json.dumps([len(hits), float(np.abs(got - want).max())]))
"""


@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_the_compilation_cache_tells_attributes_and_operators_apart(mesh, tmp_path):
    """Where JAX is told to leave the addresses of its partitioning out of the key, which no process has twice."""

    def run(eps: str, name: str) -> int:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), mesh, eps, name]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        hits, difference = json.loads(result.stdout.splitlines()[-1])
        assert difference == 0, (eps, name)
        return hits

    run("1e-5", "silu_and_mul")
    assert run("1e-5", "silu_and_mul") == 1, "a second process finds the program"
    assert run("0.5", "silu_and_mul") == 0, "another attribute"
    assert run("1e-5", "gelu_and_mul") == 0, "another operator of the same shapes"
