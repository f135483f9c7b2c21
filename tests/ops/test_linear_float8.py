"""linear with float8 weights: the sizes at which its kernel of sm_90a divides k and n differently; many launches."""

from __future__ import annotations

import pytest

from tests.common import baseline, cases, compare, reference

# n, k, activation: k in 1 to 8 parts, chunks of 128 in odd numbers or not filled, work tiles that n does not fill.
SIZES = [
    (144, 128, None),
    (176, 3984, None),
    (1024, 4096, None),
    (4096, 2688, None),
    (4880, 1424, None),
    (6144, 1152, None),
    (9232, 1536, None),
    (1056, 2064, "silu_and_mul"),
    (11008, 1280, "silu_and_mul"),
    (28672, 528, "gelu_and_mul"),
    (34832, 256, None),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, activation", SIZES)
@pytest.mark.parametrize("weight_format", ["float8-channel", "float8-tensor"])
@pytest.mark.frontends("eager-cuda")
def test_parts_of_k(frontend, n, k, activation, weight_format):
    """Against the reference, and each number of rows has the bits that 64 rows have."""
    features = n if activation is None else n // 2
    arrays = cases.linear_inputs(weight_format, 64, n, k, bias=True, residual=features)
    (whole,) = frontend.call("linear", arrays, activation=activation)
    for rows in (1, 8, 9, 17, 33):
        part = {**arrays, "x": arrays["x"][-rows:], "residual": arrays["residual"][-rows:]}
        (got,) = frontend.call("linear", part, activation=activation)
        compare.assert_bitwise_equal(got, whole[-rows:], f"{frontend.name}: the last {rows} rows")
        if rows == 8:
            (want,) = reference.linear(**part, activation=activation)
            compare.assert_close(got, want, baseline.linear(**part, activation=activation), f"{frontend.name}: linear")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 33, 48, 64])
def test_many_launches_have_the_same_bits(rows):
    """A decoder layer's products behind one another, 1200 of them: a load that is late or early shows now and then."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch with CUDA")
    import xla_gpu.torch as xg

    generator = torch.Generator("cuda").manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    def product(n, k, activation=None):
        return {
            "x": normal(rows, k).bfloat16(),
            "weight": normal(n, k).to(torch.float8_e4m3fn),
            "weight_scale": torch.full((n,), k**-0.5, device="cuda"),
            "activation": activation,
        }

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
