"""FlashInfer's kernels as tvm-ffi targets, in every front end. Needs the package flashinfer-python, nvcc and a GPU."""

from __future__ import annotations

import importlib.util
import shutil
import warnings

import numpy as np
import pytest

xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

pytestmark = pytest.mark.gpu

ARGUMENTS = ("rets.0", "args.0", "attrs.pdl")
X = np.random.default_rng(0).standard_normal((8, 1024)).astype(np.float16)
GATE, UP = np.split(X.astype(np.float64), 2, axis=1)
EXPECTED = GATE / (1 + np.exp(-GATE)) * UP


@pytest.fixture(scope="session")
def silu_and_mul():
    if importlib.util.find_spec("flashinfer") is None or shutil.which("nvcc") is None:
        pytest.skip("needs flashinfer-python and nvcc")
    with warnings.catch_warnings():  # tvm-ffi's, where it cannot compile an extension that this needs not
        warnings.simplefilter("ignore")
        from flashinfer.jit.activation import gen_act_and_mul_module

        return gen_act_and_mul_module("silu").build_and_load().silu_and_mul


@pytest.fixture(scope="session", params=[False, True], ids=["launched", "captured"])
def target(request, silu_and_mul):
    name = f"flashinfer_silu_and_mul_{request.param}"
    xg.register_tvm_ffi_target(name, silu_and_mul, arguments=ARGUMENTS, allow_capture=request.param)
    return name


@pytest.mark.frontends("eager-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled")
@pytest.mark.parametrize("pdl", [False, True])
def test_silu_and_mul(frontend, target, pdl):
    import torch

    call = xg.ffi_call(target, torch.empty(8, 512, dtype=torch.float16, device="meta"))
    for _ in range(3):
        (y,) = frontend.run(lambda ops, x: call(x + 0, pdl=pdl), {"x": X})
        np.testing.assert_allclose(y, EXPECTED, rtol=2e-3, atol=1e-3)


@pytest.mark.frontends("jax-cuda")
def test_silu_and_mul_in_jax(frontend, target, silu_and_mul):
    import jax

    import xla_gpu.jax as xj

    xj.register_tvm_ffi_target(target, silu_and_mul, arguments=ARGUMENTS, allow_capture=target.endswith("True"))
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((8, 512), np.float16))
    for _ in range(3):
        (y,) = frontend.run(lambda ops, x: call(x + 0, pdl=False), {"x": X})
        np.testing.assert_allclose(y, EXPECTED, rtol=2e-3, atol=1e-3)
