"""torch.vmap of the operators: one call after the other, as jax.vmap's, of which test_jax.py has the tests."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, layer_cases

torch = pytest.importorskip("torch")
EAGER = pytest.mark.frontends("eager", "eager-cuda")


@EAGER
@pytest.mark.parametrize("name", layer_cases.NAMES)
def test_vmap_calls_once_per_element(frontend, name):
    arrays, options = layer_cases.samples()[name]
    tensors, ops = frontend.tensors(arrays), frontend.module()
    halves = {a: x * 0.5 if x.is_floating_point() and x.element_size() > 1 else x for a, x in tensors.items()}
    batch = {argument: torch.stack([x, halves[argument]]) for argument, x in tensors.items()}
    want = [getattr(ops, name)(**given, **options) for given in (tensors, halves)]
    got = torch.vmap(lambda *given: getattr(ops, name)(**dict(zip(batch, given, strict=True)), **options))(
        *batch.values()
    )
    got, *want = (x if isinstance(x, tuple) else (x,) for x in (got, *want))
    for results in zip(got, *want, strict=True):
        for element, w in zip(results[0], results[1:], strict=True):
            assert torch.equal(element.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))


@EAGER
def test_vmap_of_rms_norm(frontend):
    """Whose results are a list."""
    ops = frontend.module()
    tensors = frontend.tensors({"x": cases.rng_for("vmap").standard_normal((3, 4, 2, 8)).astype(np.float32)})
    x, weight = tensors["x"], tensors["x"][0, 0, 0].clone()
    want = ops.rms_norm(x, weight, eps=1e-6)
    nested = torch.vmap(torch.vmap(lambda row: ops.rms_norm(row, weight, eps=1e-6), in_dims=1, out_dims=1))
    assert torch.equal(nested(x), want)
    with pytest.raises(ValueError, match=r"rms_norm: torch\.vmap: expected a batch of 1 or more, got 0"):
        nested(x[:0])


@EAGER
def test_vmap_does_not_warn(frontend, capfd):
    """PyTorch's rule for operators that have none asks users to report them."""
    ops = frontend.module()
    states = torch.ones(3, 5, 2, 8, device=frontend.device()), torch.zeros(3, 5, 2, device=frontend.device())
    out, lse = torch.vmap(ops.merge_attention_states)(*states, *states)
    assert out.shape == (3, 5, 2, 8) and lse.shape == (3, 5, 2)
    assert torch.vmap(ops.simple_add)(out, out).shape == out.shape
    assert "batching rule" not in capfd.readouterr().err


@EAGER
def test_updates_in_place_refuse_vmap(frontend):
    ops, device = frontend.module(), frontend.device()
    token, slots = torch.ones(3, 2, 2, 16, device=device), torch.arange(2, dtype=torch.int32, device=device)
    caches = torch.zeros(3, 4, 8, 4, 16, device=device)
    with pytest.raises(RuntimeError, match=r"reshape_and_cache_ cannot run under torch\.vmap.*: use reshape_and_cache"):
        torch.vmap(lambda x, cache: ops.reshape_and_cache_(x, x, cache, slots))(token, caches)
    assert not caches.any()
    updated = torch.vmap(lambda x, cache: ops.reshape_and_cache(x, x, cache, slots))(token, caches)
    assert updated.sum() == 3 * 2 * token[0].numel()
