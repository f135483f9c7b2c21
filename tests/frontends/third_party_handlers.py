"""What the tests of register_ffi_target and ffi_call share: the handlers of ffi/testing, registered as users would, and
their results as NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

torch = pytest.importorskip("torch")  # and so skips the modules of tests that need this one
ffi = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

A = np.arange(6, dtype=np.float32)
LAYOUTS = [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)]
HANDLERS = ("scale", "negate", "two_results", "raw_copy", "increment", "tick", "fail", "describe")


def register_all(library: ctypes.CDLL) -> None:
    """All handlers of ffi/testing, registered as users would: each form of `fn` is among them."""
    for name in HANDLERS:
        function = library[f"xla_gpu_test_{name}"]
        ffi.register_ffi_target(f"xla_gpu_test_{name}", capsule(function) if name == "scale" else function)
    stages = {s: library[f"xla_gpu_test_staged_{s}"] for s in ("instantiate", "prepare", "initialize", "execute")}
    ffi.register_ffi_target("xla_gpu_test_staged", stages)
    ffi.register_ffi_target("xla_gpu_test_negate_dict", {"execute": library.xla_gpu_test_negate}, platform="cpu")


def capsule(function):
    """A PyCapsule, as jax.ffi.pycapsule makes it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.cast(function, ctypes.c_void_p), None, None)


def spec(shape, dtype=torch.float32):
    """A description of a result."""
    return torch.empty(shape, dtype=dtype, device="meta")


def run(frontend, body, *arrays):
    """The results of body(*tensors) as NumPy arrays."""
    return frontend.run(lambda ops, **t: body(*t.values()), {f"x{i}": a for i, a in enumerate(arrays)})
