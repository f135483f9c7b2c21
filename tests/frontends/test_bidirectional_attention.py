"""bidirectional_attention in each framework: wrong arguments, transformations and programs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import bidirectional_cases, cases, compare, frontends
from tests.common.bidirectional_cases import Case
from tests.properties.bad import drop

EAGER = pytest.mark.frontends("eager", "eager-cuda")
JAX = pytest.mark.frontends("jax", "jax-cuda")
# Of 4 query and 2 KV heads of 16, in float32: 2 padding rows, 5, 1 and 20 tokens, 3 padding rows; 2 spare sequences.
SMALL = Case("small", (5, 1, 20))
NAMES = ("query", "key", "value", "query_start_loc", "num_seqs")


def small() -> dict[str, np.ndarray]:
    return bidirectional_cases.build(SMALL)


def called(frontend, arrays=None, **options):
    return frontend.call("bidirectional_attention", small() if arrays is None else arrays, **SMALL.options() | options)


# ---- Wrong arguments; those of other shapes and dtypes: tests/properties/bad_layer_inputs.py -------------------------
@pytest.mark.parametrize("value", [None, "text", [1.0], 1.5], ids=str)
@pytest.mark.parametrize("argument", ["query", "key", "value", "query_start_loc"])
def test_the_same_words_for_what_is_no_array(argument, value):
    texts = {}
    for name in ("eager", "torch_xla", "jax"):
        frontend = frontends.ALL[name]
        if frontend.unavailable():
            continue
        arrays, options = small(), SMALL.options()
        drop(argument)(arrays, options)
        with pytest.raises(TypeError) as error:
            frontend.call("bidirectional_attention", arrays, **options, **{argument: value})
        texts[name] = str(error.value).replace("a JAX or NumPy array", "a tensor")
    assert set(texts.values()) == {
        f"bidirectional_attention: {argument}: expected a tensor, got {type(value).__name__}"
    }


@EAGER
def test_one_device_is_named(frontend):
    tensors = frontend.tensors(small())
    tensors["value"] = tensors["value"].to("meta")
    with pytest.raises(ValueError, match=r"bidirectional_attention: value: expected a tensor on .* got one on meta"):
        frontend.module().bidirectional_attention(**tensors, scale=0.25)


def test_num_seqs_as_an_int(frontend):
    arrays = small()
    (want,) = called(frontend)
    del arrays["num_seqs"]
    (got,) = called(frontend, arrays, num_seqs=3)
    compare.assert_bitwise_equal(got, want, frontend.name)


@pytest.mark.frontends("eager", "torch_xla", "jax", "torchax")
def test_num_seqs_past_the_entries_is_named(frontend):
    arrays = small()
    del arrays["num_seqs"]
    with pytest.raises(ValueError, match="bidirectional_attention: num_seqs: expected an int <= 5, got 6"):
        called(frontend, arrays, num_seqs=6)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends(*(name for name in frontends.ALL if not name.startswith("eager")))
def test_bit_for_bit(frontend, dtype):
    other = frontends.beside(frontend)
    if other is None:
        pytest.skip("the only front end of its platform in this process")
    arrays = bidirectional_cases.build(SMALL.but(dtype=dtype))
    for window in (None, 1, 3):
        (got,) = called(frontend, arrays, sliding_window=window)
        (want,) = called(other, arrays, sliding_window=window)
        compare.assert_bitwise_equal(got, want, f"{frontend.name} against {other.name}")


# ---- JAX -------------------------------------------------------------------------------------------------------------
@JAX
def test_outside_of_jit(frontend):
    """Of NumPy's arrays too, and with JAX's strictest promotion of dtypes."""
    import jax

    import xla_gpu.jax as ops

    (want,) = called(frontend)
    strict = (jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"))
    with jax.default_device(frontend.device()), strict[0], strict[1]:
        for given in (small(), jax.device_put(small())):
            got = ops.bidirectional_attention(**given, **SMALL.options())
            compare.assert_bitwise_equal(np.asarray(got), want)


@JAX
def test_it_is_one_call(frontend):
    """And nothing beside it: no copy of keys or values."""
    import jax

    import xla_gpu.jax as ops

    with jax.default_device(frontend.device()):
        attend = jax.jit(lambda arrays: ops.bidirectional_attention(**arrays, **SMALL.options()))
        text = attend.lower(jax.device_put(small())).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["xla_gpu_bidirectional_attention"]
    made = set(re.findall(r"= \"?(stablehlo\.\w+)", text))
    assert made <= {"stablehlo.custom_call", "stablehlo.constant"}  # the latter for attributes


@JAX
@pytest.mark.parametrize("jitted", [False, True])
def test_jax_vmap(frontend, jitted):
    """Of batches, and of queries with the same keys."""
    import jax

    import xla_gpu.jax as ops

    first, second = small(), bidirectional_cases.build(SMALL, seed=1)
    second["query_start_loc"] = first["query_start_loc"] + np.int32(1)
    both = {name: jax.numpy.stack([first[name], second[name]]) for name in NAMES}

    def attend(arrays):
        return ops.bidirectional_attention(**arrays, **SMALL.options())

    function = jax.vmap(attend)
    with jax.default_device(frontend.device()):
        got = np.asarray((jax.jit(function) if jitted else function)(jax.device_put(both)))
        for i, arrays in enumerate((first, second)):
            compare.assert_bitwise_equal(got[i], called(frontend, arrays)[0])
        shared = {**first, "query": both["query"]}
        axes = {name: 0 if name == "query" else None for name in NAMES}
        got = np.asarray(jax.vmap(attend, (axes,))(jax.device_put(shared)))
    compare.assert_bitwise_equal(got[1], called(frontend, {**first, "query": second["query"]})[0])


@JAX
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_jax_gradients_are_refused(frontend, argument):
    import jax

    import xla_gpu.jax as ops

    arrays = jax.device_put(small(), frontend.device())

    def total(value):
        return ops.bidirectional_attention(**arrays | {argument: value}, **SMALL.options()).sum()

    with pytest.raises(ValueError, match=f"bidirectional_attention has no gradient for {argument}, "):
        jax.grad(total)(arrays[argument])


@JAX
def test_export(frontend):
    """Of known sizes, and of any number of tokens: it takes no scratch memory."""
    pytest.importorskip("flatbuffers")
    import jax
    from jax import export

    import xla_gpu.jax as ops

    arrays = small()
    described = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    checks = [export.DisabledSafetyCheck.custom_call("xla_gpu_bidirectional_attention")]
    platform = "cuda" if frontend.platform == "cuda" else "cpu"
    attend = jax.jit(lambda a: ops.bidirectional_attention(**a, **SMALL.options()))
    made = export.export(attend, platforms=[platform], disabled_checks=checks)

    def assert_runs():
        program = export.deserialize(made(described).serialize())
        got = program.call(jax.device_put(arrays, frontend.device()))
        compare.assert_bitwise_equal(np.asarray(got), called(frontend)[0])

    assert_runs()
    (tokens,) = export.symbolic_shape("tokens")
    for name in ("query", "key", "value"):
        described[name] = jax.ShapeDtypeStruct((tokens, *arrays[name].shape[1:]), arrays[name].dtype)
    assert_runs()


# ---- PyTorch ---------------------------------------------------------------------------------------------------------
@EAGER
def test_torch_vmap(frontend):
    import torch

    first, second = small(), bidirectional_cases.build(SMALL, seed=1)
    tensors, others = frontend.tensors(first), frontend.tensors(second)
    ops = frontend.module()
    stacked = [torch.stack([tensors[name], others[name]]) for name in NAMES]
    got = torch.vmap(lambda *given: ops.bidirectional_attention(*given, **SMALL.options()))(*stacked)
    for i, arrays in enumerate((first, second)):
        assert torch.equal(got[i], frontend.tensors({"want": called(frontend, arrays)[0]})["want"])


@pytest.mark.parametrize("argument", ["query", "key", "value"])
@pytest.mark.frontends("eager", "eager-cuda", "torch_xla")
def test_torch_gradients_are_refused(frontend, argument):
    tensors = frontend.tensors(small())
    tensors[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"bidirectional_attention: {argument}: expected .* not require a gradient"):
        frontend.module().bidirectional_attention(**tensors, **SMALL.options())


@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_lazy_graphs_stay_on_the_device(frontend):
    """None of its operations is one that torch_xla computes on the host."""
    from xla_gpu._torch_xla.counters import fallbacks

    before = fallbacks()
    for window in (None, 1, 5):
        called(frontend, sliding_window=window)
    assert fallbacks() == before


@pytest.mark.frontends("eager")
def test_compiled_for_any_number_of_rows(frontend):
    """torch.compile in one graph, with symbolic sizes."""
    import torch

    ops = frontend.module()
    torch._dynamo.reset()
    compiled = torch.compile(ops.bidirectional_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ((5, 1, 20), (40, 3)):
        tensors = frontend.tensors(bidirectional_cases.build(SMALL.but(lengths=lengths)))
        want = ops.bidirectional_attention(**tensors, **SMALL.options())
        assert torch.equal(compiled(**tensors, **SMALL.options()), want)
    torch._dynamo.reset()
