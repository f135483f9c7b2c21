"""Strided, misaligned and broadcast tensors: each operand of each operator, in eager PyTorch; and memory that JAX was
lent."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, layer_cases
from tests.common.arrays import to_numpy

torch = pytest.importorskip("torch")
EAGER = pytest.mark.frontends("eager", "eager-cuda")

FP8 = cases.AttentionCase(
    "views", ((2, 20), (12, 19)), num_heads=4, num_kv_heads=2, page_size=8, dtype="bfloat16", sinks=True,
    cache_dtype="float8_e4m3fn", scales="per_head", padding_tokens=0, spare_seqs=0,
)  # fmt: skip
UPDATE = cache_cases.CacheCase(
    "views", cache_dtype="float8_e5m2", scales="per_head", dtype="float16", slot_dtype="int64"
)


def samples() -> dict[str, tuple[dict, dict]]:
    rng = cases.rng_for("views")
    state = {name: rng.standard_normal((5, 4, 24)).astype(np.float16) for name in ("out_a", "out_b")}
    state |= {name: rng.standard_normal((5, 4)).astype(np.float32) for name in ("lse_a", "lse_b")}
    return {
        "simple_add": ({name: rng.standard_normal((6, 10)).astype(np.float32) for name in "ab"}, {}),
        "merge_attention_states": (state, {}),
        "reshape_and_cache": (cache_cases.build_cache(UPDATE), {}),
        "paged_attention_with_lse": (cases.build(FP8, poison=False).arrays(), FP8.options()),
        # rms_norm, silu_and_mul, rotary_embedding, sample, linear, grouped_linear, gated_mlp, attention_block,
        # bidirectional_attention, mla_attention, concat_and_cache_mla
        **layer_cases.samples(),
    }


SAMPLES = samples()


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def strided(t):
    return torch.stack([t, torch.zeros_like(t)], dim=-1)[..., 0]


def misaligned(t):
    """At an address that is a multiple of the element's size, and of nothing else."""
    size = t.element_size()
    memory = torch.empty(t.numel() * size + 64, dtype=torch.uint8, device=t.device)
    shift = -memory.data_ptr() % 64 + size
    view = memory[shift : shift + t.numel() * size].view(t.dtype).view(t.shape)
    return view.copy_(t)


def reversed_twice(t):
    return t.flip(0).contiguous().flip(0)


VIEWS = [transposed, strided, misaligned, reversed_twice]
OPERANDS = [(operator, name) for operator, (arrays, _) in SAMPLES.items() for name in arrays]


def results(frontend, operator, tensors, options):
    got = getattr(frontend.module(), operator)(**tensors, **options)
    return [to_numpy(x) for x in (got if isinstance(got, tuple) else (got,))]


@EAGER
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize(("operator", "name"), OPERANDS)
def test_every_operand_may_be_a_view(frontend, operator, name, view):
    arrays, options = SAMPLES[operator]
    tensors = frontend.tensors(arrays)
    want = results(frontend, operator, tensors, options)
    tensors[name] = view(tensors[name])
    for i, (g, w) in enumerate(zip(results(frontend, operator, tensors, options), want, strict=True)):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {operator}, {name} {view.__name__}: result {i}")


@EAGER
def test_operands_may_be_one_tensor(frontend):
    """The same memory as several operands, none of them written."""
    x = frontend.tensors({"x": cases.rng_for("one").standard_normal((4, 8)).astype(np.float32)})["x"]
    assert torch.equal(frontend.module().simple_add(x, x), x * 2)
    assert torch.equal(frontend.module().simple_add(x[:3], x[1:]), x[:3] + x[1:])
    lse = x[:, :2].contiguous()
    out = x.reshape(4, 2, 4)
    merged, _ = frontend.module().merge_attention_states(out, lse, out, lse)
    assert torch.allclose(merged, out)


@EAGER
def test_memory_that_was_freed_is_named(frontend):
    """As FSDP frees that of parameters between their uses."""
    tensors = {name: torch.ones(4, 8, device=frontend.device()) for name in "ab"}
    tensors["b"].untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match="simple_add: b: expected a tensor with memory, got one whose storage has 0 bytes"
    ):
        frontend.module().simple_add(**tensors)


@EAGER
@pytest.mark.parametrize("shared", ["key", "value", "slot_mapping"])
def test_in_place_into_its_own_operand_is_refused(frontend, shared):
    """A key that lies inside the cache would change while it is read."""
    cache = frontend.tensors({"c": np.zeros((4, 8, 4, 16), np.float32)})["c"]
    tokens = {"key": torch.ones(2, 2, 16), "value": torch.ones(2, 2, 16)}
    tensors = {name: x.to(cache.device) for name, x in tokens.items()}
    tensors["slot_mapping"] = torch.arange(2, dtype=torch.int32, device=cache.device)
    if shared == "slot_mapping":
        tensors[shared] = cache.reshape(-1)[:2].view(torch.int32)
    else:
        tensors[shared] = cache[0].reshape(-1)[:64].view(2, 2, 16)
    text = f"reshape_and_cache: kv_cache: expected memory that does not overlap {shared}"
    with pytest.raises(ValueError, match=text):
        frontend.module().reshape_and_cache_(**tensors, kv_cache=cache)
    assert not cache.any()


@pytest.mark.frontends("jax", "jax-cuda")
@pytest.mark.parametrize("name", ["query", "kv_cache", "block_tables", "k_scale"])
def test_jax_over_memory_that_it_was_lent(frontend, name):
    """A misaligned tensor of PyTorch's, which JAX takes over without a copy where it can: right, or a clear error."""
    import jax

    import xla_gpu.jax

    arrays, options = SAMPLES["paged_attention_with_lse"]
    if arrays[name].dtype.itemsize == 1:
        pytest.skip("no exchange of float8")
    want = frontend.call("paged_attention_with_lse", arrays, **options)
    device = "cpu" if frontend.platform == "host" else "cuda"
    from tests.common.arrays import to_torch

    lent = misaligned(to_torch(arrays[name], device))
    placed = jax.device_put(arrays, frontend.device())
    placed[name] = jax.dlpack.from_dlpack(lent)
    try:
        got = jax.jit(lambda arrays: xla_gpu.jax.paged_attention_with_lse(**arrays, **options))(placed)
        got = [np.asarray(x) for x in got]
    except Exception as e:
        assert "aligned" in str(e) or "must be a multiple of" in str(e), e
        return
    for g, w in zip(got, want, strict=True):
        compare.assert_bitwise_equal(g, w, f"{frontend.name}: {name}")
