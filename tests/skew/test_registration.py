"""Handlers and runtimes whose FFI versions do not fit each other, and names that are taken: refused by an exception at
registration, before anything of the handler runs."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.common.process import error_of, run

PRELUDE = """
import ctypes as ct, os
from xla_gpu._runtime import abi, library, targets
third_party = ct.CDLL(os.environ["XLA_GPU_TEST_HANDLERS"])
cdll = library.load().cdll

def address(name):
    return ct.cast(getattr(third_party, "xla_gpu_test_" + name), ct.c_void_p).value

def stages(name):
    return ct.byref(abi.Stages(None, None, None, address(name)))

def say(error):
    print("None" if error is None else error.decode())
"""
UNFIT = {
    "next_minor": ["XLA FFI API 0.2", "0.1"],
    "next_major": ["XLA FFI API 1.0", "0.1"],
    "no_version": ["typed XLA FFI handler"],
    "refuses_question": ["which XLA FFI API it was built with", "expected 1000, got 256"],
    "throws": ["a C++ exception out of a handler"],
}
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_torch_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


@pytest.fixture(autouse=True)
def handlers(third_party):
    """All of these need the library of ffi/testing."""


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("stage", ["execute", "instantiate"])
def test_register_ffi_target(name, stage):
    """What xla_gpu.torch.register_ffi_target does, without a framework. The other stage is sound."""
    sound = "" if stage == "execute" else "'execute': third_party.xla_gpu_test_negate, "
    fn = f"{{{sound}'{stage}': third_party.xla_gpu_test_{name}}}"
    text = error_of(PRELUDE + f"targets.register('some_target', {fn})")
    assert text.startswith("xla_gpu.errors.TargetError: FFI target 'some_target'")
    assert all(part in text for part in UNFIT[name]), text
    if name == "next_minor":
        assert "jaxlib 0.7 ships 0.1" in text


@pytest.mark.parametrize("name", UNFIT)
def test_an_eager_call(name):
    """xla_gpu_call checks again, for callers who do not register."""
    code = f"""
args = abi.CallArgs(struct_size=ct.sizeof(abi.CallArgs), device_ordinal=-1)
args.stages.execute = address("{name}")
code = ct.c_int32()
say(cdll.xla_gpu_call(ct.byref(args), ct.byref(code)))
assert code.value != 0
"""
    text = run(PRELUDE + code)
    assert text.startswith("xla_gpu_call: execute stage:") and all(part in text for part in UNFIT[name]), text


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("mode", ["", "bare"])
def test_a_plugin(fake_plugin, name, mode):
    code = """
plugin = ct.CDLL(os.environ["FAKE"])
plugin.GetPjrtApi.restype = ct.c_void_p
say(cdll.xla_gpu_register_pjrt(plugin.GetPjrtApi(), b"some_target", stages("NAME")))
""".replace("NAME", name)
    text = run(PRELUDE + code, FAKE=str(fake_plugin), FAKE_PJRT=mode)
    assert text.startswith("registering some_target on CUDA: ")
    parts = ["PJRT_Gpu_Custom_Call", "jax-cuda12-pjrt"] if mode == "bare" else UNFIT[name]
    assert all(part in text for part in parts), text


RUNTIMES = {
    "too small": ("ct.c_size_t.from_buffer(api).value = 40", ["40 bytes", "no function that registers handlers"]),
    "without the function": ("ct.c_size_t.from_buffer(api, 72).value = 0", ["no function that registers handlers"]),
    "older": ("ct.c_int.from_buffer(api, 36).value = 0", ["XLA FFI API 0.1", "offers API 0.0"]),
    "newer": ("ct.c_int.from_buffer(api, 36).value = 9", None),
    "another major": ("ct.c_int.from_buffer(api, 32).value = 1", ["XLA FFI API 0.1", "offers API 1.1"]),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime(runtime):
    """An XLA_FFI_Api of another version; its register function counts as called by its error."""
    change, parts = RUNTIMES[runtime]
    code = f"""
# struct_size, extensions, version (struct_size, extensions, major, minor), internals, then the functions
Refuse = ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)
register = Refuse(lambda args: None)
api = (ct.c_char * 400)()
ct.c_size_t.from_buffer(api).value = 400
ct.c_int.from_buffer(api, 36).value = 1
for at in range(48, 400, 8):
    ct.c_void_p.from_buffer(api, at).value = ct.cast(register, ct.c_void_p).value
{change}
say(cdll.xla_gpu_register_ffi(ct.addressof(api), b"some_target", b"Host", stages("negate")))
"""
    text = run(PRELUDE + code)
    if parts is None:
        assert text == "None"
    else:
        assert text.startswith("registering some_target on Host: ") and all(part in text for part in parts), text


@needs_jax
@pytest.mark.parametrize("name", ["next_minor", "next_major"])
def test_jax_refuses_by_an_exception(name):
    """Users register their own handlers with jax.ffi itself; a version above that of every jaxlib there is."""
    code = f"""
import jax, numpy as np
from xla_gpu._runtime import targets
jax.ffi.register_ffi_target("some_target", targets.capsule(address("{name}")), platform="cpu")
call = jax.ffi.ffi_call("some_target", jax.ShapeDtypeStruct((3,), np.float32))
print(call(np.ones(3, np.float32)))
"""
    if name == "next_minor":  # 0.2, which newer runtimes take
        pytest.importorskip("jax")
        import jaxlib

        if tuple(map(int, jaxlib.__version__.split(".")[:2])) >= (0, 8):
            pytest.skip(f"jaxlib {jaxlib.__version__} takes handlers of API 0.2")
    text = error_of(PRELUDE + code)
    assert "version" in text.lower() and "some_target" in text, text


@needs_torch_xla
def test_torch_xla_runtime():
    """Its own FFI API, without the checks of register_ffi_target before it; all in one process."""
    code = f"""
import torch_xla
from xla_gpu._torch_xla import host_ffi_api
for name in {list(UNFIT)!r}:
    say(cdll.xla_gpu_register_ffi(host_ffi_api.ffi_api(), b"some_target", b"Host", stages(name)))
"""
    texts = run(PRELUDE + code, PJRT_DEVICE="CPU").splitlines()
    for text, parts in zip(texts, UNFIT.values(), strict=True):
        assert text.startswith("registering some_target on Host: ") and all(part in text for part in parts), text


# ---- A name that is taken --------------------------------------------------------------------------------------------
@needs_torch_xla
def test_a_name_that_torch_xla_knows_already():
    """As from a second copy of the library in the process."""
    code = """
import torch, torch_xla, xla_gpu.torch
from xla_gpu._torch_xla import host_ffi_api
api = host_ffi_api.ffi_api()
say(cdll.xla_gpu_register_ffi(api, b"xla_gpu_simple_add", b"Host", stages("negate")))
say(cdll.xla_gpu_register_ffi(api, b"xla_gpu_simple_add", b"Host", stages("negate")))
a = torch.ones(3, device="xla")
try:
    print(xla_gpu.torch.simple_add(a, a))
except Exception as error:
    print(type(error).__name__, error)
"""
    lines = run(PRELUDE + code, PJRT_DEVICE="CPU").splitlines()
    assert lines[:2] == ["None", "None"]  # the same address twice is no conflict
    assert lines[2].startswith("TargetError FFI target 'xla_gpu_simple_add' was refused by torch_xla's cpu runtime")
    assert "Duplicate" in lines[2] or "already" in lines[2]
    assert "second copy of the library" in lines[2]


@needs_jax
def test_a_name_that_jax_knows_already():
    code = """
import jax, numpy as np
jax.ffi.register_ffi_target("xla_gpu_simple_add", targets.capsule(address("negate")), platform="cpu")
jax.devices("cpu")
import xla_gpu.jax  # registers its targets, and leaves the refusal to the first call
for _ in range(2):  # a second call is refused too, and runs neither handler
    try:
        print(xla_gpu.jax.simple_add(np.ones(3, np.float32), np.ones(3, np.float32)))
    except Exception as error:
        print(type(error).__name__, error)
"""
    lines = run(PRELUDE + code, JAX_PLATFORMS="cpu").splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("TargetError FFI target 'xla_gpu_simple_add' was refused by JAX's cpu runtime"), line
        assert "second copy of the library" in line


def test_two_functions_of_one_name():
    code = """
targets.register("some_target", third_party.xla_gpu_test_negate)
targets.register("some_target", third_party.xla_gpu_test_negate)
targets.register("some_target", third_party.xla_gpu_test_tick)
"""
    text = error_of(PRELUDE + code)
    assert text.startswith("xla_gpu.errors.TargetError: FFI target 'some_target' is already registered")


@needs_torch
def test_two_copies_of_the_library(tmp_path):
    """One loaded by hand beside the package's: eager tensors use the package's, and neither disturbs the other."""
    code = f"""
import shutil, torch, xla_gpu.torch
copy = shutil.copy(library.load().path, {str(tmp_path / "copy.so")!r})
other = ct.CDLL(copy)
other.xla_gpu_build_info.restype = ct.c_char_p
assert other.xla_gpu_build_info() == cdll.xla_gpu_build_info()
print(xla_gpu.torch.simple_add(torch.ones(2), torch.ones(2)).tolist())
"""
    assert run(PRELUDE + code) == "[2.0, 2.0]"
    assert os.path.exists(tmp_path / "copy.so")
