"""CUDA tensors of PyTorch in torch_xla programs on the same GPU: torch.compile(backend="xla_gpu"), to_xla and to_cuda.

Needs a PyTorch with CUDA beside torch_xla, and PJRT_DEVICE=GPU. References are computed on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_xla")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

from tests.common import frontends  # noqa: E402 - after what may be missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(frontends.ALL["torch_xla-cuda"].unavailable() is not None, reason="needs torch_xla on a GPU"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a PyTorch with CUDA"),
]

BIG = 1 << 26  # elements: their fill takes longer than the host takes to start a program


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(function, backend="xla_gpu"):
    return torch.compile(function, backend=backend, fullgraph=True)


def programs_compiled():
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def shared():
    """Tensors taken over so far without a copy, and with one."""
    from xla_gpu._torch_xla import cuda_tensors

    return cuda_tensors.counts()


def kept():
    """Imports and exports that are alive, after all programs have ended."""
    import torch_xla

    from xla_gpu._runtime import library
    from xla_gpu._torch_xla import shared_memory

    gc.collect()
    torch_xla.sync(wait=True)
    torch.cuda.synchronize()
    return shared_memory.forget_released(), library.load().cdll.xla_gpu_export_count()


def test_there_and_back_at_one_address():
    before = kept()
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    taken = xg.to_xla(x)
    assert taken.device.type == "xla"
    back = xg.to_cuda(taken)
    assert back.data_ptr() == x.data_ptr() and torch.equal(back, x)
    result = xg.to_cuda(taken * 2)
    assert result.device == x.device and torch.equal(result.cpu(), x.cpu() * 2)
    del taken, back, result
    assert kept() == before


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    x = (torch.arange(77) % 5).to(dtype).cuda()
    assert torch.equal(xg.to_cuda(xg.to_xla(x).clone()).cpu(), x.cpu())


def test_strided_and_misaligned_tensors_are_copied():
    x = torch.arange(64, dtype=torch.float32, device="cuda")
    for view in (x[1:], x.view(8, 8).t(), x[::2]):
        before = shared()
        assert torch.equal(xg.to_cuda(xg.to_xla(view) + 0).cpu(), view.cpu())
        after = shared()
        assert (after.shared, after.copied) == (before.shared, before.copied + 1)
    before = shared()
    assert torch.equal(xg.to_cuda(xg.to_xla(x[4:]) + 0).cpu(), x[4:].cpu())
    assert shared().copied == before.copied
    assert xg.to_cuda(xg.to_xla(torch.empty(0, 3, device="cuda"))).shape == (0, 3)


@pytest.mark.parametrize("backend", ["xla_gpu", "openxla"])
def test_a_module_is_one_program_and_its_parameters_are_taken_once(backend):
    width = 16 if backend == "xla_gpu" else 24  # torch_xla keeps programs across functions
    cpu, module = (
        torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 4)) for _ in range(2)
    )
    module.load_state_dict(cpu.state_dict())
    module.cuda()
    call, x = compiled(module, backend), torch.randn(3, 8)
    before, programs = shared(), programs_compiled()
    for i in range(4):
        y = call(x.cuda() + i)
        assert y.device.type == "cuda"
        torch.testing.assert_close(y.cpu(), cpu(x + i), rtol=2e-3, atol=2e-3)
    assert programs_compiled() == programs + 1
    assert shared().shared + shared().copied == before.shared + before.copied + 4 + 4  # arguments, and parameters once


@pytest.mark.parametrize("own_stream", [False, True])
def test_programs_wait_for_the_stream_and_the_stream_for_them(own_stream):
    """Without the host: a slow write, a program, an operation on its result, a write over the argument."""
    call = compiled(lambda x: x * 2 + 1)
    x = torch.zeros(BIG, device="cuda")
    call(x)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sums = []
        for i in range(8):
            torch.cuda._sleep(20_000_000)  # about 10 ms, in front of the write
            x.fill_(i)
            y = call(x)
            x.fill_(-1000)
            z = y + 1
            y.fill_(-1)  # the result's memory is PyTorch's to write now
            sums.append((z.min(), z.max()))
    stream.synchronize()
    assert [tuple(map(float, pair)) for pair in sums] == [(2 * i + 2, 2 * i + 2) for i in range(8)]


def test_memory_is_not_reused_while_a_program_reads_it():
    """PyTorch's allocator hands the argument's memory out again as soon as the tensor is gone."""
    call = compiled(lambda x: (x.view(64, -1) * 3).sum(1))
    totals = []
    for i in range(8):
        x = torch.full((BIG,), float(i), device="cuda")
        totals.append(call(x))
        del x
        torch.full((BIG,), 1e9, device="cuda")
    for i, total in enumerate(totals):
        assert (total == 3.0 * i * BIG / 64).all(), i


def test_results_outlive_their_program():
    before = kept()
    call = compiled(lambda x: x + 1)
    results = [call(torch.full((1024,), float(i), device="cuda")) for i in range(16)]
    del call
    torch._dynamo.reset()
    gc.collect()
    for i, result in enumerate(results):
        assert (result == i + 1).all()
    assert kept()[1] == before[1] + 16
    del result, results
    assert kept() == before


def test_arguments_that_change_get_their_values():
    def step(x, cache, index):
        cache.index_copy_(0, index, x[None])
        x.add_(1)
        return torch.arange(4, device=x.device) + x.sum().long(), cache.sum()

    theirs = (torch.ones(8), torch.zeros(5, 8), torch.tensor([2]))
    ours = tuple(x.cuda() for x in theirs)
    addresses = [x.data_ptr() for x in ours]
    call = compiled(step)
    for _ in range(3):
        for mine, other in zip(call(*ours), step(*theirs), strict=True):
            torch.testing.assert_close(mine.cpu(), other)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.cpu(), other)
    assert addresses == [x.data_ptr() for x in ours]


def test_other_memory_in_each_call():
    """Arguments of one shape at addresses that change, come back, and are each other's."""
    call = compiled(lambda x, y, z: x - 2 * y + 4 * z)
    tensors = [torch.full((100,), float(i), device="cuda") for i in range(6)]
    for x, y, z in [(0, 1, 2), (3, 4, 5), (2, 1, 0), (0, 1, 2), (5, 1, 4)]:
        assert torch.equal(call(tensors[x], tensors[y], tensors[z]).cpu(), torch.full((100,), float(x - 2 * y + 4 * z)))
    x = tensors[5]
    assert torch.equal(compiled(lambda x, y: x * y)(x, x.view(10, 10).view(100)).cpu(), torch.full((100,), 25.0))


@torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=False)  # they need a C++ compiler and PyTorch's headers
def test_sizes_that_vary():
    call = torch.compile(lambda x: (x + 1, x.sum()), backend="xla_gpu", dynamic=True)
    for size in (8, 12, 8, 20, 12):
        x = torch.arange(float(size), device="cuda")
        y, total = call(x)
        assert torch.equal(y, x + 1) and float(total) == size * (size - 1) / 2


def test_arguments_that_are_returned():
    x, y = torch.ones(4, device="cuda"), torch.arange(6.0, device="cuda")[::2]
    same, other, doubled = compiled(lambda x, y: (x, y, y * 2))(x, y)
    assert same.data_ptr() == x.data_ptr() and torch.equal(other, y) and torch.equal(doubled, y * 2)


def test_results_are_on_the_device_that_pytorch_has_them_on():
    x = torch.ones(4, device="cuda")
    on_gpu, on_cpu = compiled(lambda x, scalar: (x * scalar, (x * 2).cpu() + 1))(x, torch.tensor(3.0))
    assert on_gpu.is_cuda and on_cpu.device.type == "cpu" and on_gpu.tolist() == on_cpu.tolist() == [3.0] * 4
    made = compiled(lambda n: torch.arange(n, device="cuda") * 2)(5)
    assert made.is_cuda and made.tolist() == [0, 2, 4, 6, 8]
    moved = compiled(lambda x: x.to("cuda") + 1)(torch.ones(4))
    assert moved.is_cuda and moved.tolist() == [2.0] * 4


def test_parameters_that_change_are_seen():
    """Also by .data, which counts no version, and where the parameter is strided."""
    module = torch.nn.Conv2d(4, 4, 3).cuda().to(memory_format=torch.channels_last)
    call, x = compiled(module), torch.randn(2, 4, 5, 5, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(call(x), module(x), rtol=3e-2, atol=3e-2)  # TF32
        module.weight.data.add_(1)
        module.bias.data.add_(1)


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x * self.weight


def test_a_parameter_whose_memory_gets_other_strides():
    module = Weighted().cuda()
    call, x = compiled(module), torch.randn(8, 8, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(call(x).cpu(), x.cpu() * module.weight.cpu(), rtol=0, atol=0)
        module.weight.data = module.weight.data.t()


def test_a_program_of_parameters_alone_waits_for_the_stream():
    weight = torch.nn.Parameter(torch.zeros(BIG, device="cuda"))
    call = compiled(lambda: weight + 1)
    call()
    for i in range(3):
        torch.cuda._sleep(20_000_000)
        weight.data.fill_(i)
        y = call()
        weight.data.fill_(-1000)
        assert float(y.min()) == float(y.max()) == i + 1


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cuda", torch.bfloat16)])
def test_modes(mode):
    module, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    expected = module(x)
    call = compiled(module.cuda())
    with mode():
        y = call(x.cuda())
        back = xg.to_cuda(xg.to_xla(x.cuda()))
    torch.testing.assert_close(y.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(back.cpu(), x)
    torch.testing.assert_close(call(x.cuda()).cpu(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_is_refused():
    call, x = compiled(lambda x: x * 2), torch.ones(4, device="cuda")
    call(x)
    on_xla = xg.to_xla(x)
    for refused in (lambda: call(x), lambda: xg.to_xla(x), lambda: xg.to_cuda(on_xla)):
        with (
            pytest.raises(RuntimeError, match="expected no capture of a CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            refused()
        torch.cuda.synchronize()
    assert call(x).tolist() == [2.0] * 4


def test_an_operator_that_pytorch_computes():
    """XLA has no lowering of it: torch_xla reads its operand back, which is this call's."""
    call = compiled(lambda x: torch.special.bessel_j0(x + 1) * 2)
    for shift in (0.0, 1.0, 2.0):
        x = torch.arange(5.0) + shift
        torch.testing.assert_close(call(x.cuda()).cpu(), torch.special.bessel_j0(x + 1) * 2)
    call = compiled(lambda x: torch.special.bessel_j0(x) * 2)
    for shift in (0.0, 1.0, 2.0):
        x = torch.arange(5.0) + shift
        torch.testing.assert_close(call(x.cuda()).cpu(), torch.special.bessel_j0(x) * 2)


def test_memory_of_earlier_calls_is_let_go_of():
    call = compiled(lambda x: x.sum())
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        call(torch.zeros(BIG // 4, device="cuda"))
    assert torch.cuda.memory_allocated() - before < BIG


def test_threads():
    """Two threads call one function, each on a stream of its own."""
    call = compiled(lambda x, y: x * 2 + y)
    call(torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda"))
    wrong = []

    def work(number):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for i in range(40):
                x = torch.full((1000,), float(number * 100 + i), device="cuda")
                if not (call(x, x.clone()) == 3 * (number * 100 + i)).all():
                    wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_decode_step_with_a_cache_of_pytorch():
    """The library's operators and a user's kernel, in one program over PyTorch's memory."""
    kernel = xg.cuda_kernel('extern "C" __global__ void twice(const float* x, float* y) { *y = 2 * *x; }', "twice")
    twice = xg.kernel_call(kernel, torch.empty(1, device="meta"), grid=1, block=1)
    key, value = torch.randn(2, 2, 1, 64, device="cuda")
    slots = torch.tensor([1, 5], dtype=torch.int32, device="cuda")

    def step(cache, x):
        xg.reshape_and_cache_(key, value, cache, slots)
        return cache.abs().sum(), twice(x)

    ours, theirs = torch.zeros(2, 4, 4, 2, 64, device="cuda")[:, :, :, :, :].unbind(0)
    x = torch.tensor([3.0], device="cuda")
    total, doubled = compiled(step)(ours, x)
    xg.reshape_and_cache_(key, value, theirs, slots)  # eagerly
    torch.testing.assert_close(total.cpu(), theirs.cpu().abs().sum())
    assert torch.equal(ours.cpu(), theirs.cpu()) and float(doubled) == 6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_first():
    x = torch.arange(8.0, device="cuda:1")
    y = xg.to_cuda(xg.to_xla(x) * 2)
    assert y.device == x.device and torch.equal(y.cpu(), x.cpu() * 2)
    with pytest.raises(Exception, match=r"expected tensors on cuda:0, torch_xla's device in this process, got cuda:1"):
        compiled(lambda x: x * 2)(x)


def test_an_error_of_a_handler_is_raised_by_the_call():
    import torch_xla

    source = 'extern "C" __global__ void twice(const float* x, float* y) { *y = 2 * *x; }'
    like = torch.empty(1, device="meta")
    wrong, right = (
        xg.kernel_call(xg.cuda_kernel(source, "twice", arch=arch), like, grid=1, block=1) for arch in ("sm_120a", None)
    )
    x = torch.tensor([3.0], device="cuda")
    with pytest.raises(RuntimeError, match="kernel_call: twice: cubin: expected code for GPU 0"):
        compiled(lambda x: wrong(x) + 1)(x)
    with contextlib.suppress(RuntimeError):  # torch_xla raises it once more
        torch_xla.sync(wait=True)
    assert float(compiled(lambda x: right(x) + 2)(x)) == 8


def test_environment_variable_leaves_openxla_alone():
    from torch._dynamo.backends import registry

    mine = os.environ.get("XLA_GPU_OPENXLA_CUDA", "1") != "0"
    assert registry.lookup_backend("openxla").__module__.startswith("xla_gpu." if mine else "torch.")
