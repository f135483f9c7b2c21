"""linear's products behind one another, many times: a load that is early or late shows now and then."""

from __future__ import annotations

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 20, 32, 33, 48, 64])
@pytest.mark.parametrize("weight_format", ["plain", "float8-channel", "float8-block", "int8", "int4"])
def test_the_same_bits(weight_format, rows):
    """A decoder layer's products, three layers of them, 100 times."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch with CUDA")
    import xla_gpu.torch as xg

    generator = torch.Generator("cuda").manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    def integers(start, end, shape, dtype):
        return torch.randint(start, end, shape, device="cuda", generator=generator, dtype=dtype)

    def weights(n, k):
        if weight_format == "plain":
            return {"weight": (normal(n, k) * k**-0.5).bfloat16()}
        if weight_format == "int4":
            scale = torch.full((n, k // 128), k**-0.5 / 4, device="cuda", dtype=torch.bfloat16)
            return {"weight": integers(0, 256, (n, k // 2), torch.uint8), "weight_scale": scale}
        if weight_format == "int8":
            scale = torch.full((n,), k**-0.5 / 64, device="cuda")
            return {"weight": integers(-128, 128, (n, k), torch.int8), "weight_scale": scale}
        shape = (n,) if weight_format == "float8-channel" else (n // 128, k // 128)
        return {"weight": normal(n, k).to(torch.float8_e4m3fn), "weight_scale": torch.full(shape, k**-0.5).cuda()}

    def product(n, k, activation=None):
        return {"x": normal(rows, k).bfloat16(), **weights(n, k), "activation": activation}

    sizes = [(6144, 4096), (4096, 4096), (28672, 4096, "silu_and_mul"), (4096, 14336)]
    products = [product(*size) for _ in range(3) for size in sizes]

    def results():
        return [xg.linear(**arguments) for arguments in products]

    runs = [results() for _ in range(3)]
    expected = [torch.stack(same).median(0).values for same in zip(*runs, strict=True)]
    wrong = torch.zeros(len(products), dtype=torch.int64, device="cuda")
    for _ in range(100):
        differ = [(got != want).any() for got, want in zip(results(), expected, strict=True)]
        wrong += torch.stack(differ)
    assert wrong.sum() == 0, f"of each product's 100 results differ: {wrong.tolist()}"
