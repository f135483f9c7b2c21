"""Products whose operands, weights or results have more than 2**32 elements, which 32-bit indices get wrong."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from tests.robustness.large_operands import EAGER_GPU, GIB, GPU, OVER, PART, call, eager, random, room  # noqa: E402 - after what may be missing

pytestmark = pytest.mark.usefixtures("much_memory")


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("wide", ["x", "out"])
def test_linear_of_many_rows(frontend, dtype, wide):
    """x, or the result, of more than 2**32 elements: by the kernel in float32, by the framework otherwise."""
    k, n = (4096, 16) if wide == "x" else (16, 4096)
    rows = OVER // 4096 + 3
    room(frontend, 1.2 * OVER * dtype.itemsize / GIB)
    shapes = ((rows, k), (n, k), (n,))
    x, weight, bias = (random(frontend, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    (out,) = call(frontend, "linear", x=x, weight=weight, bias=bias)
    step = PART // 4096
    for first in range(0, rows, step):
        want = x[first : first + step].float() @ weight.float().T + bias.float()
        error = (out[first : first + step].float() - want).abs().max()
        assert error < 0.01 * math.sqrt(k) * (4 if dtype is torch.bfloat16 else 1), f"rows from {first}: {error}"


@EAGER_GPU
@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        *((torch.bfloat16, format) for format in ("plain", "float8", "float8_block", "int8", "int4")),
        (torch.float32, "plain"),
        (torch.float32, "int4"),
    ],
    ids=str,
)
def test_linear_of_a_large_weight(frontend, dtype, format, rows):
    """A weight of more than 2**32 values, whose features are those of its parts."""
    n, k = OVER // 8192 + 16, 8192
    room(frontend, 1.6 * n * k * (dtype.itemsize if format == "plain" else 1) / GIB)
    x = random(frontend, rows, k, dtype=dtype, seed=1)
    generator = torch.Generator("cuda").manual_seed(7)
    arguments = {}
    if format == "plain":
        weight = random(frontend, n, k, dtype=dtype)
    elif format == "int4":
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        arguments["weight_scale"] = torch.rand(n, k // 128, device="cuda", generator=generator).to(dtype)
        arguments["weight_zero_point"] = torch.randint(0, 16, (n, k // 128), device="cuda", generator=generator).byte()
    else:
        weight = torch.randint(0, 120, (n, k), dtype=torch.int8, device="cuda", generator=generator)
        weight[:, ::2] |= -128  # negative; in float8 too, where 0x7f and 0xff would be NaN
        shape = (-(-n // 128), k // 128) if format == "float8_block" else (n,)
        arguments["weight_scale"] = torch.rand(shape, device="cuda", generator=generator)
        if format != "int8":
            weight = weight.view(torch.float8_e4m3fn)
    (out,) = call(frontend, "linear", x=x, weight=weight, **arguments)
    for first in (0, 2**31 // k // 128 * 128 - 256, 2**32 // k // 128 * 128 - 256, n - n % 128 - 256):
        last = min(n, first + 1024)
        part = {
            name: v[first // 128 : -(-last // 128)]
            if name == "weight_scale" and format == "float8_block"
            else v[first:last]
            for name, v in arguments.items()
        }
        want = eager().linear(x, weight[first:last], **part)
        scale = want.float().abs().max()
        assert scale > 0 and (out[:, first:last].float() - want.float()).abs().max() <= 0.02 * scale, first


@EAGER_GPU
def test_gated_mlp_of_large_weights(frontend):
    room(frontend, 14)
    hidden, intermediate = 16384, 2**17 + 128
    gate_up, down = random(frontend, 2 * intermediate, hidden), random(frontend, hidden, intermediate)
    gate_up *= 0.02
    down *= 0.02
    x = random(frontend, 4, hidden)
    (out,) = call(frontend, "gated_mlp", x=x, gate_up_weight=gate_up, down_weight=down)
    h = torch.nn.functional.silu(x @ gate_up[:intermediate].T) * (x @ gate_up[intermediate:].T)
    want = (h @ down.T).float()
    assert (out.float() - want).abs().max() < 0.02 * want.abs().max()
