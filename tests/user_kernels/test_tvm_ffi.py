"""tvm-ffi functions in every front end."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from xla_gpu.errors import TargetError

tvm_ffi = pytest.importorskip("tvm_ffi")
torch = pytest.importorskip("torch")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

X = np.arange(6, dtype=np.float32)
TORCH = pytest.mark.frontends("eager", "torch_xla", "torch_xla-compiled")
SCALE = ("args.0", "attrs.factor", "rets.0")


@pytest.fixture(scope="session")
def module(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    from tvm_ffi import libinfo

    library = tmp_path_factory.mktemp("tvm_ffi") / "functions.so"
    include = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    source = Path(__file__).with_name("tvm_ffi_functions.cc")
    runtime = libinfo.find_libtvm_ffi()
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        *include,
        str(source),
        "-o",
        str(library),
        runtime,
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return tvm_ffi.load_module(str(library))


@pytest.fixture(scope="session")
def registered(module):
    xg.register_tvm_ffi_target("test_tvm_scale", module.scale, platform="cpu", arguments=SCALE)
    arguments = ("args", *(f"attrs.{name}" for name in ("flag", "n", "f", "text")), "rets")
    xg.register_tvm_ffi_target("test_tvm_describe", module.describe, platform="cpu", arguments=arguments)
    xg.register_tvm_ffi_target("test_tvm_fail", module.fail, platform="cpu")
    return module


def like(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@TORCH
def test_values(frontend, registered):
    for factor in (2.5, -1.0, 2.5):
        call = lambda ops, x, factor=factor: ops.ffi_call("test_tvm_scale", like((6,)))(x, factor=factor)  # noqa: E731
        np.testing.assert_array_equal(frontend.run(call, {"x": X})[0], X * np.float32(factor))


@pytest.mark.frontends("jax")
def test_values_in_jax(frontend, registered):
    import jax

    import xla_gpu.jax as xj

    xj.register_tvm_ffi_target("test_tvm_scale", registered.scale, platform="cpu", arguments=SCALE)
    result = jax.ShapeDtypeStruct((6,), np.float32)
    call = lambda ops, x: jax.ffi.ffi_call("test_tvm_scale", result)(x, factor=1.5)  # noqa: E731
    np.testing.assert_array_equal(frontend.run(call, {"x": X})[0], X * np.float32(1.5))


@TORCH
def test_what_a_function_gets(frontend, registered):
    x = np.zeros((2, 3, 4), np.int16)
    call = lambda ops, x: ops.ffi_call("test_tvm_describe", like((80,), torch.uint8))(  # noqa: E731
        x, flag=True, n=-(2**40), f=0.5, text="a b"
    )
    (out,) = frontend.run(call, {"x": x})
    assert bytes(out).rstrip(b"\0").decode() == f"1 {-(2**40)} 0.500000 a b 0:16 2/12 3/4 4/1"


@pytest.mark.frontends("eager", "torch_xla")
def test_errors_of_the_function(frontend, registered):
    with pytest.raises((ValueError, RuntimeError), match="test_tvm_scale: ValueError: x: expected float32"):
        frontend.run(
            lambda ops, x: ops.ffi_call("test_tvm_scale", like((6,)))(x, factor=1.0), {"x": X.astype(np.int32)}
        )
    with pytest.raises(RuntimeError, match="test_tvm_fail: RuntimeError: a text that only this function knows"):
        frontend.run(lambda ops, x: ops.ffi_call("test_tvm_fail", like((6,)))(x), {"x": X})
    (y,) = frontend.run(lambda ops, x: ops.ffi_call("test_tvm_scale", like((6,)))(x, factor=3.0), {"x": X})
    np.testing.assert_array_equal(y, X * 3)


@pytest.mark.frontends("eager", "torch_xla")
@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({}, "attribute factor: expected a value, since the function takes one, got none"),
        ({"factor": "2"}, "TypeError: Mismatched type on argument #1"),
        (
            {"factor": np.array([1.0])},
            "attribute factor: expected a bool, an integer, a float or a string, got another",
        ),
        ({"factor": np.uint64(2**63)}, "attribute factor: expected a bool, an integer, a float or a string"),
    ],
)
def test_attributes_that_are_refused(frontend, registered, attributes, text):
    with pytest.raises((ValueError, RuntimeError), match=f"test_tvm_scale: {text}"):
        frontend.run(lambda ops, x: ops.ffi_call("test_tvm_scale", like((6,)))(x, **attributes), {"x": X})


def test_registrations_that_are_refused(registered, monkeypatch):
    register = xg.register_tvm_ffi_target
    with pytest.raises(TargetError, match="test_tvm_scale: it is registered on platform 'cpu' already, with another"):
        register("test_tvm_scale", registered.fail, platform="cpu", arguments=SCALE)
    register("test_tvm_scale", registered.scale, platform="cpu", arguments=SCALE)  # the same once more is none
    with pytest.raises(TargetError, match=r"test_tvm: arguments: expected 'args', .* got 'args\.x'"):
        register("test_tvm", registered.scale, platform="cpu", arguments=("args.x",))
    with pytest.raises(TargetError, match="platform: expected 'cpu' or 'CUDA', got 'gpu'"):
        register("test_tvm", registered.scale, platform="gpu")
    with pytest.raises(TypeError, match=r"function: expected a tvm_ffi\.Function"):
        register("test_tvm", len, platform="cpu")
    with pytest.raises(TypeError, match="name: expected a string that is not empty"):
        register("", registered.scale, platform="cpu")


def test_from_many_threads(registered):
    """A handler finds its function by a number of the thread."""
    failures = []

    def work(factor):
        x = torch.ones(1000)
        for _ in range(100):
            if not (xg.ffi_call("test_tvm_scale", x)(x, factor=float(factor)) == factor).all():
                failures.append(factor)
            try:
                xg.ffi_call("test_tvm_fail", x)(x)
                failures.append("no error")
            except RuntimeError:
                pass

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- On a GPU --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session", params=[False, True], ids=["launched", "captured"])
def copy_target(request, module):
    name = f"test_tvm_copy_{request.param}"
    xg.register_tvm_ffi_target(name, module.copy, allow_capture=request.param)
    return name


def copied_and_changed(call):
    """Ten copies, each of what XLA or PyTorch wrote just before on the same stream."""

    def body(ops, x):
        for _ in range(10):
            x = call(x) + 1
        return x

    return body


@pytest.mark.frontends("eager-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled")
def test_functions_run_on_the_programs_stream(frontend, copy_target):
    x = np.zeros(1 << 20, np.float32)
    call = xg.ffi_call(copy_target, like(x.shape))
    for _ in range(3):
        np.testing.assert_array_equal(frontend.run(copied_and_changed(call), {"x": x})[0], x + 10)


@pytest.mark.frontends("jax-cuda")
def test_functions_run_on_the_programs_stream_in_jax(frontend, copy_target, module):
    import jax

    import xla_gpu.jax as xj

    xj.register_tvm_ffi_target(copy_target, module.copy, allow_capture=copy_target.endswith("True"))
    x = np.zeros(1 << 20, np.float32)
    call = jax.ffi.ffi_call(copy_target, jax.ShapeDtypeStruct(x.shape, np.float32))
    for _ in range(3):
        np.testing.assert_array_equal(frontend.run(copied_and_changed(call), {"x": x})[0], x + 10)
