"""Compiled programs are shared by calls that are the same, and by no others: values of an attribute that differ, in one
process and in one graph, each get their own result."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare, reference

CASE = cases.AttentionCase("graphs", ((2, 40), (1, 33)), num_heads=4, num_kv_heads=2, page_size=8)
FIRST = {"scale": 0.125, "sliding_window": None, "soft_cap": None}
# Pairs that a careless key confuses are among them: 0.125 and its float32 neighbour, a window of 1 and a cap of 1.0.
VARIANTS = {
    "scale": {"scale": 5.0},
    "scale-next-float32": {"scale": float(np.nextafter(np.float32(0.125), np.float32(1)))},
    "scale-negated": {"scale": -0.125},
    "window-1": {"sliding_window": 1},
    "window-9": {"sliding_window": 9},
    "cap-1": {"soft_cap": 1.0},
    "cap-9": {"soft_cap": 9.0},
}


def want(inputs, options):
    return reference.paged_attention(**inputs.arrays(), **(FIRST | options))[0]


@pytest.mark.parametrize("operator", ["paged_attention"])
def test_one_after_the_other(frontend, operator):
    inputs = cases.build(CASE)
    for options in ({}, *VARIANTS.values(), {}):
        (out,) = frontend.call(operator, inputs.arrays(), **(FIRST | options))
        np.testing.assert_allclose(out, want(inputs, options), atol=2e-5, err_msg=f"{frontend.name} {options}")


def test_in_one_graph(frontend):
    inputs = cases.build(CASE)
    options = [{}, *VARIANTS.values()]

    def body(ops, **tensors):
        return tuple(ops.paged_attention(**tensors, **(FIRST | o)) for o in options)

    for out, o in zip(frontend.run(body, inputs.arrays()), options, strict=True):
        np.testing.assert_allclose(out, want(inputs, o), atol=2e-5, err_msg=f"{frontend.name} {o}")


def test_neighbouring_scales_are_two_results(frontend):
    """The variants above differ by more than their tolerance in all but one case; this is that one, by bits."""
    inputs = cases.build(CASE)
    (first,) = frontend.call("paged_attention", inputs.arrays(), **FIRST)
    (second,) = frontend.call("paged_attention", inputs.arrays(), **(FIRST | VARIANTS["scale-next-float32"]))
    assert (compare.bits(first) != compare.bits(second)).any()


def test_dtypes_and_shapes_in_one_process(frontend):
    for dtype in cases.FLOATS:
        for shape in ((6,), (2, 3), (3, 2)):
            a = cases.rng_for(f"{dtype}{shape}").standard_normal(shape).astype(cases.DTYPES[dtype])
            (out,) = frontend.call("simple_add", {"a": a, "b": a})
            compare.assert_bitwise_equal(
                out, (a.astype(np.float32) * 2).astype(a.dtype), f"{frontend.name} {dtype} {shape}"
            )


def test_check_inputs_is_part_of_the_key(frontend, monkeypatch):
    """The switch is read when a call is traced; turning it on later must not find the program traced without it."""
    inputs = cases.build(CASE)
    (plain,) = frontend.call("paged_attention", inputs.arrays(), **FIRST)
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    (checked,) = frontend.call("paged_attention", inputs.arrays(), **FIRST)
    compare.assert_bitwise_equal(checked, plain, frontend.name)
    inputs.context_lens[0] = -1
    with pytest.raises((ValueError, RuntimeError), match="sequence 0"):
        frontend.call("paged_attention", inputs.arrays(), **FIRST)


@pytest.mark.frontends("torch_xla-compiled", "torch_xla-cuda-compiled")
def test_python_numbers_that_change_between_calls_of_one_compiled_function(frontend):
    """From the second value on, Dynamo makes a number that is an argument symbolic; attributes must be plain."""
    import torch

    from tests.common.arrays import to_numpy

    inputs = cases.build(CASE)
    tensors = frontend.tensors(inputs.arrays())
    torch._dynamo.reset()
    ops = frontend.module()

    @torch.compile(backend="openxla", fullgraph=True)
    def step(tensors, scale, window):
        return ops.paged_attention(**tensors, scale=scale, sliding_window=window, soft_cap=None)

    for scale, window in ((0.5, 4), (0.25, 4), (0.125, 4), (0.125, 5), (0.125, 6), (0.125, 7), (0.5, 4)):
        out = to_numpy(step(tensors, scale, window))
        expected = want(inputs, {"scale": scale, "sliding_window": window})
        np.testing.assert_allclose(out, expected, atol=2e-5, err_msg=f"scale {scale} window {window}")


@pytest.mark.frontends("torch_xla", "torch_xla-cuda", "torch_xla-compiled", "torch_xla-cuda-compiled")
def test_the_same_call_compiles_once(frontend):
    """New values of tensors, lengths and pages among them, find the program of the first call."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics

    inputs = cases.build(CASE)
    ops, compiled = frontend.module(), frontend.name.endswith("-compiled")

    def step(tensors):
        return ops.paged_attention(**tensors, **FIRST)

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, backend="openxla", fullgraph=True)

    def counts():
        torch_xla.sync()
        data = metrics.metric_data("CompileTime")
        return data[0] if data else 0

    step(frontend.tensors(inputs.arrays())).cpu()
    before = counts()
    for length in (39, 20, 1, 40):
        inputs.context_lens[0] = length
        out = step(frontend.tensors(inputs.arrays())).cpu().numpy()
        np.testing.assert_allclose(out, want(inputs, {}), atol=2e-5)
    assert counts() == before


@pytest.mark.frontends("jax", "jax-cuda")
def test_jit_traces_once(frontend):
    import jax

    traces = []

    @jax.jit
    def step(arrays):
        traces.append(1)
        return frontend_module().paged_attention(**arrays, **FIRST)

    def frontend_module():
        import xla_gpu.jax

        return xla_gpu.jax

    inputs = cases.build(CASE)
    for length in (40, 39, 1):
        inputs.context_lens[0] = length
        out = step(jax.device_put(inputs.arrays(), frontend.device()))
        np.testing.assert_allclose(np.asarray(out), want(inputs, {}), atol=2e-5)
    assert len(traces) == 1


@pytest.mark.frontends("jax", "jax-cuda", "torch_xla-compiled", "torch_xla-cuda-compiled")
def test_lengths_change_on_the_device_between_replays(frontend):
    """One executable, lengths from 1 to the capacity: each replay as a fresh run, bit for bit."""
    fresh = cases.build(CASE)
    tables = fresh.block_tables.copy()
    table_lengths = range(2, 41, 6)
    if frontend.framework == "jax":
        import jax

        import xla_gpu.jax

        compiled = jax.jit(lambda arrays: xla_gpu.jax.paged_attention(**arrays, **FIRST))

        def step(arrays):
            return np.asarray(compiled(jax.device_put(arrays, frontend.device())))
    else:
        import torch

        torch._dynamo.reset()
        ops = frontend.module()
        compiled = torch.compile(
            lambda tensors: ops.paged_attention(**tensors, **FIRST), backend="openxla", fullgraph=True
        )

        def step(arrays):
            return compiled(frontend.tensors(arrays)).cpu().numpy()

    for length in table_lengths:
        fresh.context_lens[0] = length
        compare.assert_bitwise_equal(fresh.block_tables, tables, "inputs")
        got = step(fresh.arrays())
        (again,) = frontend.call("paged_attention", fresh.arrays(), **FIRST)
        compare.assert_bitwise_equal(got, again, f"{frontend.name}: length {length}")
