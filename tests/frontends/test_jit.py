"""xla_gpu.torch.jit: one program for each set of shapes, called without tracing."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")
import torch_xla.debug.metrics as metrics  # noqa: E402

import xla_gpu.torch as xg  # noqa: E402
from tests.frontends.xla_tensors import on_device  # noqa: E402
from xla_gpu._torch_xla import proxy_programs  # noqa: E402


def compilations() -> int:
    timed = metrics.metric_data("CompileTime")
    return timed[0] if timed else 0


def test_a_program_is_traced_and_compiled_once():
    traces = []
    weight = on_device([2.0, 3.0])

    @xg.jit
    def scaled(x):
        """Doubles and triples."""
        traces.append(None)
        return x * weight

    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Doubles and triples."
    x = on_device([1.0, 2.0])
    assert scaled(x).cpu().tolist() == [2, 6]
    compiled = compilations()
    for number in (2.0, 3.0):
        y = scaled(on_device([number, number]))
        assert y.device.type == "xla" and scaled(y).cpu().tolist() == [4 * number, 9 * number]
    assert len(traces) == 1 and compilations() == compiled


def test_other_shapes_dtypes_values_and_structures_are_other_programs():
    traces = []

    @xg.jit
    def total(parts, times):
        traces.append(None)
        return sum(part.sum() for part in parts) * times

    two, three = torch.ones(2), torch.ones(3)
    for _ in range(2):
        assert total([two], 1).item() == 2
        assert total([three], 1).item() == 3
        assert total([two.int()], 1).item() == 2
        assert total([two, two.clone()], 1).item() == 4
        assert total((two,), 1).item() == 2
        assert total([two], 2).item() == 4
    assert len(traces) == 6
    total.clear_cache()
    assert total([two], 1).item() == 2 and len(traces) == 7


def test_autocast_and_the_default_dtype_are_part_of_a_program():
    linear = torch.nn.Linear(4, 4).to(torch_xla.device())
    x, wide = torch.ones(2, 4), torch.ones(3, 4)
    apply = xg.jit(lambda x: linear(x))
    for _ in range(2):
        with torch.autocast("xla", dtype=torch.bfloat16):
            for given in (x, wide):  # the second trace has casts of its own
                assert apply(given).dtype is torch.bfloat16
                assert apply(given).float().cpu().sub(linear(given.to(linear.weight.device)).cpu()).abs().max() < 0.1
        with torch.autocast("xla", dtype=torch.float16):
            assert apply(x).dtype is torch.float16
        assert apply(x).dtype is torch.float32
    ones = xg.jit(lambda x: torch.ones(2, device=x.device))
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert ones(x).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_casts_of_a_trace_are_not_found_after_it():
    linear = torch.nn.Linear(4, 4).to(torch_xla.device())
    apply = xg.jit(torch.autocast("xla", dtype=torch.bfloat16)(lambda x: linear(x)))
    with torch.autocast("xla", dtype=torch.bfloat16):
        for number in (2, 3, 2):
            x = torch.ones(number, 4)
            got, want = apply(x), linear(x.to(linear.weight.device))
            assert got.dtype is want.dtype is torch.bfloat16 and torch.equal(got.cpu(), want.cpu())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_results_of_unsigned_dtypes(dtype):
    """A tree_mask, for example."""
    x = torch.tensor([1, 60000]).to(dtype)
    count = torch.tensor([3, 4]).to(dtype).to(torch_xla.device())

    def step(x, count):
        count.copy_((count.long() + 1).to(dtype))
        return (x.long() + 5).to(dtype), x

    step = xg.jit(step, donate_argnums=1)
    for number in range(1, 4):
        new, given = step(x, count)
        assert new.dtype is given.dtype is count.dtype is dtype
        assert new.cpu().dtype is dtype and new.cpu().tolist() == [6, 60005]
        assert count.cpu().tolist() == [3 + number, 4 + number]
        assert (new.long() + 1).tolist() == [7, 60006]
        assert step(new, x.to(count.device))[0].cpu().tolist() == [11, 60010]
    functional = xg.jit(lambda x: (x.long() + 1).to(dtype), donate_argnums=0)
    for number in range(1, 4):
        count = functional(count)
        assert count.dtype is dtype and count.cpu().tolist() == [6 + number, 7 + number]


def test_arrays_and_cpu_tensors_are_copied_to_the_device():
    add = xg.jit(lambda x, y: x + y)
    for number in (1, 2):
        got = add(np.full(2, number, np.int32), torch.full((2,), 10, dtype=torch.int32))
        assert got.device.type == "xla" and got.cpu().tolist() == [10 + number] * 2
    for dtype in (torch.uint16, torch.uint32):  # a tree_mask above all
        assert xg.jit(lambda x, dtype=dtype: x.long() + (x.dtype is dtype))(torch.tensor([2]).to(dtype)).item() == 3
    halves = np.full(2, 0.5, ml_dtypes.bfloat16)
    assert add(halves, halves).tolist() == [1, 1] and add(halves, halves).dtype is torch.bfloat16
    backwards = np.arange(2, dtype=np.int32)[::-1]
    backwards.flags.writeable = False
    assert add(backwards, backwards).tolist() == [2, 0]


Pair = collections.namedtuple("Pair", "first second")


def test_results_have_the_functions_structure():
    @xg.jit
    def results(x, number):
        y = x + 1
        return {"pair": Pair(y, [x, None, number]), "again": (y, y * 2), "text": "kept"}

    for number in (3, 3, 4):
        x = on_device([1.0])
        got = results(x, number)
        assert got["pair"].second[0] is x and got["pair"].second[1:] == [None, number] and got["text"] == "kept"
        assert [tensor.item() for tensor in (got["pair"].first, *got["again"])] == [2, 2, 4]


def test_tensors_updated_in_place_have_their_new_values():
    @xg.jit
    def accumulate(x, totals):
        totals[0].add_(x)
        totals[1][0] = x[1]
        return totals[0].sum()

    first, second, untouched = on_device([0.0, 0.0], [5.0, 5.0], [1.0, 1.0])
    alias = first
    for number in (1, 2, 3):
        assert accumulate(on_device([1.0, 2.0]), [first, second, untouched]).item() == 3 * number
    assert alias.cpu().tolist() == [3, 6] and second.cpu().tolist() == [2, 5] and untouched.cpu().tolist() == [1, 1]


def test_tensors_that_take_the_value_of_another_one():
    first, second = on_device([1.0], [2.0])

    @xg.jit
    def swap(x, y):
        before = x.clone()
        x.copy_(y)
        y.copy_(before)
        return x

    for number in (2, 1, 2):
        assert swap(first, second) is first
        assert first.item() == number and second.item() == 3 - number
    reset = xg.jit(lambda x: x.copy_(torch.tensor([7.0])))
    for tensor in (first, second):
        assert reset(tensor).item() == 7 and tensor.item() == 7


def test_donated_memory_is_the_results():
    step = xg.jit(lambda x, caches: (x.sum(), [cache + x for cache in caches]), donate_argnums=1)
    caches = on_device([1.0, 1.0], [2.0, 2.0])
    for number in (1, 2):
        given = caches
        total, caches = step(on_device([1.0, 3.0]), given)
        assert total.item() == 4 and caches[1].cpu().tolist() == [2 + number, 2 + 3 * number]
        for cache in given:
            with pytest.raises(RuntimeError):
                cache.cpu()


def test_donated_and_updated_in_place():
    def step(x, cache):
        cache.add_(x)
        return cache

    cache = on_device([1.0, 1.0])
    jitted = xg.jit(step, donate_argnums=[1])
    for number in (1, 2):
        assert jitted(on_device([1.0, 2.0]), cache) is cache
        assert cache.cpu().tolist() == [1 + number, 1 + 2 * number]
    # What was donated there is not in another program.
    assert xg.jit(lambda x: x + 1)(cache).cpu().tolist() == [4, 6] and cache.cpu().tolist() == [3, 5]


LAYERS = """
import sys, torch, torch_xla
import xla_gpu.torch as xg

device = torch_xla.device()
weights = [torch.eye(8).to(device) for _ in range(4)]
x, slots = torch.ones(1, 8), torch.tensor([5], dtype=torch.int32).to(device)
torch_xla.sync()

def step(x, caches, way):
    new = []
    for weight, cache in zip(weights, reversed(caches) if way == "reversed" else caches):
        row = (x @ weight).view(1, 1, 8)
        if way == "in place":
            xg.reshape_and_cache_(row, row, cache, slots)
        else:
            cache = xg.reshape_and_cache(row, row, cache, slots)
        new.append(cache)
        x = cache[1].sum((0, 1))[None] + x
    return x.sum(-1), (new[::-1] if way == "reversed" else new)

step = xg.jit(step, donate_argnums=1)
for num_pages, way in enumerate(sys.argv[1:], 3):  # which the text of a program tells by
    caches = [torch.zeros(num_pages, 4, 2, 8, device=device) for _ in weights]
    for _ in range(2):
        total, caches = step(x, caches, way)
        assert total.item() == 8 * 3**4, (way, total)
    assert caches[1][1].sum().item() == 2 * 8 * (9 if way == "reversed" else 3), way
"""


def test_caches_of_one_shape_are_not_copied(tmp_path):
    """XLA matches donated memory and results by their size alone. One process for all: starting it takes longest."""
    ways = ["functional", "in place", "reversed"]
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", LAYERS, *ways], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in tmp_path.glob("*cpu_after_optimizations.txt")]
    for num_pages, way in enumerate(ways, 3):
        cache = f"f32[{num_pages},4,2,8]"
        (text,) = [text for text in texts if 'target="xla_gpu_reshape_and_cache"' in text and cache in text]
        assert text.splitlines()[0].count("may-alias") == 4, way
        assert f"{cache}{{3,2,1,0}} copy(" not in text, way


def test_operators_and_modules():
    device = torch_xla.device()
    layer = torch.nn.Linear(4, 4)
    expected = torch.nn.functional.silu(layer(torch.ones(2, 4)))
    layer = layer.to(device)
    gate = xg.jit(lambda x: xg.silu_and_mul(torch.cat([layer(x), torch.ones_like(x)], -1)))
    torch.testing.assert_close(gate(torch.ones(2, 4)).cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    cache = torch.zeros(2, 4, 2, 8, device=device)
    slots = torch.tensor([5], dtype=torch.int32)
    store = xg.jit(lambda key, slots, cache: xg.reshape_and_cache_(key, key * 2, cache, slots))
    for number in (1.0, 2.0):
        store(torch.full((1, 1, 8), number), slots, cache)
        assert cache.cpu()[1, 1].tolist() == [[number] * 8, [2 * number] * 8]


@pytest.mark.parametrize("recorded", [False, True], ids=["executed", "recorded for a proxy"])
def test_pending_arguments_are_computed_first(recorded, monkeypatch):
    if recorded:  # as on a GPU; elsewhere nothing is recorded, and torch_xla executes the program from then on
        monkeypatch.setattr(proxy_programs, "available", lambda: True)
        monkeypatch.setattr(proxy_programs, "CAPTURED", 0)
    double = xg.jit(lambda x: x * 2)
    x = on_device([1.0])
    for _ in range(3):
        assert double(x + 1).item() == 4
    views = []
    for number in range(3):  # of updated tensors: their values are pending where they are looked at again
        base = torch.zeros(3, device=torch_xla.device())
        base[1:] = number
        views.append(base[1:].view(2))
    torch_xla.sync()
    assert xg.jit(lambda *parts: sum(parts))(*views).tolist() == [3, 3]


def test_an_error_in_a_trace_leaves_the_arguments_alone():
    x, cache = on_device([1.0], [2.0])

    def fails(x, cache):
        cache.add_(x)
        raise KeyError("in the function")

    with pytest.raises(KeyError):
        xg.jit(fails, donate_argnums=1)(x, cache)
    assert cache.item() == 2 and (cache + x).item() == 3


def test_arguments_that_share_memory_when_traced_are_told_apart():
    """Numbers of one value do in torch_xla, and so do a tensor and its detach()."""
    difference = xg.jit(lambda x, y: x - y)
    assert difference(np.full((), 5, np.int32), np.full((), 5, np.int32)).item() == 0
    assert difference(np.full((), 9, np.int32), np.full((), 4, np.int32)).item() == 5
    x = on_device([1.0, 1.0])
    assert difference(x, x.detach()).tolist() == [0, 0]
    assert difference(on_device([1.0, 1.0]), on_device([3.0, 3.0])).tolist() == [-2, -2]
    number = torch.tensor(2.0).to(torch_xla.device())
    captured = xg.jit(lambda y: y - number)
    assert captured(torch.tensor(2.0)).item() == 0 and captured(torch.tensor(5.0)).item() == 3
    of_weight = xg.jit(lambda y: y - x)
    assert of_weight(x).tolist() == [0, 0] and of_weight(on_device([3.0, 4.0])).tolist() == [2, 3]


def test_results_that_compute_nothing():
    weight = on_device([7.0])
    same = xg.jit(lambda x: (x, x.detach(), x.clone(), x.view(-1), x.contiguous(), weight))
    for number in (1.0, 2.0):
        assert [result.item() for result in same(on_device([number]))] == [number] * 5 + [7]
    returned = xg.jit(lambda x: x)
    assert returned(weight) is weight and returned(weight) is weight
    assert xg.jit(lambda x: None)(weight) is None and xg.jit(lambda x: x.detach())(weight).item() == 7
    both = xg.jit(lambda x, cache: (x + cache, cache), donate_argnums=1)
    for number in (1.0, 2.0):
        got = both(on_device([number]), on_device([5.0]))
        assert [result.item() for result in got] == [5 + number, 5]


def test_a_function_of_jit_in_another_one_is_part_of_its_program():
    double = xg.jit(lambda x: x * 2)
    assert double(on_device([1.0])).item() == 2
    outer = xg.jit(lambda x: double(x + 1) + double(np.ones(1, np.float32)))
    for number in (1.0, 2.0):
        assert outer(on_device([number])).item() == 2 * number + 4


def test_methods_and_transformations():
    class Scale:
        def __init__(self, number):
            self.number = number

        @xg.jit
        def times(self, x):
            return torch.vmap(lambda row: torch.func.grad(lambda y: (y * y).sum())(row) * self.number)(x)

    for number in (1, 2):
        assert Scale(number).times(on_device([[1.0], [2.0]])).tolist() == [[2 * number], [4 * number]]


def test_a_module_whose_attributes_have_names_of_jits():
    module = torch.nn.ReLU()
    module._trace = module._run = module.clear_cache = None
    relu = xg.jit(module)
    for _ in range(2):
        assert relu(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
        relu.clear_cache()


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, complex])
def test_numbers_are_told_apart_by_their_bits(kind):
    traces = []

    @xg.jit
    def times(x, number):
        traces.append(None)
        return x * float(np.real(number))

    x = on_device([1.0])
    assert not np.signbit(times(x, kind(0.0)).item()) and np.signbit(times(x, kind(-0.0)).item())
    for _ in range(2):
        assert np.isnan(times(x, kind(np.nan)).item())
    assert len(traces) == 3
