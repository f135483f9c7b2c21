"""mla_attention: values, rows that do not depend on the rest of the batch, wrong metadata, its target, and programs.
test_mla_attention_of_heads.py compares it with attention over the keys and values that the latents stand for."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.common import cases, compare, frontends, mla_cases
from tests.common.mla_cases import Case
from tests.fuzz import hostile

ERRORS = (ValueError, RuntimeError)
NAMES = {case.name: case for case in (*mla_cases.CASES, *mla_cases.MORE)}
SMALL = Case("small", ((1, 20), (3, 9), (5, 5)))


@functools.cache
def sound(case: Case):
    """(arrays, (out, lse) in float64, (out, lse) by plain PyTorch)."""
    arrays, options = mla_cases.build(case), case.options()
    return arrays, mla_cases.expected(arrays, **options), mla_cases.rounded(arrays, **options)


def check(frontend, case: Case) -> None:
    arrays, want, base = sound(case)
    out, lse = frontend.call("mla_attention_with_lse", arrays, **case.options())
    assert out.dtype == arrays["query"].dtype and lse.dtype == np.float32
    compare.assert_close(out, want[0], base[0], f"{frontend.name} {case.name}: out")
    compare.assert_close(lse, want[1], base[1], f"{frontend.name} {case.name}: lse")
    padding = out[sum(q for q, _ in case.sequences) :]
    compare.assert_bitwise_equal(padding, np.zeros_like(padding), f"{frontend.name} {case.name}: padding rows")


@pytest.mark.parametrize("case", mla_cases.CASES, ids=lambda case: case.name)
def test_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("case", mla_cases.MORE, ids=lambda case: case.name)
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_more_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.frontends("eager", "eager-cuda")
def test_random_batches(frontend, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 128, 300], rng.integers(1, 9)).tolist()
    sequences = tuple((int(min(length, rng.choice([0, 1, 1, 2, 4, 30]))), length) for length in lengths)
    head_dim = int(rng.choice([8, 64, 72, 192, 320, 576]))
    widths = [width for width in (8, 24, 64, 128, 256, 512) if width <= head_dim]
    case = Case(
        f"random-{seed}",
        sequences,
        num_heads=int(rng.choice([1, 2, 3, 8, 16, 20, 64, 128])),
        head_dim=head_dim,
        value_dim=int(rng.choice(widths)),
        page_size=int(rng.choice([1, 3, 16, 64, 128])),
        dtype=str(rng.choice(cases.FLOATS)),
        spare_seqs=int(rng.integers(0, 4)),
        padding_tokens=int(rng.integers(0, 20)),
    )
    check(frontend, case)


@pytest.mark.parametrize("name", ["deepseek-v2-lite-decode", "kimi-k2-mixed-f16"])
def test_without_lse_the_same_bits(frontend, name):
    case = NAMES[name]
    arrays, *_ = sound(case)
    (out,) = frontend.call("mla_attention", arrays, **case.options())
    with_lse, _ = frontend.call("mla_attention_with_lse", arrays, **case.options())
    compare.assert_bitwise_equal(out, with_lse, frontend.name)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends(*(name for name in frontends.ALL if not name.startswith("eager")))
def test_bit_for_bit(frontend, dtype):
    other = frontends.beside(frontend)
    if other is None:
        pytest.skip("the only front end of its platform in this process")
    case = SMALL.but(dtype=dtype, num_heads=16, head_dim=192, value_dim=128)
    arrays = mla_cases.build(case)
    for operator in ("mla_attention", "mla_attention_with_lse"):
        got, want = (x.call(operator, arrays, **case.options()) for x in (frontend, other))
        for mine, theirs in zip(got, want, strict=True):
            compare.assert_bitwise_equal(mine, theirs, f"{operator}: {frontend.name} and {other.name}")


def test_num_seqs_may_be_an_int(frontend):
    arrays = mla_cases.build(SMALL)
    (want,) = frontend.call("mla_attention", arrays, **SMALL.options())
    (out,) = frontend.call("mla_attention", arrays | {"num_seqs": arrays["num_seqs"].reshape(())}, **SMALL.options())
    compare.assert_bitwise_equal(out, want, frontend.name)
    del arrays["num_seqs"]
    (out,) = frontend.call("mla_attention", arrays, num_seqs=len(SMALL.sequences), **SMALL.options())
    compare.assert_bitwise_equal(out, want, frontend.name)


@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_states_of_parts_are_merged(frontend):
    """A context in two halves: merge_attention_states makes of their states what both together are."""
    case = Case("halves", ((1, 96), (1, 64)), num_heads=8, head_dim=96, value_dim=64, padding_tokens=0)
    arrays, want, _ = sound(case)
    first, second = dict(arrays), dict(arrays)
    first["context_lens"] = np.where(np.arange(4) < 2, [40, 32, 0, 0], 0).astype(np.int32)
    second["context_lens"] = np.where(np.arange(4) < 2, [56, 32, 0, 0], 0).astype(np.int32)
    second["block_tables"] = arrays["block_tables"].copy()
    for s, pages in enumerate((5, 4)):
        second["block_tables"][s] = np.roll(arrays["block_tables"][s], -pages)
    states = [frontend.call("mla_attention_with_lse", part, **case.options()) for part in (first, second)]
    merged = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), (*states[0], *states[1]), strict=True))
    out, lse = frontend.call("merge_attention_states", {name: np.array(x) for name, x in merged.items()})
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)


# ---- Rows of a sequence alone ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_bits_do_not_depend_on_the_batch(frontend, dtype, rows):
    """A sequence alone, among others, on other pages, and where there is room for more sequences. Not of the one shape
    whose keys CTAs of sm_90a share by the whole batch."""
    shape = dict(num_heads=16, head_dim=96, value_dim=64, dtype=dtype)
    alone = Case("subject", ((rows, 130),), spare_seqs=0, padding_tokens=0, **shape)
    arrays = mla_cases.build(alone)
    latents = arrays["kv_cache"][arrays["block_tables"][0, :17]]
    (want,) = frontend.call("mla_attention", arrays, **alone.options())
    for before, behind in ((((1, 90),), ((3, 7),)), ((), ((1, 300), (0, 9))), (((1, 5),) * 40, ())):
        case = Case("neighbours", (*before, (rows, 130), *behind), spare_seqs=9, padding_tokens=5, **shape)
        batch = mla_cases.build(case)
        first = sum(q for q, _ in before)
        batch["query"][first : first + rows] = arrays["query"]
        batch["kv_cache"][batch["block_tables"][len(before), :17]] = latents
        (got,) = frontend.call("mla_attention", batch, **case.options())
        compare.assert_bitwise_equal(got[first : first + rows], want, f"{frontend.name}: {len(case.sequences)}")


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_nan_stays_in_its_sequence(frontend, dtype):
    case = SMALL.but(dtype=dtype)
    arrays = mla_cases.build(case)
    (want,) = frontend.call("mla_attention", arrays, **case.options())
    rows = slice(*arrays["query_start_loc"][1:3])
    arrays["kv_cache"][arrays["block_tables"][1, 0], 2] = np.nan  # every row of the sequence sees it
    (got,) = frontend.call("mla_attention", arrays, **case.options())
    assert np.isnan(got[rows].astype(np.float32)).all()
    others = np.ones(len(got), bool)
    others[rows] = False
    compare.assert_bitwise_equal(got[others], want[others], frontend.name)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda")
def test_large_logits_do_not_overflow(frontend, dtype):
    """Scores of about ±7e4: past float16's range, and past exp's in float32."""
    case = Case("large-logits", ((4, 40), (1, 33)), head_dim=80, value_dim=64, dtype=dtype, scale=1.0)
    arrays = mla_cases.build(case)
    signs = np.where(cases.rng_for("signs").random(arrays["query"].shape) < 0.5, -1, 1)
    arrays["query"] = (signs * 30).astype(arrays["query"].dtype)
    arrays["kv_cache"] = (np.sign(arrays["kv_cache"]) * 30).astype(arrays["query"].dtype)  # NaN stays NaN
    out, lse = frontend.call("mla_attention_with_lse", arrays, **case.options())
    want, want_lse = mla_cases.expected(arrays, **case.options())
    assert np.abs(want_lse[np.isfinite(want_lse)]).max() > 2e4
    compare.assert_same_special(out, want, frontend.name)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


# ---- Wrong metadata: as of paged_attention, whose tests of it know what each is to give ------------------------------
WRONG = {
    "page-is-num_pages": ("block_tables", (1, 1), "num_pages"),
    "page-minus-1": ("block_tables", (1, 1), -1),
    "page-2147483647": ("block_tables", (1, 1), 2**31 - 1),
    "context-negative": ("context_lens", 1, -1),
    "context-over-capacity": ("context_lens", 1, 10_000),
    "context-2147483647": ("context_lens", 1, 2**31 - 1),
    "starts-fall": ("query_start_loc", 2, 0),
    "starts-negative": ("query_start_loc", 0, -1),
    "starts-most-negative": ("query_start_loc", 1, -(2**31)),
    "starts-past-num_tokens": ("query_start_loc", 2, 100),
    "starts-2147483647": ("query_start_loc", 3, 2**31 - 1),
    "num_seqs-negative": ("num_seqs", 0, -1),
    "num_seqs-over-max_seqs": ("num_seqs", 0, 6),
    "num_seqs-2147483647": ("num_seqs", 0, 2**31 - 1),
}
HOSTILE = {
    "decode": Case("hostile", ((2, 40), (3, 33), (1, 17)), num_heads=8, head_dim=96, value_dim=64, dtype="bfloat16"),
    "prefill": Case("hostile", ((2, 40), (30, 33), (1, 17)), num_heads=8, head_dim=96, value_dim=64, dtype="float16"),
    "float32": Case("hostile", ((2, 40), (3, 33), (1, 17))),
    "latents": Case("hostile", ((2, 40), (3, 33), (1, 17)), num_heads=32, head_dim=576, value_dim=512, dtype="float16"),
    "few rows": Case("hostile", ((2, 40), (3, 33), (1, 17)), head_dim=576, value_dim=512, dtype="bfloat16"),
    "many": Case("hostile", ((2, 40), (3, 33), (1, 17), *((1, 9),) * 40), num_heads=16, dtype="bfloat16"),
}


def wrong(case: Case, name: str) -> dict[str, np.ndarray]:
    arrays = mla_cases.build(case)
    argument, place, value = WRONG[name]
    arrays[argument][place] = len(arrays["kv_cache"]) if value == "num_pages" else value
    if argument == "num_seqs" and value == 6:
        arrays[argument][0] = len(arrays["context_lens"]) + 1
    return arrays


def as_paged_attention(arrays: dict[str, np.ndarray]) -> cases.AttentionInputs:
    """The same metadata over a cache whose values are its keys."""
    cache = arrays["kv_cache"][:, :, None]
    both = np.stack([compare.bits(cache)] * 2).view(cache.dtype)
    return cases.AttentionInputs(**{**arrays, "kv_cache": both})


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.frontends(platform="host")
def test_host_names_what_is_wrong(frontend, name):
    case = HOSTILE["decode"]
    arrays = wrong(case, name)
    pattern = hostile.error_pattern(as_paged_attention(arrays))
    assert pattern is not None
    for operator in ("mla_attention", "mla_attention_with_lse"):
        with pytest.raises(ERRORS, match=f"{operator}: {pattern}"):
            frontend.call(operator, arrays, **case.options())
    check(frontend, case)  # the next call is as ever


@pytest.mark.frontends(platform="host")
def test_host_names_a_cache_without_pages(frontend):
    arrays = mla_cases.build(SMALL)
    arrays["kv_cache"] = arrays["kv_cache"][:0]
    text = r"mla_attention: context_lens\[0\] \(sequence 0\): expected 0, since kv_cache has no pages, got 20"
    with pytest.raises(ERRORS, match=text):
        frontend.call("mla_attention", arrays, **SMALL.options())


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.frontends(platform="cuda")
def test_cuda_rows_of_wrong_metadata_are_nan(frontend, name, path):
    """Those that paged_attention makes NaN, and no others."""
    case = HOSTILE[path]
    arrays = wrong(case, name)
    out, lse = frontend.call("mla_attention_with_lse", arrays, **case.options())
    paged = case.of_paged_attention()
    want = hostile.expected_rows(paged, as_paged_attention(arrays))
    tolerance = hostile.TOLERANCES[case.dtype]
    np.testing.assert_allclose(
        out.astype(np.float64), want.out[..., : case.value_dim], tolerance, 4 * tolerance, equal_nan=True
    )
    np.testing.assert_allclose(lse, want.lse, tolerance, 4 * tolerance, equal_nan=True)
    check(frontend, case)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.frontends("eager-cuda")
def test_cuda_error_where_asked_for(frontend, name, monkeypatch):
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    case = HOSTILE["decode"]
    arrays = wrong(case, name)
    with pytest.raises(ERRORS, match=f"mla_attention: {hostile.error_pattern(as_paged_attention(arrays))}"):
        frontend.call("mla_attention", arrays, **case.options())


# ---- The target itself -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.frontends("eager", "eager-cuda")
def test_handler_refuses_other_results(frontend, with_lse):
    """Another shape or dtype of the result or the log-sum-exps, and too little scratch memory, which DeepSeek's shape
    takes."""
    import torch

    import xla_gpu.torch as ops

    operator = "mla_attention_with_lse" if with_lse else "mla_attention"
    case = NAMES["deepseek-v3-decode-bf16"]
    arrays = mla_cases.build(case)
    rows, heads, _ = arrays["query"].shape

    def call(out=(rows, heads, 512), dtype=torch.bfloat16, lse=(rows, heads), scratch=1 << 26):
        results = [torch.empty(out, dtype=dtype, device="meta"), torch.empty(lse, device="meta")][: 1 + with_lse]
        results.append(torch.empty(scratch, dtype=torch.uint8, device="meta"))
        target = ops.ffi_call(f"xla_gpu_{operator}", tuple(results))
        attributes = {"scale": np.float32(1), "value_dim": np.int64(512), "check_inputs": False}
        return target(*frontend.tensors(arrays).values(), **attributes)

    call()
    wrong = {
        "out: expected shape": {"out": (rows, heads, 576)},
        "out: expected bfloat16": {"dtype": torch.float16},
        "scratch: expected": {"scratch": 0},
    }
    for text, changes in (wrong | ({"lse: expected shape": {"lse": (rows, 1)}} if with_lse else {})).items():
        with pytest.raises(ValueError, match=f"{operator}: {text}.*, got"):
            call(**changes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.frontends("eager")
def test_scratch_memory_is_bounded(frontend, dtype):
    """34 MiB, whatever the sequences do."""
    from xla_gpu._core.operator import ArraySpec
    from xla_gpu._runtime.scratch import scratch_bytes
    from xla_gpu.ops.mla_attention import OPERATOR

    sizes = []
    for heads in (1, 16, 64, 128):
        for tokens in (0, 1, 8, 64, 256, 4096, 16384):
            for max_seqs in (0, 1, 64, 256):
                arrays = {
                    "query": ArraySpec((tokens, heads, 576), dtype),
                    "kv_cache": ArraySpec((4096, 64, 576), dtype),
                    "context_lens": ArraySpec((max_seqs,), "int32"),
                    "block_tables": ArraySpec((max_seqs, 2048), "int32"),
                    "query_start_loc": ArraySpec((max_seqs + 1,), "int32"),
                    "num_seqs": ArraySpec((1,), "int32"),
                }
                sizes.append(scratch_bytes(OPERATOR.bind(**arrays, scale=1.0, value_dim=512)))
    assert 1 << 20 < max(sizes) <= 34 << 20


# ---- Programs --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argument", ["query", "kv_cache"])
@pytest.mark.frontends("eager", "eager-cuda", "torch_xla")
def test_torch_gradients_are_refused(frontend, argument):
    tensors = frontend.tensors(mla_cases.build(SMALL))
    tensors[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"mla_attention: {argument}: expected .* not require a gradient"):
        frontend.module().mla_attention(**tensors, **SMALL.options())


@pytest.mark.parametrize("argument", ["query", "kv_cache"])
@pytest.mark.frontends("jax", "jax-cuda")
def test_jax_gradients_are_refused(frontend, argument):
    import jax

    import xla_gpu.jax as ops

    arrays = jax.device_put(mla_cases.build(SMALL), frontend.device())

    def total(value):
        return ops.mla_attention(**arrays | {argument: value}, **SMALL.options()).sum()

    with pytest.raises(ValueError, match=f"mla_attention has no gradient for {argument}, "):
        jax.grad(total)(arrays[argument])


@pytest.mark.frontends("jax", "jax-cuda")
def test_jax_vmap(frontend):
    import jax

    import xla_gpu.jax as ops

    both = [mla_cases.build(SMALL, seed) for seed in range(2)]
    stacked = {name: np.stack([arrays[name] for arrays in both]) for name in both[0]}
    with jax.default_device(frontend.device()):
        got = jax.jit(jax.vmap(lambda arrays: ops.mla_attention(**arrays, **SMALL.options())))(jax.device_put(stacked))
    for i, arrays in enumerate(both):
        (want,) = frontend.call("mla_attention", arrays, **SMALL.options())
        compare.assert_bitwise_equal(np.asarray(got[i]), want, f"batch {i}")


@pytest.mark.frontends("eager")
def test_compiled_for_any_number_of_rows(frontend):
    """torch.compile in one graph, with symbolic sizes."""
    import torch

    ops = frontend.module()
    torch._dynamo.reset()
    compiled = torch.compile(ops.mla_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for sequences in (((1, 20), (3, 9)), ((5, 70),), ((2, 2), (1, 9), (1, 30))):
        case = SMALL.but(sequences=sequences)
        tensors = frontend.tensors(mla_cases.build(case))
        want = ops.mla_attention(**tensors, **case.options())
        assert torch.equal(compiled(**tensors, **case.options()), want)
