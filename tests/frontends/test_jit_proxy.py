"""Programs of xla_gpu.torch.jit that torch_xla executes by a proxy: what else has their tensors' memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")

import torch_xla.core.xla_model as xm  # noqa: E402

import xla_gpu.torch as xg  # noqa: E402
from tests.frontends.xla_tensors import on_device  # noqa: E402
from xla_gpu._torch_xla import lowering, proxy_programs  # noqa: E402
from xla_gpu._torch_xla.proxy_programs import ProxyProgram  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.delenv("XLA_GPU_JIT_PROXIES", raising=False)
    monkeypatch.setattr(proxy_programs, "CAPTURED", 0)
    if lowering.platform() != "CUDA":
        pytest.skip("proxies are on GPUs alone (PJRT_DEVICE=GPU)")


@pytest.fixture
def proxied(monkeypatch):
    """The calls that went through a proxy."""
    calls = []
    run = ProxyProgram.run

    def counted(self, given):
        results = run(self, given)
        if self._handle.value is not None:
            calls.append(self)
        return results

    monkeypatch.setattr(ProxyProgram, "run", counted)
    return calls


def add_in_place(x, caches):
    for cache in caches:
        cache.add_(x)
    return caches[0].sum(), caches


def stepping(**options):
    return xg.jit(add_in_place, donate_argnums=1, **options)


def values(tensor):
    return tensor.cpu().tolist()


def test_calls_behind_the_first_are_a_proxys(proxied):
    step = stepping()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    given = list(caches)
    for number in range(1, 6):
        total, returned = step(torch.tensor([1.0, 2.0]), caches)
        assert all(a is b for a, b in zip(returned, given, strict=True))
        assert total.item() == 3 * number
        assert values(caches[0]) == [number, 2 * number] and values(caches[1]) == [5 + number, 5 + 2 * number]
    assert len(proxied) == 4
    assert (caches[0] + caches[1]).tolist() == [15, 25]
    assert step(torch.tensor([1.0, 2.0]), caches)[0].item() == 18


def test_uploads_between_calls_keep_the_proxy(proxied):
    step = stepping()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    for number in range(1, 6):
        x = torch.tensor([1.0, 2.0]).to(torch_xla.device())
        assert step(x, caches)[0].item() == 3 * number
    assert len(proxied) == 4


def test_a_chain_that_nobody_waits_for(proxied):
    step = stepping()
    caches = on_device([0.0] * 1000, [5.0] * 1000)
    totals = [step(torch.ones(1000), caches)[0] for _ in range(50)]
    assert [total.item() for total in totals] == [1000.0 * number for number in range(1, 51)]
    assert values(caches[1]) == [55.0] * 1000 and len(proxied) == 49


COPIES = {
    "clone": lambda cache, other: cache.clone(),
    "copy_": lambda cache, other: other.copy_(cache),
    "computed": lambda cache, other: cache + 0,
    "view": lambda cache, other: cache[0:2] * 1,
    "deepcopy": lambda cache, other: __import__("copy").deepcopy(cache),
    "cast": lambda cache, other: cache.to(torch.bfloat16),
    "cast beside a transfer": lambda cache, other: [torch.ones(1).to(cache.device), cache.to(torch.bfloat16)][1],
    "part": lambda cache, other: other[0:2].copy_(cache),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("computed", [False, True])
def test_what_was_copied_before_a_call_never_has_later_values(way, computed, proxied):
    """A copy that is pending has torch_xla's buffer: it is right, or it is refused since that was donated."""
    step = stepping()
    x = torch.tensor([1.0, 2.0])
    caches, other = on_device([0.0, 0.0], [5.0, 5.0]), on_device([9.0, 9.0])
    for number in range(1, 4):
        step(x, caches)
        copied = COPIES[way](caches[0], other)
        if computed:
            torch_xla.sync()
        assert step(x, caches)[0].item() == 3 * 2 * number
        try:
            got = copied.tolist()
        except RuntimeError:  # as through torch_xla, which says so once more
            del copied, other
            with contextlib.suppress(RuntimeError):
                torch_xla.sync()
            other = on_device([9.0, 9.0])
        else:
            assert got == [2 * number - 1, 2 * (2 * number - 1)]
        assert values(caches[0]) == [2 * number, 4 * number]
    for _ in range(2):
        step(x, caches)
    assert values(caches[0]) == [8, 16] and proxied


def test_programs_of_torch_xla_between_calls(proxied):
    step = stepping()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    x = torch.tensor([1.0, 2.0])
    for number in range(1, 5):
        assert step(x, caches)[0].item() == 6 * number - 3
        doubled = caches[0] * 2
        torch_xla.sync()
        assert step(x, caches)[0].item() == 6 * number
        assert doubled.tolist() == [2 * (2 * number - 1), 4 * (2 * number - 1)]
    caches[0].zero_()
    assert step(x, caches)[0].item() == 3
    assert step(x, caches)[0].item() == 6


def test_two_programs_share_caches(proxied):
    step, other = (
        stepping(),
        xg.jit(lambda x, caches: (add_in_place(x * 10, caches)[0], caches[1].sum()), donate_argnums=1),
    )
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    x = torch.tensor([1.0, 2.0])
    for number in range(1, 5):
        assert step(x, caches)[0].item() == 33 * number - 30
        first, second = other(x, caches)
        assert first.item() == 33 * number and second.item() == 10 + 33 * number
    assert len(proxied) >= 4


def test_programs_without_a_proxy_share_caches(proxied):
    """One that returns nothing, and one that updates what is not donated."""
    step, count = stepping(), on_device([0.0])
    store = xg.jit(lambda x, caches: add_in_place(x, caches) is None, donate_argnums=1)
    make = xg.jit(lambda x, count: (count.add_(1), [x * 0, x * 0 + 5])[1])
    x, caches = on_device([1.0, 2.0]), on_device([0.0, 0.0], [5.0, 5.0])
    for number in range(1, 5):
        assert step(x, caches)[0].item() == 6 * number - 3
        store(x, caches)
        assert values(caches[0]) == [2 * number, 4 * number]
    for _ in range(3):
        made = make(x, count)
        assert [step(x, made)[0].item() for _ in range(3)] == [3, 6, 9]
    assert proxied


def test_equal_programs_have_their_own_captured_tensors(proxied):
    weights = on_device([1.0, 1.0], [3.0, 3.0])
    steps = [xg.jit(lambda x, weight=weight: (x * weight).sum()) for weight in weights]
    for _ in range(3):
        assert [step(torch.tensor([1.0, 2.0])).item() for step in steps] == [3, 9]
    assert len(proxied) == 4
    del steps[0]
    gc.collect()
    assert steps[0](torch.tensor([1.0, 2.0])).item() == 9


def test_functional_donation_and_results_as_arguments(proxied):
    step = xg.jit(lambda x, caches: (x.sum(), [cache + x for cache in caches]), donate_argnums=1)
    caches = on_device([1.0, 1.0], [2.0, 2.0])
    for number in range(1, 5):
        given = caches
        total, caches = step(torch.tensor([1.0, 3.0]), given)
        assert total.item() == 4 and values(caches[1]) == [2 + number, 2 + 3 * number]
        for cache in given:
            with pytest.raises(RuntimeError):
                cache.cpu()
    assert len(proxied) == 3
    assert stepping()(torch.zeros(2), caches)[0].item() == 18


def test_pending_and_aliased_arguments(proxied):
    step = stepping()
    x, caches = on_device([1.0, 2.0]), on_device([0.0, 0.0], [5.0, 5.0])
    alias = caches[0].detach()
    for number in range(1, 5):
        assert step(x * 1, caches)[0].item() == 3 * number
    for number in range(5, 8):
        assert step(x, caches)[0].item() == 3 * number
    del alias
    with pytest.raises(ValueError, match="each tensor once"):
        step(x, [caches[0], caches[0]])
    twin = caches[0].detach()
    with pytest.raises(RuntimeError):  # one buffer in two places
        step(x, [caches[0], twin])[0].item()
        xm.wait_device_ops()


def test_results_that_are_let_go_of_at_once(proxied):
    step = stepping()
    caches = on_device([0.0] * 4096, [5.0] * 4096)
    for _ in range(20):
        step(torch.ones(4096), caches)
    first = weakref.ref(caches[0])
    kept = caches[1]
    del caches
    gc.collect()
    assert first() is None and values(kept)[:2] == [25, 25]
    step.clear_cache()
    assert step(torch.ones(4096), on_device([0.0] * 4096, [1.0] * 4096))[0].item() == 4096


def test_a_function_is_let_go_of_while_its_program_runs(proxied):
    weight = torch.ones(2048, 2048)

    def make():
        on = weight.to(torch_xla.device())
        torch_xla.sync()
        return xg.jit(lambda x: x @ on @ on @ on)

    for _ in range(3):
        step = make()
        results = [step(torch.ones(4, 2048)) for _ in range(5)]
        del step
        gc.collect()
        assert all(result[0, 0].item() == 2048.0**3 for result in results)


def test_errors_on_the_device_are_reported(proxied):
    def scatter(keys, cache, slots):
        xg.reshape_and_cache_(keys, keys, cache, slots)
        return cache.sum()

    with pytest.raises(Exception, match="reshape_and_cache"):  # a wrong shape, at the trace
        xg.jit(scatter, donate_argnums=1)(
            torch.ones(1, 2, 8), torch.ones(3, 4, 2, 8).to(torch_xla.device()), torch.ones(3)
        )
    step = stepping()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    for _ in range(3):
        step(torch.ones(2), caches)
    gone = xg.jit(lambda x, caches: [cache * x for cache in caches], donate_argnums=1)
    gone(torch.ones(2), caches)
    with pytest.raises(RuntimeError):
        step(torch.ones(2), caches)[0].item()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    assert [step(torch.ones(2), caches)[0].item() for _ in range(3)] == [2, 4, 6]


def test_threads(proxied):
    failed = []
    torch_xla.device()  # one thread starts the client

    def serve(number):
        try:
            step = stepping()
            device = torch_xla.device()
            caches = [torch.full((64,), float(i)).to(device) for i in range(3)]
            for count in range(1, 30):
                total = step(torch.full((64,), float(number)), caches)[0].item()
                assert total == 64.0 * number * count, (number, count, total)
        except Exception as error:  # reported by the main thread
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_shared_with_pytorch(proxied):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch without CUDA")
    step = stepping()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    for number in range(1, 5):
        step(torch.tensor([1.0, 2.0]), caches)
        shared = xg.to_cuda(caches[0])
        assert shared.tolist() == [number, 2 * number]
        del shared
        torch.cuda.synchronize()
    assert step(torch.tensor([1.0, 2.0]), caches)[0].item() == 15


def test_without_proxies(proxied, monkeypatch):
    monkeypatch.setenv("XLA_GPU_JIT_PROXIES", "0")
    step = stepping()
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    assert [step(torch.ones(2), caches)[0].item() for _ in range(3)] == [2, 4, 6]
    assert not proxied


def test_captured_tensors(proxied, monkeypatch):
    monkeypatch.undo()
    weights = on_device(*([float(number)] * 4 for number in range(20)))
    step = xg.jit(lambda x, cache: (cache.add_(x + sum(weights)).sum(), x * weights[3]), donate_argnums=1)
    cache = on_device([0.0] * 4)
    for number in range(1, 6):
        total, scaled = step(torch.ones(4), cache)
        assert total.item() == number * 4 * 191 and values(scaled) == [3.0] * 4
    assert values(cache) == [5 * 191.0] * 4
    del weights[:]
    gc.collect()
    assert step(torch.ones(4), cache)[0].item() == 6 * 4 * 191


def test_results_of_failed_executions_have_its_error():
    """They would end the process in torch_xla, which leaves them without a buffer."""
    step = stepping()
    x, caches = on_device([1.0, 2.0]), on_device([0.0, 0.0], [5.0, 5.0])
    for _ in range(3):
        step(x, caches)
    twin = caches[0].detach()
    total, _ = step(x, [caches[0], twin])  # one buffer in two places
    torch_xla.sync()
    computed, other = total + 1, on_device([3.0])
    torch_xla.sync()
    xm.wait_device_ops()
    for tensor in (total, computed, caches[0], total * 2):
        with pytest.raises(RuntimeError, match=r"the execution that was to compute this has failed: .*[Dd]onat"):
            tensor.cpu()
    with pytest.raises(RuntimeError, match="has failed"):
        step(x, caches)[0].item()
    assert other.item() == 3
    caches = on_device([0.0, 0.0], [5.0, 5.0])
    assert [step(torch.ones(2), caches)[0].item() for _ in range(3)] == [2, 4, 6]
