"""torch.compile(backend="xla_gpu"): functions of another device's tensors as XLA programs.

On the CPU, where tensors are copied in and out. tests/runtime/test_shared_buffers.py has the sharing of memory.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_xla")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

from tests.common import frontends, process  # noqa: E402 - after what may be missing

pytestmark = pytest.mark.skipif(
    frontends.ALL["torch_xla"].unavailable() is not None, reason="needs torch_xla on the CPU"
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def programs_compiled():
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def compiled(function):
    return torch.compile(function, backend="xla_gpu", fullgraph=True)


@torch.no_grad()
def test_a_module_is_one_program():
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    call, x = compiled(module), torch.randn(3, 8)
    before = programs_compiled()
    for _ in range(3):
        y = call(x)
        assert y.device.type == "cpu"
        torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)
    assert programs_compiled() == before + 1


@torch.no_grad()
def test_parameters_that_change_are_seen():
    module = torch.nn.Linear(4, 4)
    call, x = compiled(module), torch.randn(2, 4)
    for _ in range(3):
        torch.testing.assert_close(call(x), module(x), rtol=1e-4, atol=1e-4)
        module.weight.add_(1)


@pytest.mark.parametrize("function", [lambda x: x.sum(), lambda x: x + 1], ids=["scalar", "rows"])
def test_a_single_result_where_sizes_vary(function):
    call = torch.compile(function, backend="xla_gpu", dynamic=True)
    for size in (8, 12, 8):
        x = torch.arange(float(size))
        torch.testing.assert_close(call(x), function(x))


@torch.no_grad()
def test_arguments_that_change_get_their_values():
    def step(x, cache, index):
        cache.index_copy_(0, index, x[None])
        x.add_(1)
        return torch.arange(4, device=x.device) + x.sum().long(), cache.sum()

    ours, theirs = [(torch.ones(8), torch.zeros(5, 8), torch.tensor([2])) for _ in range(2)]
    call = compiled(step)
    for _ in range(2):
        for ours_out, theirs_out in zip(call(*ours), step(*theirs), strict=True):
            torch.testing.assert_close(ours_out, theirs_out)
        for ours_now, theirs_now in zip(ours, theirs, strict=True):
            torch.testing.assert_close(ours_now, theirs_now)


@torch.no_grad()
def test_operators_in_place():
    """Traced with another device's tensors, the operator that writes into memory runs as XLA's update."""
    key, value = torch.randn(2, 2, 1, 8)
    caches = [torch.zeros(4, 4, 2, 8) for _ in range(2)]
    slots = torch.tensor([1, 5], dtype=torch.int32)

    def step(cache):
        xg.reshape_and_cache_(key, value, cache, slots)
        return cache.sum()

    total = compiled(step)(caches[0])
    torch.testing.assert_close(total, step(caches[1]))
    assert torch.equal(caches[0], caches[1])


@torch.no_grad()
def test_views_and_other_types():
    x = torch.arange(24, dtype=torch.int32).reshape(4, 6).t()
    y, flag, none = compiled(lambda x: (x[1:] * 2, x > 3, None))(x)
    assert torch.equal(y, x[1:] * 2) and torch.equal(flag, x > 3) and none is None


@torch.no_grad()
def test_attention():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(compiled(attention)(q, k, v), attention(q, k, v), rtol=1e-4, atol=1e-4)


def test_inference_mode():
    module = torch.nn.Linear(4, 4)
    call, x = compiled(module), torch.randn(2, 4)
    with torch.inference_mode():
        torch.testing.assert_close(call(x), module(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(call(x), module(x), rtol=1e-4, atol=1e-4)


def test_training():
    """Gradients, optimizer steps, and the running statistics of a batch, as PyTorch computes them."""
    cpu, module = (
        torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.GELU()) for _ in range(2)
    )
    module.load_state_dict(cpu.state_dict())
    steps = [(call, torch.optim.SGD(each.parameters(), 0.1)) for each, call in ((cpu, cpu), (module, compiled(module)))]
    for _ in range(3):
        x = torch.randn(5, 8)
        for call, optimizer in steps:
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, cpu.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


@torch.no_grad()
def test_openxla_is_left_alone_without_a_gpu():
    from torch._dynamo.backends import registry

    assert registry.lookup_backend("openxla").__module__.startswith("torch.")
    assert registry.lookup_backend("xla_gpu").__module__.startswith("xla_gpu.")


def test_sharing_says_what_it_needs():
    import torch_xla

    with pytest.raises(TypeError, match="to_xla: tensor: expected a tensor, got int"):
        xg.to_xla(1)
    with pytest.raises(TypeError, match="to_xla: tensor: expected a dense tensor, got layout torch"):
        xg.to_xla(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="to_xla: tensor: expected one on CUDA or the CPU, got one on meta"):
        xg.to_xla(torch.empty(2, device="meta"))
    with pytest.raises(TypeError, match="to_cuda: tensor: expected an XLA tensor, got one on cpu"):
        xg.to_cuda(torch.ones(2))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="to_cuda: expected a PyTorch that sees a CUDA device"):
            xg.to_cuda(torch.ones(2).to(torch_xla.device()))
    assert xg.to_xla(torch.ones(2)).device.type == "xla"


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad])
def test_what_carries_an_address_is_not_read(mode):
    """torch_xla asks for a copy on the host, by operators that differ in these modes."""
    import torch_xla

    from xla_gpu._torch_xla import shared_memory

    x = torch.arange(4.0)
    with mode():
        carrier = shared_memory._Carrier(x)  # what only the package makes
        (tensor,) = torch_xla._XLAC._xla_tensors_from_aten([carrier], [str(torch_xla.device())])
    assert torch.equal(tensor.cpu(), x)


def test_device_memory_needs_a_gpu():
    """An address is never given to a client that would read it."""
    code = """
import torch, torch_xla
from xla_gpu._torch_xla import shared_memory
try:
    memory = shared_memory.Memory(0x1000, torch.Size([4]), torch.float32, None)
    shared_memory.import_memory([memory], torch_xla.device(), 0)
except Exception as error:
    print(type(error).__name__, error)
"""
    assert process.run(code) == (
        "CompatibilityError device memory can be shared with torch_xla on GPUs alone (PJRT_DEVICE=GPU)"
    )


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch was built without CUDA")
@pytest.mark.parametrize(("value", "module"), [("1", "xla_gpu."), ("0", "torch.")])
def test_openxla_takes_cuda_tensors_unless_told_not_to(value, module):
    """Decided at import, without starting CUDA: the process may fork before it uses a GPU."""
    code = """
import torch, xla_gpu.torch
from torch._dynamo.backends import registry
assert not torch.cuda.is_initialized()
print(registry.lookup_backend("openxla").__module__)
"""
    assert process.run(code, PJRT_DEVICE="GPU", XLA_GPU_OPENXLA_CUDA=value).startswith(module)
