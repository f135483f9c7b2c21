"""ragged_paged_attention: torch_xla's operator of that name, against third-party implementations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import baseline, cases, compare, reference

pytestmark = pytest.mark.frontends(framework="torch")

# torch_xla's references gather whole pages and cannot stand poison, empty sequences, or lengths of dead entries.
CLEAN = tuple(
    c.but(spare_seqs=0, padding_tokens=0, layout="combined")
    for c in cases.COMMON
    if c.cache_dtype is None and not c.sinks and all(0 < q <= n for q, n in c.sequences)
)


def renamed(inputs: cases.AttentionInputs) -> dict[str, np.ndarray]:
    a = inputs.arrays()
    return {
        "q": a["query"],
        "kv_pages": a["kv_cache"],
        "kv_lens": a["context_lens"],
        "page_indices": a["block_tables"],
        "cu_q_lens": a["query_start_loc"],
        "num_seqs": a["num_seqs"],
    }


def options(case: cases.AttentionCase) -> dict:
    return {"sm_scale": case.softmax_scale, "sliding_window": case.sliding_window, "soft_cap": case.soft_cap}


def torch_xla_reference(inputs, case):
    custom_kernel = pytest.importorskip("torch_xla.experimental.custom_kernel")
    from tests.common.arrays import to_numpy, to_torch

    if case.dtype == "float16":
        pytest.skip("its mask value does not fit float16")
    arguments = [to_torch(x) for x in renamed(inputs).values()]
    return to_numpy(custom_kernel.ragged_paged_attention(*arguments, **options(case), use_kernel=False))


def jax_reference(module):
    def call(inputs, case):
        try:
            reference_module = pytest.importorskip(module, exc_type=ImportError)
        except AttributeError as e:  # torch_xla's copy reaches into jax's insides
            pytest.skip(f"{module} does not fit the installed jax: {e}")
        import jax

        with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
            return np.asarray(reference_module.ref_ragged_paged_attention(
                *(jax.numpy.asarray(x) for x in renamed(inputs).values()), **options(case)))  # fmt: skip

    return call


OTHERS = {
    "torch_xla nonkernel": torch_xla_reference,
    "torch_xla ref_ragged_paged_attention": jax_reference(
        "torch_xla.experimental.pallas_kernels.ragged_paged_attention_v2"
    ),
    "jax ref_ragged_paged_attention": jax_reference("jax.experimental.pallas.ops.tpu.ragged_paged_attention"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("case", CLEAN, ids=lambda c: c.name)
# torch_xla-cuda is here too: beside it PyTorch may have no CUDA, and two of these implementations would not be reached.
@pytest.mark.frontends("eager", "eager-cuda", "torch_xla-cuda")
def test_agrees_with(frontend, case, other):
    inputs = cases.build(case, poison=False)
    theirs = OTHERS[other](inputs, case)
    want, _ = reference.paged_attention(**inputs.arrays(), **case.options())
    (out,) = frontend.call("ragged_paged_attention", renamed(inputs), **options(case))
    # Both are near the truth; so are they to each other, within the sum of what the rule allows each.
    base, _ = baseline.paged_attention(inputs, **case.options())
    compare.assert_close(out, want, base, f"{frontend.name} {case.name}")
    near = 4 * compare.error(base, want).max() + 2e-5
    assert compare.error(out, theirs.astype(np.float64)).max() <= near, f"{frontend.name} against {other}"


@pytest.mark.parametrize("case", CLEAN[:3], ids=lambda c: c.name)
def test_is_paged_attention_by_other_names(frontend, case):
    inputs = cases.build(case)
    (out,) = frontend.call("ragged_paged_attention", renamed(inputs), **options(case))
    (same,) = frontend.call("paged_attention", inputs.arrays(), **case.options())
    compare.assert_bitwise_equal(out, same, frontend.name)


@pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
def test_tuning_knobs_are_accepted_and_change_nothing(frontend):
    case = CLEAN[0]
    arrays = renamed(cases.build(case))
    (plain_call,) = frontend.call("ragged_paged_attention", arrays, **options(case))
    (tuned,) = frontend.call(
        "ragged_paged_attention",
        arrays,
        **options(case),
        mask_value=-1e9,
        num_kv_pages_per_block=4,
        num_queries_per_block=8,
        vmem_limit_bytes=1 << 20,
    )
    compare.assert_bitwise_equal(tuned, plain_call, frontend.name)


@pytest.mark.frontends("eager", "torch_xla")
def test_without_the_kernel(frontend):
    """use_kernel=False is plain PyTorch, with the same result up to rounding."""
    case = CLEAN[0]
    inputs = cases.build(case, poison=False)
    (slow,) = frontend.call("ragged_paged_attention", renamed(inputs), **options(case), use_kernel=False)
    want, _ = reference.paged_attention(**inputs.arrays(), **case.options())
    np.testing.assert_allclose(slow, want, atol=1e-4)


@pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
def test_float8_scales_are_floats(frontend):
    case = cases.AttentionCase(
        "rpa-fp8", ((1, 40), (3, 20)), cache_dtype="float8_e4m3fn", scales="one", dtype="bfloat16"
    )
    inputs = cases.build(case)
    want, _ = reference.paged_attention(**inputs.arrays(), **case.options())
    (out,) = frontend.call(
        "ragged_paged_attention",
        renamed(inputs),
        **options(case),
        k_scale=float(inputs.k_scale[0]),
        v_scale=float(inputs.v_scale[0]),
    )
    base, _ = baseline.paged_attention(inputs, **case.options())
    compare.assert_close(out, want, base, frontend.name)
