"""Operators with gradients under torch.autocast."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.common import gradients  # noqa: E402

LAZY_TOO = pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")
EAGER = pytest.mark.frontends("eager", "eager-cuda")
OF_THE_REGION = ("linear", "gated_mlp")
CALLS = [name for name, (op, *_) in gradients.sample_calls("float32").items() if op != "rotary_embedding"]


def autocast(frontend, dtype=torch.bfloat16, **options):
    return torch.autocast(torch.device(frontend.device()).type, dtype=dtype, **options)


def random_array(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def results_of(results):
    return results if isinstance(results, tuple) else (results,)


@LAZY_TOO
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("call", CALLS)
def test_operands_of_other_dtypes_are_converted(frontend, call, dtype):
    """Bits are those of a call with converted operands: of a product with the region's dtype, else with the widest."""
    operator, arrays, options = gradients.sample_calls("float32")[call]
    function, tensors, dtype = getattr(frontend.module(), operator), frontend.tensors(arrays), getattr(torch, dtype)
    names = [*gradients.wanted(operator, arrays)]
    first = names[0]
    mixed = tensors | {first: tensors[first].to(dtype)}
    with autocast(frontend, dtype):
        got = results_of(function(**mixed, **options))
    to = dtype if operator in OF_THE_REGION or len(names) == 1 else torch.float32
    if arrays.get("weight", arrays.get("gate_up_weight", arrays[first])).dtype == np.uint8:
        names += [name for name in arrays if name.endswith("_scale")]
    want = results_of(function(**mixed | {name: mixed[name].to(to) for name in names}, **options))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype == to
        assert torch.equal(g.cpu(), w.cpu())


@LAZY_TOO
def test_a_region_that_is_off_converts_nothing(frontend):
    x, weight = frontend.tensors({"x": random_array(4, 32), "weight": random_array(16, 32)}).values()
    with autocast(frontend), autocast(frontend, enabled=False), pytest.raises(TypeError, match="linear: weight: expe"):
        frontend.module().linear(x.bfloat16(), weight)
    with autocast(frontend), pytest.raises(TypeError, match=r"linear: weight: expected dtype bfloat16 .* float64"):
        frontend.module().linear(x, weight.double())


@EAGER
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_float32_models_train(frontend, backend):
    """Of bfloat16 products in a compiled function too: gradients are the parameters', in their dtypes."""
    ops = frontend.module()
    x, norm, weight = frontend.tensors(
        {"x": random_array(4, 64), "norm": random_array(64), "weight": random_array(32, 64)}
    ).values()
    parameters = [norm.requires_grad_(), weight.requires_grad_()]

    def loss(x):
        with autocast(frontend):
            hidden = ops.linear(ops.rms_norm(x.bfloat16(), norm, eps=1e-5), weight, activation="silu_and_mul")
        assert hidden.dtype == torch.bfloat16
        return hidden.float().square().sum()

    want = torch.autograd.grad(loss(x), parameters)
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(x), parameters)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float32 and torch.isfinite(g).all() and g.abs().max() > 0
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2 * float(w.abs().max()))
