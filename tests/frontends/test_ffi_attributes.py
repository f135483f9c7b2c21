"""Attributes of ffi_call: their types in the handler are those of jax.ffi.ffi_call."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.frontends.third_party_handlers import A, ffi, run, spec, torch

pytestmark = [
    pytest.mark.frontends("eager", "torch_xla", "torch_xla-compiled"),
    pytest.mark.usefixtures("ffi_targets"),
]


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
def test_attribute_types(frontend, name):
    value, want = ATTRIBUTES[name]
    call = ffi.ffi_call("xla_gpu_test_describe", spec((256,), torch.uint8)).bind(x=value)
    if name in ("np-float16", "np-bfloat16") and frontend.name != "eager":
        # XLA's own limit, for jax.ffi too.
        with pytest.raises((RuntimeError, ValueError, TypeError), match=r"attribute:? x"):
            run(frontend, call, A)
        return
    (out,) = run(frontend, call, A)
    assert bytes(out).rstrip(b"\0").decode() == f"x={want}"


# jax 0.10 turns np.bool_ into a double that is no number anybody wrote.
@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name != "np-bool"])
@pytest.mark.frontends("eager")
def test_attribute_types_are_those_of_jax(frontend, name, third_party):
    """Whatever jax.ffi takes arrives the same way from us."""
    jax = pytest.importorskip("jax")
    value, _ = ATTRIBUTES[name]
    target = jax.ffi.pycapsule(third_party.xla_gpu_test_describe)
    jax.ffi.register_ffi_target("xla_gpu_test_describe", target, platform="cpu")
    call = jax.ffi.ffi_call("xla_gpu_test_describe", jax.ShapeDtypeStruct((256,), np.uint8))
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            theirs = np.asarray(call(A, x=value))
    except Exception as e:
        pytest.skip(f"jax {jax.__version__} does not take it: {type(e).__name__}")
    (ours,) = run(frontend, ffi.ffi_call("xla_gpu_test_describe", spec((256,), torch.uint8)).bind(x=value), A)
    assert bytes(ours).rstrip(b"\0") == bytes(theirs).rstrip(b"\0")


@pytest.mark.parametrize("value", [None, 1j, print, np.complex64(1), 2**63, [1, 2], np.array(["a"])], ids=repr)
@pytest.mark.frontends("eager", "torch_xla")
def test_attributes_of_other_types_are_refused(frontend, value):
    with pytest.raises((TypeError, ValueError), match="xla_gpu_test_describe: attribute x: expected"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_describe", spec((9,), torch.uint8))(a, x=value), A)


@pytest.mark.frontends("eager", "torch_xla")
def test_a_handler_that_wants_another_type_says_so(frontend):
    """A Python float is a double; this handler wants a float."""
    with pytest.raises((ValueError, RuntimeError), match="expected F32 but got F64"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_scale", a)(a, factor=2.0), A)
