"""What is torchax's own: dispatch, updates in place, errors, environments, and the serving example's model unchanged.
The operators' values are compared with the others' in the tests of all front ends."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, frontends, reference

pytestmark = pytest.mark.frontends("torchax", "torchax-cuda")
CASE = cases.AttentionCase("torchax", ((1, 20), (4, 9)), num_heads=4, num_kv_heads=2, page_size=8)


def on_torchax(frontend, arrays):
    import jax
    import torchax.interop

    frontend.module()
    return torchax.interop.torch_view(jax.device_put(arrays, frontend.device()))


@pytest.fixture
def environment(frontend):
    """torchax's default environment, with the operators in it."""
    import torchax

    frontend.module()
    with torchax.default_env() as environment:
        yield environment


@pytest.mark.parametrize("case", cases.COMMON, ids=lambda case: case.name)
def test_has_the_bits_of_the_jax_front_end(frontend, case):
    arrays = cases.build(case).arrays()
    ours = frontend.call("paged_attention_with_lse", arrays, **case.options())
    theirs = frontend.jax.call("paged_attention_with_lse", arrays, **case.options())
    for a, b in zip(ours, theirs, strict=True):
        compare.assert_bitwise_equal(a, b, case.name)


def test_operators_overloads_and_functions_are_one(frontend, environment):
    import torch

    import xla_gpu.torch

    a = on_torchax(frontend, np.arange(4, dtype=np.float32))
    for add in (torch.ops.xla_gpu.simple_add, torch.ops.xla_gpu.simple_add.default, xla_gpu.torch.simple_add):
        for out in (add(a, a), add(a=a, b=a)):
            assert type(out) is type(a) and out.tolist() == [0, 2, 4, 6]


def test_ragged_paged_attention(frontend):
    inputs = cases.build(CASE)
    names = ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    arrays = dict(zip(names, inputs.arrays().values(), strict=True))
    want, _ = reference.paged_attention(**inputs.arrays(), scale=0.2, soft_cap=5.0)
    for use_kernel in (True, False):
        options = {"sm_scale": 0.2, "soft_cap": 5.0, "use_kernel": use_kernel}
        (out,) = frontend.call("ragged_paged_attention", arrays, **options)
        np.testing.assert_allclose(out, want, atol=2e-5)


def test_tensors_of_other_kinds_still_reach_their_front_end(environment):
    import torch

    import xla_gpu.torch

    a = torch.arange(4.0)
    for out in (xla_gpu.torch.simple_add(a, a), torch.ops.xla_gpu.simple_add(a=a, b=a)):
        assert type(out) is torch.Tensor and out.tolist() == [0, 2, 4, 6]
    key, cache = torch.ones(1, 1, 8), torch.zeros(2, 2, 2, 8)
    slots = torch.tensor([3], dtype=torch.int32)
    for call in (
        lambda: xla_gpu.torch.reshape_and_cache_(key, key, cache, slots),
        lambda: torch.ops.xla_gpu.reshape_and_cache_(key=key, value=key, kv_cache=cache, slot_mapping=slots),
    ):
        cache.zero_()
        assert call() is cache and cache.sum() == 16


# ---- In place --------------------------------------------------------------------------------------------------------


def test_updates_the_tensor_and_nothing_that_shares_its_array(frontend, environment):
    import xla_gpu.torch

    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[1])
    tensors = on_torchax(frontend, arrays)
    clone = tensors["kv_cache"].clone()
    out = xla_gpu.torch.reshape_and_cache_(**tensors)
    assert out is tensors["kv_cache"]
    compare.assert_bitwise_equal(np.asarray(out.jax()), reference.reshape_and_cache(**arrays), frontend.name)
    compare.assert_bitwise_equal(np.asarray(clone.jax()), arrays["kv_cache"], "the clone")


def test_updates_the_base_of_a_view(frontend, environment):
    import torch

    import xla_gpu.torch

    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[1])
    tensors = on_torchax(frontend, arrays)
    cache = tensors.pop("kv_cache")
    stack = torch.stack([cache * 0, cache])
    xla_gpu.torch.reshape_and_cache_(tensors["key"], tensors["value"], stack[1], tensors["slot_mapping"])
    compare.assert_bitwise_equal(np.asarray(stack.jax()[1]), reference.reshape_and_cache(**arrays), frontend.name)


def test_views_are_operands(frontend, environment):
    import xla_gpu.torch

    a = on_torchax(frontend, np.arange(12, dtype=np.float32).reshape(3, 4))
    assert xla_gpu.torch.simple_add(a[1], a[2]).tolist() == [12, 14, 16, 18]


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ops, a, b: ops.simple_add(a, b), ValueError, r"simple_add: b: expected a torchax tensor \(as a\).*cpu"),
        (lambda ops, a, b: ops.simple_add(b, a), ValueError, r"simple_add: a: expected a torchax tensor \(as b\).*cpu"),
        (lambda ops, a, b: ops.simple_add(a, a[:2]), ValueError, r"simple_add: b: expected shape \[4\].*float32\[2\]"),
        (lambda ops, a, b: ops.simple_add(a, 3), TypeError, "simple_add: b: expected .*array, got int"),
        (lambda ops, a, b: ops.simple_add(a, a.clone().requires_grad_()), ValueError, "simple_add: b: .*gradient"),
        (lambda ops, a, b: ops.ffi_call("mine", a)(a), TypeError, "mine: ffi_call: expected .*got torchax tensors"),
        (lambda ops, a, b: ops.hlo(a), TypeError, "hlo: tensors: expected XLA tensors, got one on jax"),
    ],
)  # fmt: skip
def test_errors(frontend, environment, call, error, message):
    import torch

    import xla_gpu.torch

    with pytest.raises(error, match=message):
        call(xla_gpu.torch, on_torchax(frontend, np.zeros(4, np.float32)), torch.zeros(4))


def test_too_many_arguments(frontend, environment):
    import torch

    a = on_torchax(frontend, np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="simple_add: expected at most 2 arguments, got 3"):
        torch.ops.xla_gpu.simple_add(a, a, a)


def test_sums_over_processes_are_refused(frontend, environment):
    import torch

    a = on_torchax(frontend, np.zeros((2, 4), np.float32))
    with pytest.raises(TypeError, match=r"all_reduce: x: expected .*got a torchax tensor; call xla_gpu.jax.all_reduce"):
        torch.ops.xla_gpu.all_reduce(a)


def test_a_cache_on_another_device_is_not_updated(frontend, environment):
    import torch

    import xla_gpu.torch

    key = on_torchax(frontend, np.ones((1, 1, 8), np.float32))
    cache = torch.zeros(2, 2, 2, 8)
    with pytest.raises(ValueError, match=r"reshape_and_cache_: kv_cache: expected a torchax tensor \(as key\).*cpu"):
        xla_gpu.torch.reshape_and_cache_(key, key, cache, on_torchax(frontend, np.zeros(1, np.int32)))
    assert not cache.any()


def test_a_cache_of_numpy_is_not_updated(frontend, environment):
    """Its other operands may be NumPy's, as in JAX."""
    import xla_gpu.torch

    key, slots = np.ones((1, 1, 8), np.float32), np.zeros(1, np.int32)
    cache = np.zeros((2, 2, 2, 8), np.float32)
    with pytest.raises(TypeError, match="reshape_and_cache: kv_cache: expected a tensor, got ndarray"):
        xla_gpu.torch.reshape_and_cache_(on_torchax(frontend, key), key, cache, slots)
    updated = xla_gpu.torch.reshape_and_cache_(on_torchax(frontend, key), key, on_torchax(frontend, cache), slots)
    assert updated[0, 0].abs().sum() == 16 and not cache.any()


def test_outside_of_an_environment_torchax_says_so(frontend):
    import xla_gpu.torch

    a = on_torchax(frontend, np.zeros(4, np.float32))
    with pytest.raises(AssertionError, match="torchax environment"):
        xla_gpu.torch.simple_add(a, a)


def test_derivatives_are_those_of_jax(frontend, environment):
    import torchax.interop

    import xla_gpu.torch

    a = on_torchax(frontend, np.ones(4, np.float32))
    value, grad = torchax.interop.jax_value_and_grad(lambda a: (xla_gpu.torch.simple_add(a, a) * a).sum())(a)
    assert value.item() == 8 and (np.asarray(grad.jax()) == 4).all()
    states = on_torchax(frontend, np.ones((1, 2, 8), np.float32)), on_torchax(frontend, np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="merge_attention_states has no gradient"):
        torchax.interop.jax_value_and_grad(
            lambda out: xla_gpu.torch.merge_attention_states(out, states[1], *states)[0].sum()
        )(states[0])


# ---- Environments ----------------------------------------------------------------------------------------------------


def test_an_environment_made_before_the_import_needs_to_be_told(frontend):
    import torch
    import torchax.tensor

    import xla_gpu.torchax

    environment = torchax.tensor.Environment()
    packets = [torch.ops.xla_gpu.simple_add, torch.ops.xla_gpu.reshape_and_cache_]
    for packet in packets:
        del environment._ops[packet]  # as if it had been made before
    a = environment.j2t_iso(on_torchax(frontend, np.ones(4, np.float32)).jax())
    with environment, pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        packets[0](a, a)
    xla_gpu.torchax.register(environment)
    with environment:
        assert packets[0](a, a).tolist() == [2] * 4
    assert all(packet in environment._ops for packet in packets)


# ---- A whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jax_jit"])
def test_the_example_serves_unchanged(frontend, environment, jit):
    """PagedLlama with continuous batching: the tokens are those of transformers."""
    transformers = pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import jax
    import torch
    import torchax.interop

    with torchax.disable_temporarily():
        # transformers imports torchvision, where that is installed, which calls an operator that torchax has not.
        from paged_llama import reference as hugging_face
        from paged_llama import weights
        from paged_llama.config import LlamaConfig
        from paged_llama.model import PagedLlama
        from paged_llama.scheduler import Request, Scheduler, run

        torch.manual_seed(3)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, initializer_range=0.2, **sizes)
        ).eval()
        config = LlamaConfig.from_hugging_face(theirs.config.to_dict())
        requests = [Request([(7 * i + 3 * j * j) % 96 for j in range(n)], 8) for i, n in enumerate((1, 5, 40, 23))]
        expected = [hugging_face.generate(theirs, r.prompt, 8, frozenset()) for r in requests]
        scheduler = Scheduler(num_pages=40, page_size=4, max_seqs=3, chunk=16, max_tokens=48)
        scheduler.add(requests)
        model = PagedLlama(config, torch.float32, 48)
        weights.load(model, theirs.state_dict().__getitem__, torch.device("cpu"))
        names = dict(model.named_parameters()) | dict(model.named_buffers())
        state = {name: tensor.detach().numpy() for name, tensor in names.items()}
    state = on_torchax(frontend, state)
    shape = (40, 4, 2 * config.num_kv_heads, config.head_dim)
    caches = [on_torchax(frontend, np.full(shape, np.nan, np.float32)) for _ in range(config.num_layers)]
    previous = on_torchax(frontend, np.zeros(3, np.int32))

    programs = {}
    for layout in scheduler.layouts:

        def step(state, caches, packed, previous, layout=layout):
            return torch.func.functional_call(model, state, (packed, previous, caches, layout))

        programs[layout] = torchax.interop.jax_jit(step, {"donate_argnums": (1,)}) if jit else step

    def launch(step):
        nonlocal previous, caches
        packed = on_torchax(frontend, step.packed)
        with torch.no_grad():
            previous, caches = programs[step.layout](state, caches, packed, previous)
        return previous

    with jax.default_matmul_precision("highest"):
        for _ in run(scheduler, launch, lambda chosen: chosen.jax().tolist()):
            pass
    assert [request.generated for request in requests] == expected


def test_the_names_above_are_front_ends():
    assert {"torchax", "torchax-cuda", "torchax-jit", "torchax-cuda-jit"} <= set(frontends.ALL)
