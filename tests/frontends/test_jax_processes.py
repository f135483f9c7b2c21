"""JAX programs beyond one process and one transformation: jax.export into a process that calls no operator itself,
jax.checkpoint, jax.make_jaxpr, jax.eval_shape. The compilation cache on disk is in tests/robustness/test_caches.py."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.common import cases, compare
from tests.frontends import rpa_v3

pytestmark = pytest.mark.frontends("jax", "jax-cuda")
CASE = cases.AttentionCase("processes", ((1, 20), (4, 9)), num_heads=4, num_kv_heads=2, page_size=8)
OPTIONS = {"scale": 0.2, "soft_cap": 5.0}


def attention(arrays):
    import xla_gpu.jax

    return xla_gpu.jax.paged_attention(**arrays, **OPTIONS)


LATER = """
import pathlib, sys
import jax, jax.export, numpy as np
{imports}
folder = pathlib.Path(sys.argv[1])
program = jax.export.deserialize((folder / "program").read_bytes())
arrays = dict(np.load(folder / "arrays.npz"))
np.save(folder / "out.npy", np.asarray(program.call(arrays)))
"""


def run_later(folder, imports: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LATER.format(imports=imports), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def exported(frontend, tmp_path_factory):
    """The folder of an exported program, and the result that it must have."""
    pytest.importorskip("flatbuffers", reason="jax needs it to serialise")
    import jax
    import jax.export

    folder = tmp_path_factory.mktemp("exported")
    arrays = cases.build(CASE, poison=False).arrays()
    placed = jax.device_put(arrays, frontend.device())
    checks = [jax.export.DisabledSafetyCheck.custom_call("xla_gpu_paged_attention")]
    platform = "cpu" if frontend.platform == "host" else "cuda"
    program = jax.export.export(jax.jit(attention), platforms=[platform], disabled_checks=checks)(placed)
    (folder / "program").write_bytes(program.serialize())
    np.savez(folder / "arrays.npz", **arrays)
    return folder, np.asarray(jax.jit(attention)(placed))


def test_an_exported_program_runs_where_the_front_end_is_imported(exported, monkeypatch, frontend):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu" if frontend.platform == "host" else "cuda")
    folder, want = exported
    result = run_later(folder, "import xla_gpu.jax")
    assert result.returncode == 0, result.stderr[-2000:]
    compare.assert_bitwise_equal(np.load(folder / "out.npy"), want, "in another process")


def test_without_the_import_the_target_is_named(exported, monkeypatch, frontend):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu" if frontend.platform == "host" else "cuda")
    result = run_later(exported[0], "")
    assert result.returncode != 0 and "xla_gpu_paged_attention" in result.stderr


def test_importing_the_front_end_is_no_error_where_the_library_is_missing(tmp_path):
    code = "import xla_gpu.jax, jax.numpy as jnp\na = jnp.ones(3)\nprint('imported')\nxla_gpu.jax.simple_add(a, a)"
    environment = os.environ | {"XLA_GPU_LIBRARY": str(tmp_path / "nowhere.so"), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == "imported\n" and "LibraryError" in result.stderr and "nowhere.so" in result.stderr


# ---- Transformations -------------------------------------------------------------------------------------------------


def test_checkpoint_changes_nothing_without_a_gradient(frontend):
    import jax

    arrays = jax.device_put(cases.build(CASE).arrays(), frontend.device())
    want = np.asarray(jax.jit(attention)(arrays))
    compare.assert_bitwise_equal(np.asarray(jax.jit(jax.checkpoint(attention))(arrays)), want, "checkpoint")


def test_checkpoint_under_a_gradient_is_refused_by_name(frontend):
    import jax

    arrays = jax.device_put(cases.build(CASE, poison=False).arrays(), frontend.device())
    query = arrays.pop("query")
    with pytest.raises(ValueError, match="paged_attention has no gradient"):
        jax.grad(lambda query: jax.checkpoint(attention)({"query": query, **arrays}).sum())(query)


def test_make_jaxpr_shows_target_and_attributes(frontend):
    import jax

    text = str(jax.make_jaxpr(attention)(cases.build(CASE).arrays()))
    assert "xla_gpu_paged_attention" in text and "soft_cap" in text


def test_shapes_of_the_call_that_updates_the_cache(frontend):
    import jax

    import xla_gpu.jax

    arrays = rpa_v3.build(CASE)
    out, cache = jax.eval_shape(lambda a: xla_gpu.jax.ragged_paged_attention_v3(**a), arrays)
    assert (out.shape, out.dtype) == (arrays["queries"].shape, arrays["queries"].dtype)
    assert (cache.shape, cache.dtype) == (arrays["kv_cache"].shape, arrays["kv_cache"].dtype)


def test_vmap_of_the_call_that_updates_the_cache(frontend):
    import jax

    import xla_gpu.jax

    batches = [rpa_v3.build(CASE.but(scale=0.1 * i), poison=False) for i in range(2)]
    stack = jax.device_put({k: np.stack([b[k] for b in batches]) for k in batches[0]}, frontend.device())
    call = jax.vmap(lambda a: xla_gpu.jax.ragged_paged_attention_v3(**a))
    try:
        out, caches = jax.jit(call)(stack)
    except NotImplementedError:
        assert tuple(map(int, jax.__version__.split(".")[:2])) < (0, 10), "since 0.10 JAX can batch a layout constraint"
        return
    for i, batch in enumerate(batches):
        want, cache = xla_gpu.jax.ragged_paged_attention_v3(**jax.device_put(batch, frontend.device()))
        compare.assert_bitwise_equal(np.asarray(out[i]), np.asarray(want), f"batch {i}")
        compare.assert_bitwise_equal(np.asarray(caches[i]), np.asarray(cache), f"batch {i}")
