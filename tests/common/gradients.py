"""The operators that have gradients, in PyTorch's float64, whose autograd is the reference."""

from __future__ import annotations

import numpy as np
import torch

from tests.common import cases, layer_cases, reference

Tensors = dict[str, torch.Tensor]


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of x in dtype, with x's gradient."""
    return x + (x.detach().to(dtype).double() - x.detach())


def _gated(activation: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    if activation == "silu_and_mul":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def rms_norm(given: Tensors, dtype, *, eps, weight_offset=0.0, round_once=False) -> tuple[torch.Tensor, ...]:
    del round_once
    x, residual = given["x"], given.get("residual")
    total = x if residual is None else _rounded(x + residual, dtype)
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * (given["weight"] + weight_offset)
    return (out,) if residual is None else (out, total)


def rotary_embedding(given: Tensors, _, *, interleaved=False) -> tuple[torch.Tensor, ...]:
    cos, sin = given["table"][given["positions"].long()][:, None].unbind(-1)
    half = cos.shape[-1]

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = (
            (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else x[..., : 2 * half].chunk(2, -1)
        )
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([turned, x[..., 2 * half :]], -1)

    return turn(given["query"]), turn(given["key"])


def linear(given: Tensors, dtype, *, activation=None) -> tuple[torch.Tensor, ...]:
    weight = given["weight"]
    if "weight_scale" in given:
        quantised = (given[n].numpy() if n in given else None for n in ("weight", "weight_scale", "weight_zero_point"))
        weight = torch.from_numpy(reference.linear_weight(*quantised))
    out = given["x"] @ weight.T
    if "bias" in given:
        out = out + given["bias"]
    if activation is not None:
        out = _gated(activation, out)
    return (out + given["residual"] if "residual" in given else out,)


def gated_mlp(given: Tensors, dtype, *, eps, activation="silu_and_mul") -> tuple[torch.Tensor, ...]:
    x = given["x"]
    if "norm_weight" in given:
        (x,) = rms_norm({"x": x, "weight": given["norm_weight"]}, dtype, eps=eps)

    def product(prefix: str, x: torch.Tensor, **more) -> torch.Tensor:
        names = {"weight": "weight", "weight_scale": "scale", "weight_zero_point": "zero_point", "bias": "bias"}
        its = {name: given[f"{prefix}_{n}"] for name, n in names.items() if f"{prefix}_{n}" in given}
        residual = {"residual": given["residual"]} if prefix == "down" and "residual" in given else {}
        return linear({"x": x, **its, **residual}, dtype, **more)[0]

    return (product("down", product("gate_up", x, activation=activation)),)


FUNCTIONS = {
    "simple_add": lambda given, _: (given["a"] + given["b"],),
    "silu_and_mul": lambda given, _: (_gated("silu_and_mul", given["x"]),),
    "gelu_and_mul": lambda given, _: (_gated("gelu_and_mul", given["x"]),),
    "rms_norm": rms_norm,
    "rotary_embedding": rotary_embedding,
    "linear": linear,
    "gated_mlp": gated_mlp,
}


def sample_calls(dtype: str) -> dict[str, tuple[str, dict[str, np.ndarray], dict]]:
    """Calls by a name of the test: (operator, arrays, options)."""
    kind = cases.DTYPES[dtype]
    rng = cases.rng_for(f"gradients {dtype}")
    a, b = (rng.standard_normal((3, 5)).astype(kind) for _ in range(2))
    made = {
        "simple_add": ("simple_add", {"a": a, "b": b}, {}),
        "silu_and_mul": ("silu_and_mul", layer_cases.gated(dtype, (3, 2, 22)), {}),
        "gelu_and_mul": ("gelu_and_mul", layer_cases.gated(dtype, (5, 48)), {}),
        "rms_norm": ("rms_norm", layer_cases.rms_norm(dtype, (5, 24), False), {"eps": 1e-5}),
        "rms_norm-vector": ("rms_norm", layer_cases.rms_norm(dtype, (33,), False), {"eps": 1e-5}),
        "rms_norm-gemma": (
            "rms_norm",
            layer_cases.rms_norm(dtype, (2, 3, 24), True),
            {"eps": 1e-3, "weight_offset": 1.0, "round_once": True},
        ),
        "rotary": ("rotary_embedding", layer_cases.rotary(dtype), {}),
        "rotary-part": ("rotary_embedding", layer_cases.rotary(dtype, rotary_dim=10), {"interleaved": True}),
        "linear": ("linear", cases.linear_inputs("plain", 3, 32, 48, dtype, bias=True, residual=32), {}),
        "linear-alone": ("linear", cases.linear_inputs("plain", 1, 16, 48, dtype), {}),
        "gated_mlp": ("gated_mlp", layer_cases.gated_mlp("plain", 3, 48, 32, dtype, bias=True), {"eps": 1e-5}),
        "gated_mlp-int8": ("gated_mlp", layer_cases.gated_mlp("int8", 3, 48, 32, dtype), {"eps": 1e-5}),
        "gated_mlp-many": ("gated_mlp", layer_cases.gated_mlp("plain", 70, 48, 32, dtype), {"eps": 1e-5}),
    }
    for i, weight_format in enumerate(cases.WEIGHT_FORMATS):
        rows = (3, 70)[i % 2]
        activation = {"activation": ("silu_and_mul", "gelu_and_mul", None)[i % 3]}
        arrays = cases.linear_inputs(weight_format, rows, 32, 256, dtype, bias=True)
        made[f"linear-{weight_format}"] = ("linear", arrays, activation)
        made[f"linear-{weight_format}-other"] = (
            "linear", cases.linear_inputs(weight_format, 73 - rows, 48, 128, dtype, residual=48), {},
        )  # fmt: skip
    return made


def wanted(operator: str, arrays: dict[str, np.ndarray]) -> list[str]:
    """The operands that have a gradient."""
    from xla_gpu.ops import OPERATORS

    (declared,) = (op for op in OPERATORS if op.name == operator)
    return [n for n in declared.differentiable if n in arrays and arrays[n].dtype.name in cases.FLOATS]


def cotangents(results: list[tuple[int, ...]], dtype: str) -> list[np.ndarray]:
    rng = cases.rng_for(f"cotangents {results} {dtype}")
    return [rng.standard_normal(shape).astype(cases.DTYPES[dtype]) for shape in results]


def expected(operator: str, arrays: dict[str, np.ndarray], options: dict, dtype: str) -> tuple[list, list[np.ndarray]]:
    """(cotangents of the results, gradients of `wanted`), the gradients in float64."""
    names = wanted(operator, arrays)
    floats = (*cases.FLOATS, "float64")
    given = {
        n: torch.from_numpy(x.astype(np.float64)) if x.dtype.name in floats and "scale" not in n else Array(x)
        for n, x in arrays.items()
    }
    for name in names:
        given[name].requires_grad_()
    results = FUNCTIONS[operator](given, getattr(torch, dtype), **options)
    grads = cotangents([tuple(r.shape) for r in results], dtype)
    of_results = [torch.from_numpy(g.astype(np.float64)) for g in grads]
    return grads, [g.numpy() for g in torch.autograd.grad(results, [given[n] for n in names], of_results)]


class Array:
    """A NumPy array with what the functions above use of a tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        return self._array

    def long(self) -> torch.Tensor:
        return torch.from_numpy(self._array).long()


def assert_close(got: np.ndarray, want: np.ndarray, dtype: str, what: str) -> None:
    """Within roundings of the largest: sums of terms that nearly cancel have no relative accuracy."""
    eps = {"float32": 2.0**-18, "float16": 2.0**-8, "bfloat16": 2.0**-5}[dtype]
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, what
    error, largest = np.abs(got - want).max(initial=0), np.abs(want).max(initial=0)
    assert error <= eps * largest, f"{what}: {error} of {largest}"
