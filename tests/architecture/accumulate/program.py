"""Calls accumulate through every front end of the host; run by test_new_operator.py against a copy of the tree."""

from __future__ import annotations

import numpy as np

X, TOTAL = np.arange(6, dtype=np.float32), np.full(6, 10, np.float32)
WANT = TOTAL + 0.5 * X[::-1]


def check(what: str, got: object) -> None:
    np.testing.assert_array_equal(np.asarray(got), WANT, err_msg=what)
    print("correct:", what)


def run_torch(where: str, device: object) -> None:
    import torch
    import torch_xla

    import xla_gpu.torch as ops

    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        pair = torch.tensor(X, device=device), torch.tensor(TOTAL, device=device)
        torch_xla.sync()
        return pair

    x, total = tensors()
    check(f"{where}: functional", ops.accumulate(x, total, scale=0.5).cpu())
    np.testing.assert_array_equal(total.cpu(), TOTAL)
    assert ops.accumulate_(x, total, scale=0.5) is total
    check(f"{where}: in place", total.cpu())
    for function in (ops.accumulate, ops.accumulate_):
        try:
            function(x, total[:3], scale=0.5)
        except ValueError as error:
            assert str(error) == "accumulate: total: expected shape [6] ([n]), got float32[3]", error
        else:
            raise AssertionError(f"{where}: {function.__name__} took a wrong shape")
    if where == "eager":
        return
    x, total = tensors()
    step = torch.compile(lambda x, total: ops.accumulate_(x, total, scale=0.5).sum(), backend="openxla", fullgraph=True)
    assert float(step(x, total)) == WANT.sum()
    check(f"{where}: in place, compiled", total.cpu())


def run_jax() -> None:
    import jax

    import xla_gpu.jax as ops

    step = jax.jit(lambda x, total: ops.accumulate(x, total, scale=0.5), donate_argnums=1)
    lowered = step.lower(X, TOTAL).compile().as_text()
    assert "input_output_alias={ {}: (1, {}, may-alias)" in lowered, lowered[:500]
    check("jax", step(X, jax.device_put(TOTAL)))


def run_scratch() -> None:
    from xla_gpu.ops.accumulate import OPERATOR

    from xla_gpu._core.operator import ArraySpec
    from xla_gpu._runtime import scratch

    spec = ArraySpec((6,), "float32")
    assert scratch.scratch_bytes(OPERATOR.bind(x=spec, total=spec, scale=0.5)) == 24


if __name__ == "__main__":
    import torch_xla

    run_scratch()
    run_torch("eager", "cpu")
    run_torch("torch_xla", torch_xla.device())
    run_jax()
