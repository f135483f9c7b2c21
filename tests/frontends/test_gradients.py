"""Gradients through every front end, beside float64's; and errors that name what has none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, layer_cases, process

torch = pytest.importorskip("torch")

from tests.common import gradients  # noqa: E402
from tests.frontends import gradients_program  # noqa: E402

CALLS = list(gradients.sample_calls("float32"))
DTYPES = [(call, cases.FLOATS[i % 3]) for i, call in enumerate(CALLS)]
EAGER = pytest.mark.frontends("eager", "eager-cuda")


@EAGER
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("call", CALLS)
def test_gradients(frontend, call, dtype):
    gradients_program.check(frontend, call, dtype)


@pytest.mark.frontends(framework="jax")
@pytest.mark.parametrize(("call", "dtype"), DTYPES)
def test_gradients_of_jax(frontend, call, dtype):
    gradients_program.check(frontend, call, dtype)


@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_gradients_of_torch_xla(frontend):
    program = "import runpy; runpy.run_module('tests.frontends.gradients_program', run_name='__main__')"
    calls = [f"{dtype}:{call}" for call, dtype in DTYPES]
    assert process.run(program, frontend.name, *calls).endswith("gradients checked")


@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_large_and_small_gates(frontend, name):
    """Where sums of the gate and of its activation would cancel, or overflow."""
    gate = np.array([0, 1e-30, 1e-3, 1, 20, 100, 1e4, 3e8, 1e18], np.float32)
    gate = np.concatenate([gate, -gate])
    arrays = {"x": np.concatenate([gate, np.ones_like(gate)])[None]}
    (cotangent,), (want,) = gradients.expected(name, arrays, {}, "float32")
    _, got = frontend.run(gradients_program.body(name, {}, ["x"]), {**arrays, "grad0": cotangent})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@EAGER
@pytest.mark.filterwarnings("ignore::UserWarning")  # inductor's advice about speed, on a GPU
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_train(frontend, backend):
    torch._dynamo.reset()
    layer = gradients_program.model(frontend.module(), frontend.device())
    gradients_program.check_compiled(layer, backend, frontend.device())


@pytest.mark.frontends("torch_xla-compiled", "torch_xla-cuda-compiled")
def test_compiled_models_train_on_torch_xla(frontend):
    program = "import runpy; runpy.run_module('tests.frontends.gradients_program', run_name='__main__')"
    assert process.run(program, frontend.name, "model").endswith("gradients checked")


@EAGER
@pytest.mark.parametrize("call", CALLS)
def test_functional_gradients_are_the_same(frontend, call):
    """torch.func's, of all operands, and of each alone: what is not wanted is left out."""
    operator, arrays, options = gradients.sample_calls("float32")[call]
    names, tensors, ops = gradients.wanted(operator, arrays), frontend.tensors(arrays), frontend.module()

    def loss(*values):
        results = getattr(ops, operator)(**tensors | dict(zip(names, values, strict=True)), **options)
        results = results if isinstance(results, tuple) else (results,)
        return sum((i + r).square().sum() for i, r in enumerate(results))

    given = [tensors[n] for n in names]
    want = torch.func.grad(loss, tuple(range(len(names))))(*given)
    for i, grad in enumerate(want):
        alone = [x.clone().requires_grad_(i == j) for j, x in enumerate(given)]
        loss(*alone).backward()
        assert torch.equal(alone[i].grad, grad), names[i]


@EAGER
def test_second_derivatives(frontend):
    """Those of a function of a norm, a rotation and an activation, by differences of the first ones."""
    ops, device = frontend.module(), frontend.device()
    weight = torch.linspace(0.5, 1.5, 8, device=device)

    def loss(x):
        normed = ops.rms_norm(x, weight, eps=1e-5)
        return ops.gelu_and_mul(ops.silu_and_mul(torch.cat([normed, x], -1))).square().sum()

    x = torch.linspace(-1, 2, 16, device=device).reshape(2, 8)
    hessian = torch.autograd.functional.hessian(loss, x).reshape(16, 16)
    largest = float(hessian.abs().max())
    other = torch.func.jacrev(torch.func.grad(loss))(x).reshape(16, 16)
    torch.testing.assert_close(other, hessian, rtol=1e-4, atol=1e-5 * largest)
    step = 1e-2
    for i in range(16):
        away = torch.zeros(16, device=device)
        away[i] = step
        near = [torch.func.grad(loss)(x + s * away.reshape(2, 8)) for s in (1, -1)]
        difference = ((near[0] - near[1]) / (2 * step)).flatten()
        torch.testing.assert_close(hessian[i], difference, rtol=2e-2, atol=2e-2 * largest)


@EAGER
def test_gradients_of_each_example(frontend):
    """torch.vmap of torch.func.grad."""
    ops = frontend.module()
    x = torch.linspace(-2, 3, 60, device=frontend.device()).reshape(5, 12)
    grad = torch.func.grad(lambda row: ops.silu_and_mul(row).square().sum())
    torch.testing.assert_close(torch.vmap(grad)(x), torch.stack([grad(row) for row in x]))


@EAGER
def test_what_is_kept_for_the_backward_pass(frontend):
    """Of a frozen layer the weight alone, and of a layer whose input is data the input alone."""
    ops, device = frontend.module(), frontend.device()

    def kept(**tensors) -> list[tuple[int, ...]]:
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
            ops.linear(**tensors)
        return shapes

    x, weight = torch.ones(3, 32, device=device), torch.ones(16, 32, device=device)
    assert kept(x=x.requires_grad_(), weight=weight) == [(16, 32)]
    assert kept(x=x.detach(), weight=weight.requires_grad_()) == [(3, 32)]


@EAGER
def test_tensors_without_elements(frontend):
    ops, device = frontend.module(), frontend.device()
    x, weight = torch.ones(0, 16, device=device, requires_grad=True), torch.ones(16, device=device, requires_grad=True)
    loss = ops.silu_and_mul(ops.linear(ops.rms_norm(x, weight, eps=1e-5), weight.repeat(16, 1))).sum()
    loss.backward()
    assert x.grad.shape == (0, 16) and torch.equal(weight.grad, torch.zeros_like(weight))


@EAGER
def test_what_changes_behind_the_call_is_an_error(frontend):
    ops = frontend.module()
    x = torch.ones(2, 8, device=frontend.device())
    weight = torch.ones(8, device=frontend.device(), requires_grad=True)
    out = ops.rms_norm(x, weight, eps=1e-5)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- JAX -------------------------------------------------------------------------------------------------------------
@pytest.mark.frontends(framework="jax")
@pytest.mark.parametrize("call", ["simple_add", "rms_norm-gemma", "rotary-part", "linear-int4-other", "gated_mlp-many"])
def test_jax_transformations(frontend, call):
    """Outside of jax.jit, in forward mode, of each example of a batch, under jax.checkpoint and in jax.lax.scan."""
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as ops

    operator, arrays, options = gradients.sample_calls("float32")[call]
    names = gradients.wanted(operator, arrays)
    given = jax.device_put(arrays, frontend.device())

    def loss(*values):
        results = getattr(ops, operator)(**given | dict(zip(names, values, strict=True)), **options)
        return sum((jnp.cos(i + r)).sum() for i, r in enumerate(results if isinstance(results, tuple) else (results,)))

    values = [given[n] for n in names]
    every = tuple(range(len(names)))
    want = jax.jit(jax.grad(loss, every))(*values)

    def close(got, what):
        for name, g, w in zip(names, got, want, strict=True):
            np.testing.assert_allclose(
                g, w, rtol=1e-4, atol=1e-5 * float(jnp.abs(w).max()) + 1e-6, err_msg=f"{what}: {name}"
            )

    close(jax.grad(loss, every)(*values), "eager")
    close(jax.jit(jax.grad(jax.checkpoint(loss), every))(*values), "checkpoint")
    several = jax.vmap(jax.grad(loss, every))(*(jnp.stack([x * 0.5, x]) for x in values))
    close([g[1] for g in several], "vmap")
    scanned = jax.grad(lambda *v: jax.lax.scan(lambda c, _: (c + loss(*v), None), 0.0, length=2)[0] / 2, every)
    close(jax.jit(scanned)(*values), "scan")
    tangents = [jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in values]
    _, along = jax.jvp(loss, values, tangents)
    expected = sum((w * t).sum() for w, t in zip(want, tangents, strict=True))
    np.testing.assert_allclose(along, expected, rtol=1e-3, atol=1e-3)
    alone = [jax.grad(loss, i)(*values) for i in every]
    close(alone, "alone")


@pytest.mark.frontends("jax")
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_products_of_gradients_are_of_the_operands_dtype(frontend, activation):
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as ops

    x, weight = jnp.ones((70, 32), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    grad = jax.grad(lambda *given: jnp.float32(ops.linear(*given, activation=activation)).sum(), (0, 1))
    products = [line for line in jax.jit(grad).lower(x, weight).as_text().splitlines() if "dot_general" in line]
    assert len(products) >= 2 and not any("xf32" in line for line in products), products


@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_float16_holds_no_sums_of_int8_weights(frontend, activation):
    """Sums of stored values would be infinite here."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": (3 + rng.standard_normal((4, 512))).astype(np.float16),
        "weight": rng.integers(50, 127, (32, 512)).astype(np.int8),
        "weight_scale": np.full(32, 1e-5, np.float32),
    }
    options = {} if activation is None else {"activation": activation}
    cotangents, (want,) = gradients.expected("linear", arrays, options, "float16")
    body = gradients_program.body("linear", options, ["x"])
    *_, got = frontend.run(body, {**arrays, **{f"grad{i}": cotangent for i, cotangent in enumerate(cotangents)}})
    np.testing.assert_allclose(got.astype(np.float32), want, atol=5e-3 * np.abs(want).max())


@pytest.mark.frontends(framework="jax")
def test_second_derivatives_in_jax(frontend):
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as ops

    weight = jnp.linspace(0.5, 1.5, 8)

    def loss(x, of_ours=True):
        if of_ours:
            normed = ops.rms_norm(x, weight, eps=1e-5)
            return jnp.square(ops.silu_and_mul(normed)).sum()
        normed = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight
        gate, up = jnp.split(normed, 2, -1)
        return jnp.square(jax.nn.silu(gate) * up).sum()

    x = jax.device_put(np.linspace(-1, 2, 16, dtype=np.float32).reshape(2, 8), frontend.device())
    want = jax.hessian(lambda x: loss(x, False))(x)
    for of in (jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacrev(f))):
        np.testing.assert_allclose(jax.jit(of(loss))(x), want, atol=1e-4)


# ---- What has none ---------------------------------------------------------------------------------------------------
@EAGER
def test_dtypes_that_none_takes(frontend):
    """As of torch.autograd.gradcheck: the error is that of the dtype."""
    x = torch.ones(2, 32, dtype=torch.float64, device=frontend.device(), requires_grad=True)
    with pytest.raises(TypeError, match=r"linear: x: expected dtype float32 .*, got float64"):
        frontend.module().linear(x, x.detach())
    weight = torch.zeros(16, 32, device=frontend.device()).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(ValueError, match="linear: weight: expected a tensor that does not require a gradient"):
        frontend.module().linear(x.float(), weight, weight_scale=torch.ones(1, device=frontend.device()))


@EAGER
@pytest.mark.parametrize(
    ("name", "argument"),
    [("merge_attention_states", "out_a"), ("linear", "weight_scale"), ("gated_mlp", "down_scale"), ("sample", "logits"),
     ("rotary_and_cache", "qkv"), ("attention_block", "x"), ("attention_block", "kv_cache"), ("grouped_linear", "x")],
)  # fmt: skip
def test_errors_name_the_operand(frontend, name, argument):
    if name == "merge_attention_states":
        out, lse = np.ones((2, 2, 8), np.float32), np.zeros((2, 2), np.float32)
        arrays, options = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}, {}
    else:
        arrays, options = layer_cases.samples()[name]
    tensors = frontend.tensors(arrays)
    tensors[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: {argument}: expected a tensor that does not require a gradient"):
        getattr(frontend.module(), name)(**tensors, **options)


@EAGER
@pytest.mark.parametrize("requires_grad", [False, True])
def test_errors_of_gated_mlp_name_it(frontend, requires_grad):
    """With a gradient it is made of other operators, whose names no caller has written."""
    arrays, options = layer_cases.samples()["gated_mlp"]
    tensors = frontend.tensors(arrays)
    tensors["x"].requires_grad_(requires_grad)
    with pytest.raises(ValueError, match="gated_mlp: residual: expected shape"):
        frontend.module().gated_mlp(**tensors | {"residual": tensors["x"].detach()[:0]}, **options)


@pytest.mark.frontends(framework="jax")
@pytest.mark.parametrize(
    ("name", "argument"),
    [("linear", "weight_scale"), ("grouped_linear", "x"), ("gated_mlp", "down_scale"), ("sample", "logits")],
)
def test_errors_of_jax_name_the_operand(frontend, name, argument):
    import jax

    import xla_gpu.jax as ops

    arrays, options = layer_cases.samples()[name]
    arrays = jax.device_put({n: x for n, x in arrays.items()}, frontend.device())

    def loss(value):
        out = getattr(ops, name)(**arrays | {argument: value}, **options)
        return (out[1] if isinstance(out, tuple) else out).sum().astype(value.dtype)

    with pytest.raises(ValueError, match=f"{name} has no gradient for {argument}, "):
        jax.grad(loss)(arrays[argument])


@EAGER
def test_every_declared_gradient_has_an_implementation(frontend):
    from xla_gpu._torch import gradients as of_torch
    from xla_gpu.ops import OPERATORS

    declared = {operator.name for operator in OPERATORS if operator.differentiable}
    assert declared == set(of_torch.GRADIENTS) | set(of_torch.COMPOSITES) == set(gradients.FUNCTIONS)
