"""Eager PyTorch and what torch.library asks of operators: gradients, devices, strides, views, fake and meta tensors."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, layer_cases, process, reference
from tests.common.cases import AttentionCase

torch = pytest.importorskip("torch")
EAGER = pytest.mark.frontends("eager", "eager-cuda")
CASE = AttentionCase("eager", ((1, 20), (4, 9)), num_heads=4, num_kv_heads=2, page_size=8)
OPTIONS = {"scale": 0.2}


def attention(frontend, tensors):
    from tests.common.arrays import to_numpy

    return to_numpy(frontend.module().paged_attention(**tensors, **OPTIONS))


# ---- Gradients -------------------------------------------------------------------------------------------------------
@EAGER
@pytest.mark.parametrize("argument", ["query", "kv_cache"])
def test_requires_grad_is_refused(frontend, argument):
    tensors = frontend.tensors(cases.build(CASE).arrays())
    tensors[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"paged_attention: {argument}: expected .*gradient"):
        frontend.module().paged_attention(**tensors, **OPTIONS)
    with torch.no_grad():
        out = frontend.module().paged_attention(**tensors, **OPTIONS)
    assert not out.requires_grad
    with torch.inference_mode():
        frontend.module().paged_attention(**tensors, **OPTIONS)


@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_requires_grad_is_refused_by_torch_xla(frontend):
    arrays = cases.build(CASE).arrays()

    def body(ops, query, **rest):
        return ops.paged_attention(query.requires_grad_(), **rest, **OPTIONS)

    with pytest.raises(Exception, match="gradient"):
        frontend.run(body, arrays)


@EAGER
def test_forward_mode_is_refused(frontend):
    tensors = frontend.tensors({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(tensors["a"], tensors["b"])
        with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=r"gradient|forward"):
            frontend.module().simple_add(dual, tensors["b"])


# ---- Arguments that PyTorch's dispatcher takes or refuses with texts of its own --------------------------------------
def test_bools_are_no_numbers():
    import xla_gpu.torch as ops
    from tests.common.arrays import to_torch

    tensors = {name: to_torch(x) for name, x in cases.build(CASE).arrays().items()}
    window = {"sliding_window": np.bool_(True)}
    for options, expected in ({"sliding_window": True}, "an int"), (window, "an int"), ({"soft_cap": True}, "a number"):
        argument = next(iter(options))
        with pytest.raises(TypeError, match=f"paged_attention: {argument}: expected {expected} known .*, got bool"):
            ops.paged_attention(**tensors, **OPTIONS, **options)


def test_tensors_without_one_block_of_memory():
    import xla_gpu.torch as ops

    dense = torch.eye(3)
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
    for tensor, got in (dense.to_sparse(), "layout torch.sparse_coo"), (nested, "a nested one"):
        with pytest.raises(TypeError, match=f"simple_add: a: expected a dense tensor, got {got}"):
            ops.simple_add(tensor, dense)


# ---- Devices ---------------------------------------------------------------------------------------------------------
@pytest.mark.frontends("eager-cuda", "torch_xla", "torch_xla-cuda")
@pytest.mark.parametrize("argument", ["kv_cache", "block_tables", "num_seqs"])
def test_tensors_on_different_devices(frontend, argument):
    tensors = frontend.tensors(cases.build(CASE).arrays())
    tensors[argument] = tensors[argument].cpu()
    with pytest.raises(
        (ValueError, RuntimeError), match=rf"paged_attention: {argument}: expected .* on .*, got .* on cpu"
    ):
        attention(frontend, tensors)


@pytest.mark.frontends("eager")
def test_a_device_without_handlers(frontend):
    del frontend
    a = torch.ones(3, device="meta")
    import xla_gpu.torch

    assert xla_gpu.torch.simple_add(a, a).device.type == "meta"  # shapes alone
    with pytest.raises((ValueError, RuntimeError), match="b"):
        xla_gpu.torch.simple_add(a, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.frontends("eager-cuda")
def test_current_device_is_not_the_tensors(frontend):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    from tests.common.arrays import to_numpy, to_torch

    inputs = cases.build(CASE)
    want = attention(frontend, {k: to_torch(v, "cuda:0") for k, v in inputs.arrays().items()})
    with torch.cuda.device(0):
        out = frontend.module().paged_attention(
            **{k: to_torch(v, "cuda:1") for k, v in inputs.arrays().items()}, **OPTIONS
        )
        assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    compare.assert_bitwise_equal(to_numpy(out), want, "the second GPU")


@pytest.mark.frontends("eager-cuda")
def test_runs_on_the_current_stream(frontend):
    """Work queued before on the stream is seen, work queued after sees the result; no stream is waited for."""
    tensors = frontend.tensors({"a": np.ones(1 << 20, np.float32)})
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x = tensors["a"]
        for _ in range(50):
            torch.cuda._sleep(100_000)
            x = frontend.module().simple_add(x, tensors["a"])
        total = x.sum()
    stream.synchronize()
    assert float(total) == 51 * (1 << 20)


@pytest.mark.frontends("eager-cuda")
def test_captured_into_a_cuda_graph_and_replayed_with_other_lengths(frontend):
    case = AttentionCase(
        "capture", ((1, 300), (1, 280), (1, 1)), num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16"
    )
    inputs = cases.build(case)
    tensors = frontend.tensors(inputs.arrays())
    ops = frontend.module()
    ops.paged_attention(**tensors, **OPTIONS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(**tensors, **OPTIONS)
    from tests.common.arrays import to_numpy

    for i in range(1000):
        inputs.context_lens[0] = 1 + (i * 37) % 300
        tensors["context_lens"].copy_(torch.from_numpy(inputs.context_lens))
        graph.replay()
        replayed = to_numpy(out)
        (fresh,) = frontend.call("paged_attention", inputs.arrays(), **OPTIONS)
        compare.assert_bitwise_equal(replayed, fresh, f"replay {i}")


# ---- Memory ----------------------------------------------------------------------------------------------------------
VIEWS = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda t: torch.stack([t, torch.full_like(t, 7)], dim=-1)[..., 0],
    "offset": lambda t: torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].reshape(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape),
}


@EAGER
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("argument", ["query", "kv_cache", "context_lens", "block_tables"])
def test_views_are_read_right(frontend, argument, view):
    """Not contiguous, misaligned, or overlapping: as their contiguous copies."""
    inputs = cases.build(CASE, poison=False)
    tensors = frontend.tensors(inputs.arrays())
    tensors[argument] = VIEWS[view](tensors[argument])
    if view == "expanded" and argument == "context_lens":
        tensors[argument] = torch.full_like(tensors[argument][:1], 9).expand(tensors[argument].shape)
    assert not tensors[argument].is_contiguous() or tensors[argument].data_ptr() % 16 or tensors[argument].dim() == 1
    contiguous = {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    compare.assert_bitwise_equal(
        attention(frontend, tensors), attention(frontend, contiguous), f"{frontend.name} {argument} {view}"
    )


@EAGER
@pytest.mark.parametrize("view", ["transposed", "strided", "offset"])
def test_in_place_on_a_view_is_right_or_refused(frontend, view):
    """Never written into a copy that is thrown away."""
    from tests.common.arrays import to_numpy

    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[1])
    tensors = frontend.tensors(arrays)
    tensors["kv_cache"] = VIEWS[view](tensors["kv_cache"])
    try:
        frontend.module().reshape_and_cache_(**tensors)
    except ValueError as e:
        assert "reshape_and_cache: kv_cache: expected" in str(e)
        want = arrays["kv_cache"]
    else:
        want = reference.reshape_and_cache(**arrays)
    compare.assert_bitwise_equal(to_numpy(tensors["kv_cache"]), want, f"{frontend.name} {view}")


@EAGER
def test_in_place_on_one_layer_of_a_stack(frontend):
    """The usual case of a view: one tensor for all layers' caches, of which each layer takes its part."""
    from tests.common.arrays import to_numpy

    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[0])
    tensors = frontend.tensors(arrays)
    stack = torch.stack([tensors["kv_cache"]] * 3)
    frontend.module().reshape_and_cache_(tensors["key"], tensors["value"], stack[1], tensors["slot_mapping"])
    compare.assert_bitwise_equal(to_numpy(stack[1]), reference.reshape_and_cache(**arrays), frontend.name)
    for layer in (0, 2):
        compare.assert_bitwise_equal(to_numpy(stack[layer]), arrays["kv_cache"], f"layer {layer}")


def test_tensors_that_pytorch_negates_when_they_are_read():
    import xla_gpu.torch as ops

    def negated(x):
        return torch.view_as_complex(torch.stack([torch.zeros_like(x), -x], -1)).conj().imag

    key, cache, slots = torch.ones(1, 2, 32), torch.zeros(6, 8, 4, 32), torch.tensor([5])
    expected = ops.reshape_and_cache(key, key, cache, slots)
    assert negated(key).is_neg()
    assert torch.equal(ops.reshape_and_cache(negated(key), negated(key), negated(cache), slots), expected)
    assert torch.equal(ops.reshape_and_cache_(negated(key), negated(key), cache.clone(), slots), expected)
    with pytest.raises(
        ValueError, match=r"reshape_and_cache: kv_cache: expected .* in place, got one that PyTorch neg"
    ):
        ops.reshape_and_cache_(key, key, negated(cache), slots)


@EAGER
def test_in_place_counts_as_a_mutation(frontend):
    tensors = frontend.tensors(cache_cases.build_cache(cache_cases.CACHE_CASES[1]))
    version = tensors["kv_cache"]._version
    frontend.module().reshape_and_cache_(**tensors)
    assert tensors["kv_cache"]._version > version, "autograd would not notice that a saved tensor has changed"


@EAGER
def test_in_place_writes_nothing_around_the_cache(frontend):
    """Canaries before and behind."""
    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[0])
    tensors = frontend.tensors(arrays)
    size, edge = tensors["kv_cache"].numel(), 4096
    memory = torch.full((size + 2 * edge,), 3.0, dtype=tensors["kv_cache"].dtype, device=tensors["kv_cache"].device)
    cache = memory[edge : edge + size].view(tensors["kv_cache"].shape)
    cache.copy_(tensors["kv_cache"])
    frontend.module().reshape_and_cache_(tensors["key"], tensors["value"], cache, tensors["slot_mapping"])
    assert (memory[:edge] == 3).all() and (memory[edge + size :] == 3).all()


@EAGER
def test_inputs_are_left_alone(frontend):
    inputs = cases.build(CASE)
    tensors = frontend.tensors(inputs.arrays())
    attention(frontend, tensors)
    from tests.common.arrays import to_numpy

    for name, tensor in tensors.items():
        compare.assert_bitwise_equal(to_numpy(tensor), inputs.arrays()[name], name)


# ---- Threads and processes -------------------------------------------------------------------------------------------
@EAGER
def test_many_threads(frontend):
    batches = [cases.build(CASE, seed) for seed in range(8)]
    want = [frontend.call("paged_attention", b.arrays(), **OPTIONS)[0] for b in batches]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(
            pool.map(lambda i: frontend.call("paged_attention", batches[i % 8].arrays(), **OPTIONS)[0], range(160))
        )
    for i, out in enumerate(got):
        compare.assert_bitwise_equal(out, want[i % 8], f"call {i}")


@pytest.mark.frontends("eager")
def test_after_fork(frontend):
    """The child has none of the parent's threads; the library must not wait for them."""
    code = (
        "import os, torch, xla_gpu.torch as ops\n"
        "a = torch.ones(1 << 22)\n"
        "ops.simple_add(a, a)\n"
        "pid = os.fork()\n"
        # No operation of torch's own: its OpenMP threads do not survive a fork.
        "good = bool((ops.simple_add(a, a).numpy() == 2).all())\n"
        "if pid == 0: os._exit(0 if good else 3)\n"
        "print(good, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    # The time limit turns a child that waits for ever into a failure.
    assert process.run(code, timeout=120).split() == ["True", "0"]


# ---- torch.library ---------------------------------------------------------------------------------------------------
def operator_samples() -> dict[str, tuple[tuple, dict]]:
    from tests.common.arrays import to_torch

    tensors = {k: to_torch(v) for k, v in cases.build(CASE, poison=False).arrays().items()}
    cache = {k: to_torch(v) for k, v in cache_cases.build_cache(cache_cases.CACHE_CASES[1]).items()}
    cache["kv_cache"] = cache["kv_cache"].nan_to_num()
    out, lse = torch.randn(5, 4, 8), torch.randn(5, 4)
    return {
        "simple_add": ((torch.ones(3, 4), torch.ones(3, 4)), {}),
        "paged_attention": (tuple(tensors.values()), {"scale": 0.2}),
        "paged_attention_with_lse": (tuple(tensors.values()), {"scale": 0.2, "sliding_window": 4, "soft_cap": 3.0}),
        "reshape_and_cache": (tuple(cache.values()), {}),
        "merge_attention_states": ((out, lse, out.flip(0), lse.flip(0)), {}),
        "ragged_paged_attention": (tuple(tensors.values()), {"sm_scale": 0.2}),
        **{
            name: ((), layer_sample(name)) for name in layer_cases.NAMES
        },  # rms_norm, silu_and_mul, rotary_embedding, sample, linear, grouped_linear, gated_mlp, attention_block,
        # bidirectional_attention, mla_attention, concat_and_cache_mla
    }


def layer_sample(name: str) -> dict:
    from tests.common.arrays import to_torch

    arrays, options = layer_cases.samples()[name]
    return {**{argument: to_torch(x) for argument, x in arrays.items()}, **options}


def on_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(
    "name",
    [
        *("simple_add", "paged_attention", "paged_attention_with_lse", "reshape_and_cache", "merge_attention_states"),
        *layer_cases.NAMES,
    ],
)
def test_opcheck(name):
    import xla_gpu.torch  # noqa: F401

    args, kwargs = operator_samples()[name]
    torch.library.opcheck(
        getattr(torch.ops.xla_gpu, name).default, args, kwargs, test_utils=("test_schema", "test_faketensor")
    )


def test_samples_cover_the_operators():
    from xla_gpu.ops import OPERATORS

    collective = {"all_reduce", "all_reduce_add_rms_norm"}  # need a process group: tests/distributed
    assert {op.name for op in OPERATORS} - collective <= set(operator_samples())


@pytest.mark.parametrize(
    "name",
    [
        "simple_add",
        "paged_attention",
        "paged_attention_with_lse",
        "reshape_and_cache",
        "merge_attention_states",
        "ragged_paged_attention",
        *layer_cases.NAMES,
    ],
)
def test_meta_tensors_give_shapes(name):
    import xla_gpu.torch  # noqa: F401

    args, kwargs = operator_samples()[name]
    real = getattr(torch.ops.xla_gpu, name)(*args, **kwargs)
    meta = getattr(torch.ops.xla_gpu, name)(*map(on_meta, args), **{n: on_meta(x) for n, x in kwargs.items()})
    for r, m in zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (real, meta)), strict=True):
        assert (m.shape, m.dtype, m.device.type) == (r.shape, r.dtype, "meta")


def test_compiled_by_inductor_is_left_whole():
    """Eager tensors under torch.compile's default backend: the operator is opaque to it."""
    import xla_gpu.torch

    x = torch.ones(4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: xla_gpu.torch.simple_add(a, a) * 2, backend="aot_eager", fullgraph=True)
    assert (compiled(x) == 4).all()
