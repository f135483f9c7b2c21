"""linear and gated_mlp of rows with any number of axes before the last."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.common import compare, layer_cases

AXES = [(), (2, 3), (1, 1), (2, 0), (3, 1, 2), (35, 2)]


def sample(operator: str, weight_format: str, axes: tuple[int, ...], dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    arrays = layer_cases.gated_mlp(weight_format, math.prod(axes), 128, 256, dtype, bias=True)
    if operator == "gated_mlp":
        return arrays
    names = {"x": "x", "weight": "gate_up_weight", "bias": "gate_up_bias", "weight_scale": "gate_up_scale"}
    made = {name: arrays[of] for name, of in names.items() if of in arrays}
    residual = np.random.default_rng(1).standard_normal((len(made["x"]), len(made["weight"])))
    return made | {"residual": residual.astype(made["x"].dtype)}


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel"])
@pytest.mark.parametrize("operator", ["linear", "gated_mlp"])
def test_bits_are_those_of_rows(frontend, operator, weight_format, axes):
    arrays = sample(operator, weight_format, axes)
    (want,) = frontend.call(operator, arrays)
    shaped = {
        name: arrays[name].reshape(*axes, -1 if arrays[name].size else arrays[name].shape[1])
        for name in ("x", "residual")
    }
    (got,) = frontend.call(operator, arrays | shaped)
    assert got.shape == (*axes, want.shape[-1])
    compare.assert_bitwise_equal(got.reshape(want.shape), want, f"{frontend.name}: {operator} {axes}")


@pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda", "jax", "jax-cuda", "torchax")
@pytest.mark.parametrize("operator", ["linear", "gated_mlp"])
def test_a_residual_has_the_axes_of_x(frontend, operator):
    arrays = sample(operator, "plain", (2, 3))
    arrays["x"] = arrays["x"].reshape(2, 3, -1)
    with pytest.raises(
        ValueError, match=rf"{operator}: residual: expected shape \[2, 3, out_features\] \(rows as x\), got"
    ):
        frontend.call(operator, arrays)
    arrays["x"], arrays["residual"] = arrays["x"][0, 0], arrays["residual"][0, 0]
    with pytest.raises(ValueError, match=rf"{operator}: residual: expected shape \[out_features\] \(rows as x\), got"):
        frontend.call(operator, arrays)


@pytest.mark.frontends("eager", "eager-cuda")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_gradients_and_other_sizes(frontend, backend):
    """As torch.nn.functional.linear is called, of a batch of sequences whose sizes change."""
    torch = pytest.importorskip("torch")
    ops, weight = frontend.module(), torch.linspace(-1, 1, 16 * 32, device=frontend.device()).reshape(16, 32)

    def loss(x, weight):
        return ops.linear(x.transpose(0, 1), weight, residual=x[..., :16].transpose(0, 1)).square().sum()

    def expected(x, weight):
        return (torch.nn.functional.linear(x, weight) + x[..., :16]).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for sizes in ((2, 3), (5, 4), (30, 3)):
        x = torch.linspace(-2, 1, math.prod(sizes) * 32, device=frontend.device()).reshape(*sizes, 32)
        given = [x.requires_grad_(), weight.requires_grad_()]
        for g, w in zip(
            torch.autograd.grad(compiled(*given), given), torch.autograd.grad(expected(*given), given), strict=True
        ):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))


@pytest.mark.frontends("jax", "jax-cuda")
def test_gradients_in_jax(frontend):
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as ops

    x = jax.device_put(np.linspace(-2, 1, 6 * 32, dtype=np.float32).reshape(2, 3, 32), frontend.device())
    weight = jax.device_put(np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32), frontend.device())
    got = jax.jit(jax.grad(lambda *given: jnp.square(ops.linear(*given)).sum(), (0, 1)))(x, weight)
    want = jax.grad(lambda x, w: jnp.square(jnp.einsum("abk,nk->abn", x, w, precision="highest")).sum(), (0, 1))(
        x, weight
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * float(np.abs(w).max()))
