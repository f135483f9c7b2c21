"""Gradients of all operators that have some, through one front end, beside float64's.

test_gradients.py runs it for torch_xla in a process of its own, since autograd counts the devices at a process's first
backward pass, and refuses those that torch_xla adds later:

    python -m tests.frontends.gradients_program FRONTEND DTYPE:CALL|model ...
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.common import cases, compare, frontends, gradients, layer_cases
from tests.common.arrays import to_numpy, to_torch


def body(operator: str, options: dict, names: list[str]):
    """A function for `Frontend.run` of arrays and cotangents ("grad0", …): the results, then the gradients of names."""

    def with_torch(ops, **tensors):
        tensors = {n: x.detach().requires_grad_() if n in names else x for n, x in tensors.items()}
        given = {n: x for n, x in tensors.items() if not n.startswith("grad")}
        results = getattr(ops, operator)(**given, **options)
        results = results if isinstance(results, tuple) else (results,)
        of_results = [tensors[f"grad{i}"] for i in range(len(results))]
        grads = torch.autograd.grad(results, [tensors[n] for n in names], of_results)
        return tuple(r.detach() for r in results) + grads

    def with_jax(ops, **arrays):
        import jax

        given = {n: x for n, x in arrays.items() if not n.startswith("grad")}

        def call(*values):
            results = getattr(ops, operator)(**given | dict(zip(names, values, strict=True)), **options)
            return results if isinstance(results, tuple) else (results,)

        results, vjp = jax.vjp(call, *(given[n] for n in names))
        return results + vjp(tuple(arrays[f"grad{i}"] for i in range(len(results))))

    return lambda ops, **values: (with_jax if ops.__name__ == "xla_gpu.jax" else with_torch)(ops, **values)


def check(frontend, call: str, dtype: str) -> None:
    operator, arrays, options = gradients.sample_calls(dtype)[call]
    names = gradients.wanted(operator, arrays)
    grads, want = gradients.expected(operator, arrays, options, dtype)
    with_grads = arrays | {f"grad{i}": grad for i, grad in enumerate(grads)}
    got = frontend.run(body(operator, options, names), with_grads)
    plain = frontend.call(operator, arrays, **options)
    for i, (result, without) in enumerate(zip(got, plain, strict=False)):
        compare.assert_bitwise_equal(result, without, f"{call}: result {i}")
    # Products of float32 are PyTorch's, which torch_xla's XLA multiplies in TF32 on a GPU.
    accuracy = "float16" if (frontend.name, dtype) == ("torch_xla-cuda", "float32") else dtype
    for name, grad, expected in zip(names, got[len(plain) :], want, strict=True):
        assert grad.dtype == arrays[name].dtype
        gradients.assert_close(grad, expected, accuracy, f"{call}: {name}")


def model(ops, device: str) -> torch.nn.Module:
    """A layer with everything that has a gradient."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            arrays = layer_cases.gated_mlp("plain", 3, 48, 32, "float32")
            arrays["qkv"] = cases.linear_inputs("plain", 1, 96, 48, "float32")["weight"]
            for name in ("norm_weight", "qkv", "gate_up_weight", "down_weight"):
                self.register_parameter(name, torch.nn.Parameter(to_torch(arrays[name])))
            rotation = layer_cases.rotation(3, 16, cases.rng_for("layer"))
            for name, x in rotation.items():
                self.register_buffer(name, to_torch(x))

        def forward(self, x):
            normed, total = ops.rms_norm(x, self.norm_weight, eps=1e-5, residual=x)
            query, key, value = ops.linear(normed, self.qkv).view(-1, 6, 16).split([2, 2, 2], 1)
            query, key = ops.rotary_embedding(query, key, self.positions, self.table)
            scores = torch.einsum("qhd,khd->hqk", query, key).softmax(-1)
            attended = ops.silu_and_mul(torch.einsum("hqk,khd->qhd", scores, value).repeat(1, 1, 3).reshape(-1, 96))
            return ops.gated_mlp(
                attended, self.gate_up_weight, self.down_weight, norm_weight=self.norm_weight, residual=total, eps=1e-5
            )

    return Layer().to(device)


def gradients_of(module, parameters, x) -> list[np.ndarray]:
    for parameter in parameters:
        parameter.grad = None
    module(x).square().sum().backward()
    return [to_numpy(parameter.grad) for parameter in parameters]


def check_compiled(layer: torch.nn.Module, backend: str, device: str) -> None:
    """The gradients of a compiled layer, beside those of its operators one by one."""
    parameters, x = list(layer.parameters()), torch.linspace(-1, 1, 144).reshape(3, 48)
    x = x.to(device).requires_grad_()
    want = gradients_of(layer, [*parameters, x], x)
    got = gradients_of(torch.compile(layer, backend=backend, fullgraph=True), [*parameters, x], x)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * np.abs(w).max())


if __name__ == "__main__":
    chosen = frontends.ALL[sys.argv[1]]
    if chosen.framework == "torch":
        torch.zeros(1, device=chosen.device())
    for argument in sys.argv[2:]:
        dtype, _, call = argument.partition(":")
        if dtype == "model":
            check_compiled(model(chosen.module(), chosen.device()), "openxla", chosen.device())
        else:
            check(chosen, call, dtype)
    print("gradients checked")
