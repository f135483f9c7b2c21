"""register_ffi_target and ffi_call refuse what does not fit, each with an error that says what was expected."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.common import process
from tests.frontends.third_party_handlers import A, capsule, ffi, run, spec
from xla_gpu import errors

pytestmark = [
    pytest.mark.frontends("eager", "torch_xla", "torch_xla-compiled"),
    pytest.mark.usefixtures("ffi_targets"),
]


# ---- Refusals --------------------------------------------------------------------------------------------------------
def test_target_that_is_not_registered(frontend):
    with pytest.raises(
        Exception, match=r"'xla_gpu_test_nobody' is not registered on platform 'cpu'.*not registered anywhere"
    ):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_nobody", a)(a), A)


def test_target_of_another_platform(frontend, third_party):
    ffi.register_ffi_target("xla_gpu_test_only_cuda", third_party.xla_gpu_test_negate, platform="CUDA")
    with pytest.raises(
        Exception, match=r"'xla_gpu_test_only_cuda' is not registered on platform 'cpu'.*registered on CUDA"
    ):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_only_cuda", a)(a), A)


@pytest.mark.frontends("eager", "torch_xla")
def test_wrong_signature(frontend):
    """Operands, results and attributes that the handler does not bind: its own words, from the FFI's decoding."""
    two = ffi.ffi_call("xla_gpu_test_negate", spec((6,)))
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)arguments|operands"):
        run(frontend, lambda a: two(a, a), A)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)results|rets"):
        run(frontend, lambda a: tuple(ffi.ffi_call("xla_gpu_test_negate", (a, a))(a)), A)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)factor|attribute"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_scale", a)(a), A)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)dtype|type|buffer"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_negate", spec((6,)))(a), A.astype(np.int32))
    (out,) = run(frontend, ffi.ffi_call("xla_gpu_test_negate", spec((6,))), A)
    np.testing.assert_array_equal(out, -A)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input_output_aliases": {1: 0}}, "input_output_aliases.*expected an operand below 1"),
        ({"input_output_aliases": {0: 1}}, "input_output_aliases.*a result below 1"),
        ({"input_layouts": [None, None]}, "input_layouts: expected 1 layouts, got 2"),
        ({"input_layouts": [(1,)]}, "input_layouts.*expected an order of 1 axes"),
        ({"input_layouts": [0.0]}, r"input_layouts: 0: expected an order of 1 axes, got \[0\.0\]"),
        ({"output_layouts": [(0,)]}, r"output_layouts: 0: expected an order of 1 axes, got \[\(0,\)\]"),
        ({"output_layouts": (0, 1)}, "output_layouts"),
    ],
    ids=lambda x: str(x)[:40],
)
@pytest.mark.frontends("eager", "torch_xla")
def test_arguments_that_do_not_fit_together(frontend, arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_negate", spec((6,)), **arguments)(a), A)


@pytest.mark.parametrize(
    ("target", "result", "arguments", "text"),
    [
        (3, spec((6,)), {}, "ffi_call: target_name: expected a str, got int"),
        (
            "mine",
            SimpleNamespace(shape=(6.0,), dtype=A.dtype),
            {},
            r"mine: result 0: expected sizes that are ints, got \(6\.0,\)",
        ),
        (
            "mine",
            SimpleNamespace(shape=(2**63,), dtype=A.dtype),
            {},
            r"mine: result 0: expected sizes of 64 bits, got \(9223372036854775808,\)",
        ),
        ("mine", spec((6,)), {"input_output_aliases": [(0, 0)]}, "input_output_aliases: expected a dict .*, got list"),
        (
            "mine",
            spec((6,)),
            {"input_output_aliases": {"0": 0}},
            "input_output_aliases: expected a dict .*, got {'0': 0}",
        ),
    ],
    ids=range(5),
)
@pytest.mark.frontends("eager")
def test_arguments_of_another_type(frontend, target, result, arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        ffi.ffi_call(target, result, **arguments)


@pytest.mark.frontends("eager", "torch_xla")
def test_vmap_is_refused(frontend):
    """As by jax.ffi.ffi_call without a vmap_method."""
    torch = pytest.importorskip("torch")
    (tensor,) = frontend.tensors({"a": np.ones((2, 6), np.float32)}).values()
    for has_side_effect in (False, True):
        call = ffi.ffi_call("xla_gpu_test_negate", spec((6,)), has_side_effect=has_side_effect)
        with pytest.raises(RuntimeError, match=r"xla_gpu_test_negate: ffi_call cannot run under torch\.vmap: only the"):
            torch.vmap(call)(tensor)


@pytest.mark.frontends("eager")
def test_operands_of_another_type(frontend):
    with pytest.raises(TypeError, match="xla_gpu_test_negate: operand 0: expected a tensor, got ndarray"):
        ffi.ffi_call("xla_gpu_test_negate", spec((6,)))(A)
    with pytest.raises(TypeError, match="simple_add: b: expected a tensor, got ndarray"):
        ffi.simple_add(spec((6,)), A)


@pytest.mark.frontends("eager", "torch_xla")
def test_alias_of_another_shape(frontend):
    with pytest.raises(ValueError, match=r"input_output_aliases.*one shape and dtype"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_negate", spec((7,)), input_output_aliases={0: 0})(a), A)


@pytest.mark.frontends("eager", "torch_xla")
def test_a_call_without_operands(frontend):
    with pytest.raises(ValueError, match="at least one operand"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_negate", a)(), A)


@pytest.mark.frontends("eager")
def test_registering_a_name_twice(frontend, third_party):
    del frontend
    ffi.register_ffi_target("xla_gpu_test_negate", third_party.xla_gpu_test_negate)  # the same function: fine
    ffi.register_ffi_target("xla_gpu_test_negate", capsule(third_party.xla_gpu_test_negate))
    with pytest.raises(errors.TargetError, match=r"'xla_gpu_test_negate' is already registered.*another function"):
        ffi.register_ffi_target("xla_gpu_test_negate", third_party.xla_gpu_test_tick)


@pytest.mark.frontends("eager")
def test_an_operator_of_ours_cannot_be_replaced(frontend, third_party):
    del frontend
    with pytest.raises(errors.TargetError, match=r"xla_gpu_simple_add.*already registered"):
        ffi.register_ffi_target("xla_gpu_simple_add", third_party.xla_gpu_test_negate)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"fn": 12345}, TypeError, "fn: expected a PyCapsule, a ctypes function pointer or a dict"),
        ({"fn": "text"}, TypeError, "fn: expected a PyCapsule"),
        ({"fn": None}, (TypeError, errors.TargetError), "fn: expected|execute"),
        ({"fn": {"instantiate": None}}, (TypeError, errors.TargetError), "'execute'"),
        ({"fn": {"execute": None, "begin": None}}, (TypeError, errors.TargetError), "begin"),
        ({"platform": "TPU"}, errors.TargetError, "platform: expected 'cpu' or 'CUDA', got 'TPU'"),
        ({"api_version": 0}, errors.TargetError, "api_version: expected 1"),
        ({"name": ""}, TypeError, "name: expected a string"),
        ({"name": 3}, TypeError, "name: expected a string"),
    ],
    ids=lambda x: str(x)[:50],
)
@pytest.mark.frontends("eager")
def test_register_refuses(frontend, third_party, arguments, error, text):
    del frontend
    call = {"name": "xla_gpu_test_refused", "fn": third_party.xla_gpu_test_negate} | arguments
    with pytest.raises(error, match=text):
        ffi.register_ffi_target(**call)


@pytest.mark.frontends("eager")
def test_a_function_that_is_no_handler(frontend):
    """Some C function, whatever it does: an error, no crash. In its own process, to be able to tell."""
    del frontend
    code = """
import ctypes, torch, xla_gpu.torch as ffi
callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda frame: None)
try:
    ffi.register_ffi_target("not_a_handler", callback)
    ffi.ffi_call("not_a_handler", torch.ones(3))(torch.ones(3))
except (ValueError, RuntimeError) as e:
    print(type(e).__name__, e)
"""
    text = process.run(code)
    assert "not_a_handler" in text and "typed XLA FFI handler" in text


# ---- A handler of a newer API ----------------------------------------------------------------------------------------
NEWER = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Nothing(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(newer, Nothing, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """A handler compiled against the headers of the installed jaxlib, if those are newer than torch_xla's."""
    import re
    import shutil

    jax = pytest.importorskip("jax")
    include = jax.ffi.include_dir()
    text = Path(include, "xla/ffi/api/c_api.h").read_text()
    minor = int(re.search(r"#define XLA_FFI_API_MINOR (\d+)", text)[1])
    if minor <= 1:
        pytest.skip(f"jaxlib's headers are of API 0.{minor}, as old as torch_xla's")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("newer")
    (folder / "newer.cc").write_text(NEWER)
    command = ["g++", "-O0", "-w", "-std=c++17", "-shared", "-fPIC", "-isystem", include, "newer.cc", "-o", "newer.so"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "newer.so")).newer, minor


@pytest.mark.frontends("torch_xla")
def test_handler_of_a_newer_api(frontend, newer):
    """Which version it has, which torch_xla has, and what to do."""
    function, minor = newer
    name = "xla_gpu_test_newer"
    with pytest.raises(errors.TargetError) as caught:
        ffi.register_ffi_target(name, function)
        run(frontend, lambda a: ffi.ffi_call(name, a)(a), A)
    text = str(caught.value)
    assert name in text and f"0.{minor}" in text and "0.1" in text
    assert "jaxlib" in text, f"no remedy: {text}"
