"""ejkernel's registry runs ragged_paged_attention_v3, with ejkernel's own reference as the judge. On the CPU, where the
same handler name has its host kernel; `make test-adapters` installs ejkernel."""

from __future__ import annotations

import importlib
import re
import warnings

import numpy as np
import pytest

from tests.common import cases, compare
from tests.frontends import rpa_v3

pytest.importorskip("ejkernel", reason="ejkernel is not installed; make test-adapters installs it")
pytestmark = pytest.mark.frontends("jax", "jax-cuda")
CASE = cases.AttentionCase("ejkernel", ((1, 20), (4, 9)), num_heads=4, num_kv_heads=2, page_size=8, padding_tokens=0)
NAMES = {"page_indices": "block_tables", "cu_q_lens": "query_start_loc", "attention_sink": "softmax_aux"}


@pytest.fixture(scope="module")
def registry():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing ejkernel says is not about this test
        from ejkernel.kernels import kernel_registry

        import xla_gpu.adapters.ejkernel as adapter

    adapter.register()
    adapter.register()  # a second time changes nothing
    assert adapter.is_registered()
    return kernel_registry


def arguments(frontend, case):
    import jax

    arrays = {NAMES.get(name, name): x for name, x in rpa_v3.build(case, poison=False).items()}
    options = {"softmax_scale": case.softmax_scale, "logits_soft_cap": case.soft_cap}
    return jax.device_put(arrays, frontend.device()), options | {"sliding_window": case.sliding_window}


def test_is_the_first_choice_on_gpus(registry):
    implementations = registry.list_implementations("ragged_page_attention_v3")
    assert implementations[0].implementation.__wrapped__.__module__ == "xla_gpu.adapters.ejkernel"
    assert registry.get("ragged_page_attention_v3", "cuda", "gpu") is implementations[0].implementation
    assert sum("xla_gpu" in each.implementation.__wrapped__.__module__ for each in implementations) == 1
    assert registry.get("ragged_page_attention_v3", "xla", "any") is not implementations[0].implementation


def test_has_the_signature_of_the_others(registry):
    import inspect

    names = [
        list(inspect.signature(each.implementation).parameters)
        for each in registry.list_implementations("ragged_page_attention_v3")
        if each.platform.value == "cuda"
    ]
    assert len(names) >= 1 and all(each == names[0] for each in names)


@pytest.mark.parametrize(
    "case", [CASE, CASE.but(dtype="bfloat16", head_dim=128, soft_cap=5.0), CASE.but(sinks=True)], ids=lambda c: c.name
)
def test_values(frontend, registry, case):
    import jax

    arrays, options = arguments(frontend, case)
    module = importlib.import_module("ejkernel.kernels._pallas.tpu.ragged_page_attention_v3._pallas_impl_fwd")
    out, cache = registry.get("ragged_page_attention_v3", "cuda", "gpu")(**arrays, **options)
    with jax.default_matmul_precision("highest"):
        theirs, their_cache = module.ref_ragged_paged_attention(**arrays, **options)
    want, _, _ = rpa_v3.expected(case)
    compare.assert_close(np.asarray(out, np.float32), want, np.asarray(theirs, np.float32), case.name)
    np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(their_cache, np.float32))


def test_the_callers_cache_stays(frontend, registry):
    arrays, options = arguments(frontend, CASE)
    registry.get("ragged_page_attention_v3", "cuda", "gpu")(**arrays, **options)
    assert not arrays["kv_cache"].is_deleted()


def test_in_a_step_that_donates_nothing_is_copied(frontend, registry):
    import jax

    arrays, options = arguments(frontend, CASE)
    cache = arrays.pop("kv_cache")

    def step(cache, arrays):
        return registry.get("ragged_page_attention_v3", "cuda", "gpu")(kv_cache=cache, **arrays, **options)

    text = jax.jit(step, donate_argnums=0).lower(cache, arrays).compile().as_text()
    assert 'custom_call_target="xla_gpu_reshape_and_cache"' in text
    shapes = "|".join(",".join(map(str, s)) for s in (cache.shape, (*cache.shape[:2], -1, cache.shape[-1])))
    assert not re.findall(rf"\[(?:{shapes})\]\S* (?:copy|fusion)\(", text)


def test_tuning_arguments_are_taken(frontend, registry):
    arrays, options = arguments(frontend, CASE)
    tuning = {"num_kv_pages_per_block": 4, "num_queries_per_block": 8, "vmem_limit_bytes": 1, "chunk_prefill_size": 8}
    call = registry.get("ragged_page_attention_v3", "cuda", "gpu")
    for a, b in zip(call(**arrays, **options), call(**arrays, **options, **tuning), strict=True):
        compare.assert_bitwise_equal(np.asarray(a), np.asarray(b), "tuned")
