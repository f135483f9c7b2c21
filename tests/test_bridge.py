"""register_ffi_target and ffi_call: other people's handlers in torch_xla and on eager tensors, with the meaning of
jax.ffi's functions of these names."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import compare

torch = pytest.importorskip("torch")
ffi = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)
from xla_gpu import errors  # noqa: E402

pytestmark = pytest.mark.doors("eager", "torch_xla", "torch_xla-compiled")

HANDLERS = ("scale", "negate", "two_results", "raw_copy", "increment", "tick", "fail", "describe")


@pytest.fixture(scope="module", autouse=True)
def targets(foreign):
    """All handlers, registered as users would: each form of `fn` is among them."""
    for name in HANDLERS:
        function = foreign[f"xla_gpu_test_{name}"]
        ffi.register_ffi_target(f"xla_gpu_test_{name}", capsule(function) if name == "scale" else function)
    stages = {s: foreign[f"xla_gpu_test_staged_{s}"] for s in ("instantiate", "prepare", "initialize", "execute")}
    ffi.register_ffi_target("xla_gpu_test_staged", stages)
    ffi.register_ffi_target("xla_gpu_test_negate_dict", {"execute": foreign.xla_gpu_test_negate}, platform="cpu")


def capsule(function):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.cast(function, ctypes.c_void_p), None, None)


def spec(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def run(door, body, *arrays):
    """body(*tensors) in the door; NumPy results."""
    return door.run(lambda ops, **t: body(*t.values()), {f"x{i}": a for i, a in enumerate(arrays)})


A = np.arange(6, dtype=np.float32)


# ---- Results, attributes, aliases, layouts ---------------------------------------------------------------------------
def test_one_result_and_a_typed_attribute(door):
    call = ffi.ffi_call("xla_gpu_test_scale", spec((6,))).bind(factor=np.float32(2.5))
    compare.assert_bitwise_equal(run(door, call, A)[0], A * np.float32(2.5), door.name)


def test_attribute_values_are_not_confused(door):
    """The reason for this project's own way into torch_xla."""
    for factor in (2.0, 5.0, -0.0, 2.0):
        call = ffi.ffi_call("xla_gpu_test_scale", spec((6,))).bind(factor=np.float32(factor))
        compare.assert_bitwise_equal(run(door, call, A)[0], A * np.float32(factor), f"{door.name} {factor}")

    def both(a):
        return tuple(ffi.ffi_call("xla_gpu_test_scale", a).bind(factor=f)(a) for f in (np.float32(2), np.float32(5)))

    if not door.name.endswith("-compiled"):  # there, NumPy scalars go through .bind outside
        first, second = run(door, both, A)
        np.testing.assert_array_equal(first, A * 2)
        np.testing.assert_array_equal(second, A * 5)


def test_attributes_given_inside_torch_compile(door):
    """Plain Python values need no .bind."""

    def body(a):
        return ffi.ffi_call("xla_gpu_test_describe", spec((64,), torch.uint8))(a, n=3, flag=True, text="x")

    (out,) = run(door, body, A)
    assert bytes(out).rstrip(b"\0") == b"flag=scalar:1:01 n=scalar:5:0300000000000000 text=string:78"


@pytest.mark.parametrize("container", [tuple, list])
def test_several_results_in_the_container_asked_for(door, container):
    kinds = []

    def body(a):
        results = ffi.ffi_call("xla_gpu_test_two_results", container([a, spec((), torch.int32)]))(a)
        kinds.append(type(results))
        return tuple(results)

    plus_one, count = run(door, body, A)
    np.testing.assert_array_equal(plus_one, A + 1)
    assert count.dtype == np.int32 and count.shape == () and int(count) == 6
    assert set(kinds) == {container}


class Described:
    """Anything with shape and dtype."""

    shape, dtype = (6,), np.dtype(np.float32)


@pytest.mark.parametrize(
    "result", [Described(), spec((6,)), torch.zeros(6), A], ids=["object", "meta", "tensor", "numpy"]
)
@pytest.mark.doors("eager", "torch_xla")
def test_what_describes_a_result(door, result):
    (out,) = run(door, ffi.ffi_call("xla_gpu_test_negate", result), A)
    np.testing.assert_array_equal(out, -A)


def test_jax_shape_dtype_struct_describes_a_result(door):
    jax = pytest.importorskip("jax")
    (out,) = run(door, ffi.ffi_call("xla_gpu_test_negate", jax.ShapeDtypeStruct((6,), np.float32)), A)
    np.testing.assert_array_equal(out, -A)


def test_empty_operand(door):
    (out,) = run(door, ffi.ffi_call("xla_gpu_test_negate", spec((0,))), A[:0])
    assert out.shape == (0,)


def test_alias_shares_the_buffer_and_keeps_the_operand(door):
    """The handler refuses two buffers; the operand that the caller still holds keeps its value."""

    def body(a):
        out = ffi.ffi_call("xla_gpu_test_increment", a, input_output_aliases={0: 0})(a)
        return out, a + 0

    out, kept = run(door, body, A)
    np.testing.assert_array_equal(out, A + 1)
    np.testing.assert_array_equal(kept, A)


def test_without_the_alias_the_handler_sees_two_buffers(door):
    with pytest.raises((RuntimeError, ValueError), match="the operand was copied"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_increment", a)(a), A)


LAYOUTS = [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_order_axes_from_major_to_minor(door, layout):
    """As in jax.ffi. raw_copy shows in which order the elements lie."""
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    (flat,) = run(door, ffi.ffi_call("xla_gpu_test_raw_copy", spec((24,)), input_layouts=[layout]), a)
    np.testing.assert_array_equal(flat, a.transpose(layout).reshape(-1))
    (back,) = run(door, ffi.ffi_call("xla_gpu_test_raw_copy", spec((2, 3, 4)), output_layouts=layout), flat)
    np.testing.assert_array_equal(back, a)
    both = ffi.ffi_call("xla_gpu_test_raw_copy", [spec((2, 3, 4))], input_layouts=[layout], output_layouts=[layout])
    np.testing.assert_array_equal(run(door, both, a)[0], a)


@pytest.mark.doors("eager")
def test_layouts_mean_what_they_mean_in_jax(door, foreign):
    jax = pytest.importorskip("jax")
    jax.ffi.register_ffi_target(
        "xla_gpu_test_raw_copy", jax.ffi.pycapsule(foreign.xla_gpu_test_raw_copy), platform="cpu"
    )
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for layout in LAYOUTS:
        with jax.default_device(jax.devices("cpu")[0]):
            call = jax.ffi.ffi_call(
                "xla_gpu_test_raw_copy", jax.ShapeDtypeStruct((24,), np.float32), input_layouts=[layout]
            )
            theirs = np.asarray(jax.jit(call)(a))
        (ours,) = run(door, ffi.ffi_call("xla_gpu_test_raw_copy", spec((24,)), input_layouts=[layout]), a)
        compare.assert_bitwise_equal(ours, theirs, str(layout))


# ---- Typing of attributes --------------------------------------------------------------------------------------------
def scalar(code, value):
    return f"scalar:{code}:{np.asarray(value).tobytes().hex()}"


ATTRIBUTES = {
    "bool": (True, "scalar:1:01"),
    "int": (-7, scalar(5, np.int64(-7))),
    "int-largest": (2**63 - 1, scalar(5, np.int64(2**63 - 1))),
    "float": (0.1, scalar(12, np.float64(0.1))),
    "float-nan": (float("nan"), scalar(12, np.float64("nan"))),
    "float-minus-zero": (-0.0, scalar(12, np.float64(-0.0))),
    "float-infinite": (float("-inf"), scalar(12, np.float64("-inf"))),
    "str": ('a "quoted" \\ \n line', "string:" + b'a "quoted" \\ \n line'.hex()),
    "str-unicode": ("µ→", "string:" + "µ→".encode().hex()),
    "str-empty": ("", "string:"),
    "np-bool": (np.bool_(False), "scalar:1:00"),
    "np-int8": (np.int8(-1), scalar(2, np.int8(-1))),
    "np-int32": (np.int32(-5), scalar(4, np.int32(-5))),
    "np-uint64": (np.uint64(2**64 - 1), scalar(9, np.uint64(2**64 - 1))),
    "np-float32": (np.float32(0.1), scalar(11, np.float32(0.1))),
    "np-float32-nan": (np.float32("nan"), scalar(11, np.float32("nan"))),
    "np-float16": (np.float16(0.1), scalar(10, np.float16(0.1))),
    "np-bfloat16": (ml_dtypes.bfloat16(0.1), scalar(16, np.asarray(0.1, ml_dtypes.bfloat16))),
    "array-int64": (np.array([1, -2, 3]), "array:5:3:" + np.array([1, -2, 3]).tobytes().hex()),
    "array-float32": (
        np.array([0.5, np.inf], np.float32),
        "array:11:2:" + np.array([0.5, np.inf], np.float32).tobytes().hex(),
    ),
    "array-one": (np.array([7], np.int32), "array:4:1:07000000"),
    "array-same": (np.array([7, 7, 7], np.int32), "array:4:3:" + "07000000" * 3),
    "dict": ({"b": 1, "a": np.float32(2)}, "{a=scalar:11:00000040 b=" + scalar(5, np.int64(1)) + "}"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_types(door, name):
    value, want = ATTRIBUTES[name]
    call = ffi.ffi_call("xla_gpu_test_describe", spec((256,), torch.uint8)).bind(x=value)
    if name in ("np-float16", "np-bfloat16") and door.name != "eager":
        # XLA's own limit, for jax.ffi too.
        with pytest.raises((RuntimeError, ValueError, TypeError), match=r"attribute:? x"):
            run(door, call, A)
        return
    (out,) = run(door, call, A)
    assert bytes(out).rstrip(b"\0").decode() == f"x={want}"


# jax 0.10 turns np.bool_ into a double that is no number anybody wrote.
@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name != "np-bool"])
@pytest.mark.doors("eager")
def test_attribute_types_are_those_of_jax(door, name, foreign):
    """Whatever jax.ffi takes arrives the same way from us."""
    jax = pytest.importorskip("jax")
    value, _ = ATTRIBUTES[name]
    target = jax.ffi.pycapsule(foreign.xla_gpu_test_describe)
    jax.ffi.register_ffi_target("xla_gpu_test_describe", target, platform="cpu")
    call = jax.ffi.ffi_call("xla_gpu_test_describe", jax.ShapeDtypeStruct((256,), np.uint8))
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            theirs = np.asarray(call(A, x=value))
    except Exception as e:
        pytest.skip(f"jax {jax.__version__} does not take it: {type(e).__name__}")
    (ours,) = run(door, ffi.ffi_call("xla_gpu_test_describe", spec((256,), torch.uint8)).bind(x=value), A)
    assert bytes(ours).rstrip(b"\0") == bytes(theirs).rstrip(b"\0")


@pytest.mark.parametrize("value", [None, 1j, object(), np.complex64(1), 2**63, [1, 2], np.array(["a"])], ids=repr)
@pytest.mark.doors("eager", "torch_xla")
def test_attributes_of_other_types_are_refused(door, value):
    with pytest.raises((TypeError, ValueError), match="xla_gpu_test_describe: attribute x: expected"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_describe", spec((9,), torch.uint8))(a, x=value), A)


@pytest.mark.doors("eager", "torch_xla")
def test_a_handler_that_wants_another_type_says_so(door):
    """A Python float is a double; this handler wants a float."""
    with pytest.raises((ValueError, RuntimeError), match="expected F32 but got F64"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_scale", a)(a, factor=2.0), A)


# ---- Side effects and stages -----------------------------------------------------------------------------------------
def test_side_effects_happen_though_nobody_uses_the_result(door, foreign):
    before = foreign.xla_gpu_test_ticks()

    def body(a):
        unused = ffi.ffi_call("xla_gpu_test_tick", a, has_side_effect=True)(a)
        # torch_xla's graph holds what live tensors need: the result must still be kept until the program runs.
        return (a + 1, unused) if door.name.startswith("torch_xla") else a + 1

    run(door, body, A)
    assert foreign.xla_gpu_test_ticks() == before + 1


def test_all_stages_run(door, foreign):
    stages = range(4)  # instantiate, prepare, initialize, execute
    before = [foreign.xla_gpu_test_stage_calls(s) for s in stages]
    (out,) = run(door, ffi.ffi_call("xla_gpu_test_staged", spec((6,))).bind(key=7), A)
    np.testing.assert_array_equal(out, A)
    calls = [foreign.xla_gpu_test_stage_calls(s) - b for s, b in zip(stages, before, strict=True)]
    # XLA's CPU runtime knows two stages, its GPU runtime and the eager door all four.
    wanted = [1, 1, 1, 1] if door.name == "eager" else [1, 0, 0, 1]
    assert [min(c, 1) for c in calls] == wanted, calls


@pytest.mark.doors("eager", "torch_xla")
def test_an_error_of_an_early_stage_comes_through(door):
    with pytest.raises((ValueError, RuntimeError), match="key is not 7"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_staged", a)(a, key=8), A)


@pytest.mark.parametrize("code", [2, 3, 5, 8, 13])
@pytest.mark.doors("eager", "torch_xla")
def test_an_error_of_the_handler_comes_through(door, code):
    """Every code, with its text; eagerly, InvalidArgument (3) is a ValueError and the others are a HandlerError."""
    message = f"a text that only this test knows, {code}"
    kind = {3: ValueError}.get(code, errors.HandlerError) if door.name == "eager" else (RuntimeError, ValueError)
    with pytest.raises(kind, match=message):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_fail", a)(a, code=code, message=message), A)


# ---- Refusals --------------------------------------------------------------------------------------------------------
def test_target_that_is_not_registered(door):
    with pytest.raises(
        Exception, match=r"'xla_gpu_test_nobody' is not registered on platform 'cpu'.*not registered anywhere"
    ):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_nobody", a)(a), A)


def test_target_of_another_platform(door, foreign):
    ffi.register_ffi_target("xla_gpu_test_only_cuda", foreign.xla_gpu_test_negate, platform="CUDA")
    with pytest.raises(
        Exception, match=r"'xla_gpu_test_only_cuda' is not registered on platform 'cpu'.*registered on CUDA"
    ):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_only_cuda", a)(a), A)


@pytest.mark.doors("eager", "torch_xla")
def test_wrong_signature(door):
    """Operands, results and attributes that the handler does not bind: its own words, from the FFI's decoding."""
    two = ffi.ffi_call("xla_gpu_test_negate", spec((6,)))
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)arguments|operands"):
        run(door, lambda a: two(a, a), A)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)results|rets"):
        run(door, lambda a: tuple(ffi.ffi_call("xla_gpu_test_negate", (a, a))(a)), A)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)factor|attribute"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_scale", a)(a), A)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)dtype|type|buffer"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_negate", spec((6,)))(a), A.astype(np.int32))
    (out,) = run(door, ffi.ffi_call("xla_gpu_test_negate", spec((6,))), A)
    np.testing.assert_array_equal(out, -A)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input_output_aliases": {1: 0}}, "input_output_aliases.*expected an operand below 1"),
        ({"input_output_aliases": {0: 1}}, "input_output_aliases.*a result below 1"),
        ({"input_layouts": [None, None]}, "input_layouts: expected 1 layouts, got 2"),
        ({"input_layouts": [(1,)]}, "input_layouts.*expected an order of 1 axes"),
        ({"output_layouts": (0, 1)}, "output_layouts"),
    ],
    ids=lambda x: str(x)[:40],
)
@pytest.mark.doors("eager", "torch_xla")
def test_arguments_that_do_not_fit_together(door, arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_negate", spec((6,)), **arguments)(a), A)


@pytest.mark.doors("eager", "torch_xla")
def test_alias_of_another_shape(door):
    with pytest.raises(ValueError, match=r"input_output_aliases.*one shape and dtype"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_negate", spec((7,)), input_output_aliases={0: 0})(a), A)


@pytest.mark.doors("eager", "torch_xla")
def test_a_call_without_operands(door):
    with pytest.raises(ValueError, match="at least one operand"):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_negate", a)(), A)


@pytest.mark.doors("eager")
def test_registering_a_name_twice(door, foreign):
    del door
    ffi.register_ffi_target("xla_gpu_test_negate", foreign.xla_gpu_test_negate)  # the same function: fine
    ffi.register_ffi_target("xla_gpu_test_negate", capsule(foreign.xla_gpu_test_negate))
    with pytest.raises(errors.TargetError, match=r"'xla_gpu_test_negate' is already registered.*another function"):
        ffi.register_ffi_target("xla_gpu_test_negate", foreign.xla_gpu_test_tick)


@pytest.mark.doors("eager")
def test_an_operator_of_ours_cannot_be_replaced(door, foreign):
    del door
    with pytest.raises(errors.TargetError, match=r"xla_gpu_simple_add.*already registered"):
        ffi.register_ffi_target("xla_gpu_simple_add", foreign.xla_gpu_test_negate)


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
@pytest.mark.doors("eager")
def test_register_refuses(door, foreign, arguments, error, text):
    del door
    call = {"name": "xla_gpu_test_refused", "fn": foreign.xla_gpu_test_negate} | arguments
    with pytest.raises(error, match=text):
        ffi.register_ffi_target(**call)


@pytest.mark.doors("eager")
def test_a_function_that_is_no_handler(door):
    """Some C function, whatever it does: an error, no crash. In its own process, to be able to tell."""
    del door
    code = """
import ctypes, torch, xla_gpu.torch as ffi
callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda frame: None)
try:
    ffi.register_ffi_target("not_a_handler", callback)
    ffi.ffi_call("not_a_handler", torch.ones(3))(torch.ones(3))
except (ValueError, RuntimeError) as e:
    print(type(e).__name__, e)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "not_a_handler" in result.stdout and "typed XLA FFI handler" in result.stdout


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


@pytest.mark.doors("torch_xla")
def test_handler_of_a_newer_api(door, newer):
    """Which version it has, which torch_xla has, and what to do."""
    function, minor = newer
    name = "xla_gpu_test_newer"
    with pytest.raises(errors.TargetError) as caught:
        ffi.register_ffi_target(name, function)
        run(door, lambda a: ffi.ffi_call(name, a)(a), A)
    text = str(caught.value)
    assert name in text and f"0.{minor}" in text and "0.1" in text
    assert "jaxlib" in text, f"no remedy: {text}"


# ---- On CUDA ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cuda_targets(foreign):
    ffi.register_ffi_target("xla_gpu_test_fill", foreign.xla_gpu_test_fill_cuda, platform="CUDA")
    ffi.register_ffi_target("xla_gpu_test_raw_copy", foreign.xla_gpu_test_raw_copy_cuda, platform="CUDA")


CUDA = pytest.mark.doors("eager-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled")


@CUDA
def test_cuda_handler_runs_on_the_doors_stream(door, cuda_targets):
    """What the handler queued comes before what is queued next."""
    for value in (2.0, -3.5):
        call = ffi.ffi_call("xla_gpu_test_fill", spec((1 << 20,))).bind(value=np.float32(value))
        (out,) = run(door, lambda a, call=call: call(a) + a[0], A)
        assert (out == value).all()


@CUDA
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cuda_layouts(door, cuda_targets, layout):
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    (flat,) = run(door, ffi.ffi_call("xla_gpu_test_raw_copy", spec((24,)), input_layouts=[layout]), a)
    np.testing.assert_array_equal(flat, a.transpose(layout).reshape(-1))
    (back,) = run(door, ffi.ffi_call("xla_gpu_test_raw_copy", spec((2, 3, 4)), output_layouts=layout), flat)
    np.testing.assert_array_equal(back, a)


@CUDA
def test_cuda_target_that_is_registered_for_cpu_alone(door, cuda_targets):
    with pytest.raises(
        Exception, match=r"'xla_gpu_test_negate' is not registered on platform 'CUDA'.*registered on cpu"
    ):
        run(door, lambda a: ffi.ffi_call("xla_gpu_test_negate", a)(a), A)


# ---- Threads ---------------------------------------------------------------------------------------------------------
@pytest.mark.doors("eager")
def test_from_many_threads(door):
    del door
    failures = []

    def work(factor):
        call = ffi.ffi_call("xla_gpu_test_scale", spec((1000,)))
        a = torch.ones(1000)
        for _ in range(200):
            if not (call(a, factor=np.float32(factor)) == factor).all():
                failures.append(factor)

    threads = [threading.Thread(target=work, args=(f,)) for f in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


@pytest.mark.doors("torch_xla")
def test_export_keeps_foreign_calls(door):
    """torch.export, as StableHLO."""
    from torch_xla.stablehlo import exported_program_to_stablehlo

    call = ffi.ffi_call("xla_gpu_test_scale", spec((6,))).bind(factor=np.float32(3))

    class Model(torch.nn.Module):
        def forward(self, a):
            return call(a) + 1

    stablehlo = exported_program_to_stablehlo(torch.export.export(Model(), (torch.from_numpy(A),)))
    text = stablehlo.get_stablehlo_text()
    assert "@xla_gpu_test_scale" in text and "api_version = 4" in text
    np.testing.assert_array_equal(stablehlo(torch.from_numpy(A)).cpu().numpy(), A * 3 + 1)
