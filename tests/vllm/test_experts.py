"""Experts and their routing, beside float64's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch_xla
import torch_xla.backends


@pytest.fixture(scope="module", autouse=True)
def float32_products():
    """On a GPU XLA would multiply float32 matrices in TF32, which the worker does not let it do either."""
    torch_xla.backends.set_mat_mul_precision("highest")


# A few rows by their experts' weights, more through all experts, many in blocks: of 32 rows, or all to few experts.
@pytest.mark.parametrize(
    ("rows", "block", "skew"), [(1, None, 0), (3, None, 0), (700, None, 0), (700, 32, 0), (600, 512, 9)]
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts(rows, block, skew, renormalize, monkeypatch):
    """Rows through their own experts alone, whatever the others hold."""
    from xla_gpu.vllm import expert_products, routing
    from xla_gpu.vllm.expert_matrices import Matrices

    monkeypatch.setattr(expert_products, "block_size", lambda *_: block)
    monkeypatch.setattr(expert_products, "_GATHERED_BYTES", 20_000)  # of weights: some blocks at a time
    torch.manual_seed(0)
    num_experts, top_k, hidden, intermediate = 8, 2, 16, 24
    x = torch.randn(rows, hidden)
    w13, w2 = torch.randn(num_experts, 2 * intermediate, hidden), torch.randn(num_experts, hidden, intermediate)
    router = torch.randn(rows, num_experts)
    router[:, 5] = -1e9
    router[:, 2] += skew
    w2[5] = float("inf")  # an expert that no row is sent to
    weights, chosen = routing.softmax(router, top_k, renormalize)
    expected = torch.zeros_like(x, dtype=torch.float64)
    probabilities = router.double().softmax(-1)
    for row in range(rows):
        best = probabilities[row].topk(top_k)
        scale = best.values.sum() if renormalize else 1.0
        for probability, expert in zip(best.values, best.indices, strict=True):
            gate, up = (w13[expert].double() @ x[row].double()).chunk(2)
            expected[row] += probability / scale * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    device = torch_xla.device()
    x, w13, w2, weights, chosen = (tensor.to(device) for tensor in (x, w13, w2, weights, chosen))
    got = expert_products.weighted_sum(x, Matrices(w13), Matrices(w2), weights, chosen, "silu").cpu()
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_routing(scoring, groups, top_groups, bias):
    """Row by row, as DeepSeek's paper has it; a layer of vLLM says which."""
    from xla_gpu.vllm import routing

    torch.manual_seed(0)
    rows, num_experts, top_k, scale = 40, 16, 3, 2.5
    router, added = torch.randn(rows, num_experts), torch.randn(num_experts) * 0.2
    layer = SimpleNamespace(
        custom_routing_function=None,
        e_score_correction_bias=added.to(torch_xla.device()) if bias else None,
        scoring_func=scoring,
        routed_scaling_factor=scale,
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=top_groups,
        top_k=top_k,
        renormalize=True,
    )
    device = router.to(torch_xla.device())
    weights, chosen = (found.cpu() for found in routing.of_layer(layer, device, device))
    for row in range(rows):
        scores = router[row].sigmoid() if scoring == "sigmoid" else router[row].softmax(-1)
        order = scores + added if bias else scores.clone()
        of_group = [sorted(group.tolist())[-2 if bias else -1 :] for group in order.chunk(groups)]
        best = sorted(range(groups), key=lambda group, of_group=of_group: -sum(of_group[group]))[:top_groups]
        size = num_experts // groups
        allowed = [expert for expert in range(num_experts) if expert // size in best]
        expected = sorted(allowed, key=lambda expert, order=order: -order[expert].item())[:top_k]
        assert sorted(chosen[row].tolist()) == sorted(expected)
        total = sum(scores[expert] for expert in expected)
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            torch.testing.assert_close(weight, scale * scores[expert] / total)


def test_routing_of_a_models_own():
    from xla_gpu.vllm import routing

    def route(hidden_states, gating_output, topk, renormalize):
        assert (topk, renormalize) == (2, False)
        return gating_output[:, :2].double(), hidden_states[:, :2].to(torch.int32)

    layer = SimpleNamespace(custom_routing_function=route, top_k=2, renormalize=False)
    x, router = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    weights, chosen = routing.of_layer(layer, x, router)
    assert weights.dtype == torch.float32 and weights.tolist() == [[0.5, 0.25]] and chosen.tolist() == [[3, 1]]
    assert chosen.dtype == torch.int64


@pytest.mark.parametrize("form", ["float8", "float8-block", "int8", "int4"])
@pytest.mark.parametrize(("rows", "block"), [(1, None), (24, None), (24, 4)])
def test_quantised_experts(rows, block, form, monkeypatch):
    """As with the weights that the stored ones mean, in each of the three ways."""
    from xla_gpu import quantization
    from xla_gpu.vllm import expert_products, routing
    from xla_gpu.vllm.expert_matrices import Matrices

    monkeypatch.setattr(expert_products, "block_size", lambda *_: block)
    torch.manual_seed(0)
    num_experts, hidden, intermediate, device = 4, 256, 128, torch_xla.device()
    x, router = torch.randn(rows, hidden).to(device), torch.randn(rows, num_experts).to(device)
    stored, meant = [], []
    for n, k in ((2 * intermediate, hidden), (hidden, intermediate)):
        made = [quantization.quantize(torch.randn(n, k) / 16, form.removesuffix("-block")) for _ in range(num_experts)]
        if form == "float8-block":
            made = [one._replace(weight_scale=torch.rand(n // 128, k // 128)) for one in made]
        meant.append(Matrices(torch.stack([quantization.dequantize(one) for one in made]).to(device)))
        bits = torch.stack([one.weight.view(torch.uint8) for one in made]).view(made[0].weight.dtype)
        stored.append(Matrices(bits.to(device), torch.stack([one.weight_scale for one in made]).to(device)))
    weights, chosen = routing.softmax(router, 2, True)
    outs = [expert_products.weighted_sum(x, *of, weights, chosen, "silu").cpu() for of in (stored, meant)]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["plain", "float8", "float8-block", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_experts(form, dtype, bias, monkeypatch):
    """In 16 bits: as in float32 with the weights that are meant; rows are ordered in both ways."""
    from xla_gpu import quantization
    from xla_gpu.ops import experts_mlp
    from xla_gpu.vllm import expert_products, mxfp4, routing
    from xla_gpu.vllm.expert_matrices import Matrices

    monkeypatch.setattr(experts_mlp, "COMPARED_PAIRS", 100)
    torch.manual_seed(0)
    num_experts, hidden, intermediate, device = 4, 256, 128, torch_xla.device()
    x, router = torch.randn(128, hidden).to(dtype), torch.randn(128, num_experts)
    x, router = x.to(device), router.to(device)
    stored, meant = [], []
    for n, k in ((2 * intermediate, hidden), (hidden, intermediate)):
        added = torch.randn(num_experts, n).to(dtype) if bias else None
        if form == "plain":
            parts = [(torch.randn(num_experts, n, k) / 16).to(dtype), None]
            means = parts[0]
        elif form == "mxfp4":
            scale = torch.randint(120, 123, (num_experts, n, k // 32), dtype=torch.uint8)
            parts = [torch.randint(0, 256, (num_experts, n, k // 2), dtype=torch.uint8), scale]
            means = mxfp4.dequantized(torch.float32, *parts)
        else:
            wide = [(torch.randn(n, k) / 16).to(dtype) for _ in range(num_experts)]
            made = [quantization.quantize(one, form.removesuffix("-block")) for one in wide]
            if form == "float8-block":
                made = [one._replace(weight_scale=torch.rand(n // 128, k // 128) / 128) for one in made]
            bits = torch.stack([one.weight.view(torch.uint8) for one in made]).view(made[0].weight.dtype)
            parts = [bits, torch.stack([one.weight_scale for one in made])]
            means = torch.stack([quantization.dequantize(one) for one in made])
        given = [None if part is None else part.to(device) for part in (*parts, None, added)]
        stored.append(Matrices(*given))
        meant.append(Matrices(means.float().to(device), bias=None if added is None else added.float().to(device)))
    weights, chosen = routing.softmax(router, 2, True)

    def run(rows, of, x):
        return expert_products.weighted_sum(x[:rows], *of, weights[:rows], chosen[:rows], "silu").cpu()

    whole, expected = run(128, stored, x), run(128, meant, x.float())
    assert ((whole.float() - expected).norm() < 1e-2 * expected.norm()).item()
    torch.testing.assert_close(whole.float(), expected, rtol=0, atol=3e-2 * expected.abs().max().item())
    for rows in (1, 24):
        # XLA's operations between the products may round otherwise in another fusion.
        part, scale = run(rows, stored, x).float(), expected.abs().max().item()
        torch.testing.assert_close(part, whole[:rows].float(), rtol=0, atol=1e-2 * scale)
    called = []
    monkeypatch.setattr(expert_products, "_by_groups", lambda *operands: called.append(operands) or operands[0])
    run(128, stored, x)
    assert len(called) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "block", "dtype", "sizes"),
    [
        (1, None, torch.float32, (16, 24)),  # by their experts' weights
        (24, None, torch.float32, (16, 24)),  # through all
        (24, 4, torch.float32, (16, 24)),  # in blocks
        (24, None, torch.bfloat16, (32, 48)),  # by groups
    ],
)
def test_experts_of_several_devices(rows, block, dtype, sizes, bias, monkeypatch):
    """The sum of what each device adds, whatever its experts hold that no row is sent to."""
    from xla_gpu.vllm import expert_products, routing
    from xla_gpu.vllm.expert_matrices import Matrices

    monkeypatch.setattr(expert_products, "block_size", lambda *_: block)
    torch.manual_seed(0)
    num_experts, devices, device, (hidden, width) = 12, 3, torch_xla.device(), sizes
    own = num_experts // devices
    x, w13 = torch.randn(rows, hidden).to(dtype), torch.randn(num_experts, 2 * width, hidden).to(dtype)
    w2, added = torch.randn(num_experts, hidden, width).to(dtype), torch.randn(num_experts, 2 * width).to(dtype)
    router = torch.randn(rows, num_experts)
    router[:, own - 1 :: own] = -1e9  # the last one of each device
    w2[own - 1 :: own] = float("inf")
    weights, chosen = routing.softmax(router, 2, True)

    def run(dtype, begin, end, of):
        part = [tensor[begin:end].to(dtype).to(device) for tensor in (w13, w2, added)]
        matrices = Matrices(part[0], bias=part[2] if bias else None), Matrices(part[1])
        others = (weights.to(device), of.to(device), "silu", end - begin < num_experts)
        return expert_products.weighted_sum(x.to(dtype).to(device), *matrices, *others).float().cpu()

    total = torch.zeros(rows, hidden)
    for begin in range(0, num_experts, own):
        local = expert_products.local_experts(chosen, torch.tensor([begin]), own)
        assert local[(chosen >= begin) & (chosen < begin + own)].lt(own).all() and local.max() <= own
        part = run(dtype, begin, begin + own, local)
        without = (local == own).all(1)
        assert (part[without] == 0).all() and part.isfinite().all()
        total += part
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    expected = run(torch.float32, 0, num_experts, chosen)
    torch.testing.assert_close(total, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def test_experts_that_groups_do_not_take():
    """float32, sizes that are no multiple of 16, and int4 whose scales have another dtype than the rows."""
    from xla_gpu.vllm.expert_matrices import Matrices

    def takes(weight, dtype, scale=None):
        return Matrices(weight, scale).takes_groups(dtype)

    plain, packed = torch.zeros(2, 32, 64, dtype=torch.bfloat16), torch.zeros(2, 32, 64, dtype=torch.uint8)
    groups = torch.zeros(2, 32, 1, dtype=torch.bfloat16)
    assert takes(plain, torch.bfloat16) and takes(packed, torch.bfloat16, groups)
    assert takes(packed, torch.float16, torch.zeros(2, 32, 4, dtype=torch.uint8))
    assert not takes(plain.float(), torch.float32) and not takes(plain, torch.float16)
    assert not takes(plain[:, :24], torch.bfloat16) and not takes(plain[..., :40], torch.bfloat16)
    assert not takes(packed, torch.float16, groups) and not takes(packed[..., :40], torch.bfloat16, groups)


def test_blocks_of_experts():
    """Where they are used; and that a step's memory is counted."""
    from xla_gpu.vllm import expert_products

    assert [expert_products.block_size(rows, 8, 128) for rows in (32, 512, 2048, 8192)] == [None, None, 256, 512]
    assert [expert_products.block_size(rows, 2, 8) for rows in (512, 2048, 8192)] == [None, None, 1024]
    # 8 pairs spread over 3 experts as 1, 1 and 6 take 4 blocks of 4; the bound is one more.
    assert expert_products.num_blocks(8, 3, 4) == 5 and expert_products.num_blocks(2, 3, 4) == 2
    assert expert_products.elements_of_step(8192, 8, 128, 2048, 768, 2) * 2 > 256 * 512 * 2048 * 2 + (1 << 30)


def test_memory_of_a_step():
    """Steps by groups have rows of the pairs alone: no weights that are gathered or dequantised, nothing of others."""
    from xla_gpu.vllm.expert_products import elements_of_step, goes_by_groups

    sizes = 4, 128, 2880, 2880, 2  # of gpt-oss
    matrices = 3 * 2880 * 2880
    assert goes_by_groups(8192, 4, 128) and not goes_by_groups(8193, 4, 128)
    for rows in (1, 31, 512, 8192):
        pairs = rows * 4
        assert pairs * 2 * 2880 <= elements_of_step(rows, *sizes, True, True) == pairs * 6 * 2880
        assert elements_of_step(rows, *sizes, True) > elements_of_step(rows, *sizes, True, True)
    assert elements_of_step(8193, *sizes, True, True) == elements_of_step(8193, *sizes, True)
    assert elements_of_step(8193, *sizes, True, True, True) == 8193 * 4 * 6 * 2880  # over devices by groups, always
    assert elements_of_step(31, *sizes) > 31 * 4 * matrices  # each row's own weights
    assert elements_of_step(512, *sizes, True) > 128 * matrices > elements_of_step(512, *sizes)
