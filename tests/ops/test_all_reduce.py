"""all_reduce and all_reduce_add_rms_norm over gathered parts, the form that every front end shares. What needs several
devices is in tests/distributed; two processes of eager tensors are here."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.common import cases, compare, parts, reference
from tests.common.machine import ROOT

# torchax has JAX's functions, over meshes; the operator below them is JAX's there.
EVERY = ("eager", "jax", "torch_xla", "torch_xla-compiled", "eager-cuda", "jax-cuda", "torch_xla-cuda")


@pytest.mark.frontends(*EVERY)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 5, 4), (8, 1000), (3,), (2, 0), (5, 40_001)], ids=str)
def test_is_the_sum_in_order(frontend, dtype, shape):
    x = cases.rng_for(f"all_reduce {dtype} {shape}").standard_normal(shape).astype(cases.DTYPES[dtype])
    (out,) = parts.call(frontend, "all_reduce", {"x": x})
    compare.assert_bitwise_equal(out, reference.all_reduce(x), frontend.name)


@pytest.mark.frontends(*EVERY)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize(("ranks", "rows", "hidden"), [(1, 1, 8), (2, 3, 4096), (4, 5, 1001), (8, 2, 16384), (2, 0, 8)])
def test_norm_of_the_sum(frontend, dtype, ranks, rows, hidden):
    arrays = parts.norm_arrays(ranks, rows, hidden, dtype)
    out, sum_ = parts.call(frontend, "all_reduce_add_rms_norm", arrays, eps=1e-5)
    want, want_sum = reference.all_reduce_add_rms_norm(arrays["x"], arrays["residual"], arrays["weight"], eps=1e-5)
    compare.assert_bitwise_equal(sum_, want_sum, frontend.name)
    if dtype == "float32":
        np.testing.assert_allclose(out, want, rtol=2e-5)  # the mean is of float32 squares
    else:
        compare.assert_within_ulps(out, want, 2, frontend.name)


@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_a_row_depends_on_itself_alone(frontend):
    arrays = parts.norm_arrays(2, 65, 4096, "bfloat16")
    whole = parts.call(frontend, "all_reduce_add_rms_norm", arrays, eps=1e-5)
    for row in (0, 17, 64):
        alone = {"x": arrays["x"][:, row : row + 1], "residual": arrays["residual"][row : row + 1]}
        got = parts.call(frontend, "all_reduce_add_rms_norm", alone | {"weight": arrays["weight"]}, eps=1e-5)
        for one, all_ in zip(got, whole, strict=True):
            compare.assert_bitwise_equal(one[0], all_[row], f"row {row}")


@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_special_values_stay_in_their_rows(frontend):
    arrays = parts.norm_arrays(2, 4, 64, "float32")
    arrays["x"][0, 1, 3], arrays["x"][1, 1, 3] = np.inf, -np.inf
    arrays["residual"][2, 5] = np.nan
    out, sum_ = parts.call(frontend, "all_reduce_add_rms_norm", arrays, eps=1e-5)
    assert np.isnan(out[1]).all() and np.isnan(out[2]).all() and np.isfinite(out[[0, 3]]).all()
    assert np.isnan(sum_).sum() == 2


BAD = [  # operator, argument, piece of the text after "got", changes of the arrays, options
    ("all_reduce", "x", "int32", {"x": np.ones((2, 3), np.int32)}, {}),
    ("all_reduce", "x", "float64", {"x": np.ones((2, 3), np.float64)}, {}),
    ("all_reduce", "x", "float32[]", {"x": np.ones((), np.float32)}, {}),
    ("all_reduce", "x", "float32[0, 3]", {"x": np.ones((0, 3), np.float32)}, {}),
    ("all_reduce", "group", "-1", {}, {"group": -1}),
    ("all_reduce_add_rms_norm", "residual", "float16", {"residual": np.ones((3, 8), np.float16)}, {}),
    ("all_reduce_add_rms_norm", "residual", "float32[]", {"residual": np.ones((), np.float32)}, {}),
    ("all_reduce_add_rms_norm", "x", "[2, 3, 8]", {"residual": np.ones((4, 8), np.float32)}, {}),
    ("all_reduce_add_rms_norm", "weight", "[7]", {"weight": np.ones(7, np.float32)}, {}),
    ("all_reduce_add_rms_norm", "weight", "[8, 1]", {"weight": np.ones((8, 1), np.float32)}, {}),
    ("all_reduce_add_rms_norm", "eps", "-1", {}, {"eps": -1.0}),
    ("all_reduce_add_rms_norm", "eps", "nan", {}, {"eps": float("nan")}),
    ("all_reduce_add_rms_norm", "x", "[2, 3, 8]", {}, {"group": 5}),
]


@pytest.mark.frontends("eager", "jax", "torch_xla", "eager-cuda", "jax-cuda")
@pytest.mark.parametrize(("operator", "argument", "got", "changes", "options"), BAD, ids=lambda v: str(v)[:40])
def test_wrong_inputs_are_named(frontend, operator, argument, got, changes, options):
    arrays = parts.norm_arrays(2, 3, 8, "float32") | changes
    arrays = {name: arrays[name] for name in parts.OPERANDS[operator]}
    defaults = {"eps": 1e-5} if operator != "all_reduce" else {}
    with pytest.raises((ValueError, TypeError)) as caught:
        parts.call(frontend, operator, arrays, **(defaults | options))
    assert re.search(rf"{operator}: {argument}: expected .*, got .*{re.escape(got)}", str(caught.value))


@pytest.mark.frontends("eager", "jax", "eager-cuda", "jax-cuda")
def test_a_group_that_does_not_exist(frontend):
    text = r"all_reduce: group: expected (a device group that is connected on device \d+|0 on the host.*), got 77"
    with pytest.raises(Exception, match=text):
        parts.call(frontend, "all_reduce", {"x": np.ones(3, np.float32)}, group=77)


@pytest.mark.frontends("eager", "eager-cuda")
def test_the_handler_checks_for_itself(frontend):
    import torch

    import xla_gpu.torch as ffi

    tensors = frontend.tensors(parts.norm_arrays(2, 3, 8, "float32"))
    like = torch.empty(3, 8, device="meta")
    attributes = {"group": np.int64(0), "check_inputs": False}

    def norm(x=tensors["x"], residual=tensors["residual"], weight=tensors["weight"], eps=1e-5):
        ffi.ffi_call("xla_gpu_all_reduce_add_rms_norm", (like, like))(
            x, residual, weight, eps=np.float32(eps), **attributes
        )

    norm()
    for argument, bad in (
        ("x", {"x": tensors["x"][:, :2]}),
        ("x", {"x": tensors["x"][0]}),
        ("weight", {"weight": tensors["weight"][:7]}),
        ("weight", {"weight": tensors["weight"].half()}),
        ("eps", {"eps": -1.0}),
        ("eps", {"eps": float("nan")}),
    ):
        with pytest.raises(ValueError, match=rf"all_reduce_add_rms_norm: {argument}: expected .*, got"):
            norm(**bad)
    with pytest.raises(ValueError, match=r"all_reduce: x: expected the parts .*\[3, 8\] \(as out\), got"):
        ffi.ffi_call("xla_gpu_all_reduce", like)(tensors["residual"], **attributes)


def test_eager_tensors_need_a_process_group():
    torch = pytest.importorskip("torch")
    xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)
    with pytest.raises(ValueError, match=r"all_reduce: group: expected a process group .* not initialised"):
        xg.all_reduce(torch.ones(3))
    with pytest.raises(TypeError, match=r"all_reduce: x: expected a tensor, got list"):
        xg.all_reduce([1.0])


def test_a_group_of_cpu_and_cuda_tensors(monkeypatch):
    """As of backend "cpu:gloo,cuda:nccl": whichever comes first says nothing about the other."""
    pytest.importorskip("torch")
    from xla_gpu._torch import peer_groups

    class ProcessGroup:
        pass

    group = ProcessGroup()
    monkeypatch.setattr(peer_groups, "_connect", lambda group, *_: 7)
    numbers = [peer_groups.number(group, device, 0) for device in ("cpu", "cuda", "cpu", "cuda")]
    assert numbers == [0, 7, 0, 7]


PROCESS = textwrap.dedent("""
    import sys, torch, torch.distributed as dist, xla_gpu.torch as xg
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        parts = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
        out = xg.all_reduce(parts[rank])
        assert torch.equal(out, (parts[0].float() + parts[1].float()).to(dtype)), dtype
        residual, weight = torch.ones(5, 64, dtype=dtype), torch.ones(64, dtype=dtype)
        normed, total = xg.all_reduce_add_rms_norm(parts[rank], residual, weight, eps=1e-5, group=dist.group.WORLD)
        assert torch.equal(total, out + residual) and normed.shape == out.shape
    try:
        xg.all_reduce(parts[rank], group="tp")
    except TypeError as error:
        print(error)
    dist.destroy_process_group()
""")


def test_two_processes_of_eager_tensors(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-c", PROCESS]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error[-3000:]
        assert "all_reduce: group: expected a torch.distributed.ProcessGroup or None" in out
