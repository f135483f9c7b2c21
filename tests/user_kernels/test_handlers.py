"""The target xla_gpu_kernel_call itself, called with what no front end of this package would pass."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

X = torch.arange(8, dtype=torch.float32)
THREE = np.array([1, 1, 1], np.int64)
RIGHT = {
    "arch": "sm_90a",
    "block": THREE,
    "check_inputs": False,
    "cluster": THREE,
    "cooperative": False,
    "cubin": np.frombuffer(b"\x7fELF and so on", np.uint8),
    "grid": THREE,
    "name": "k",
    "parameters": np.array([2, 0, 0, 0, 1, 0, 0], np.int64),
    "pdl": False,
    "shared": 0,
}


def run(**attributes):
    return xg.ffi_call("xla_gpu_kernel_call", X)(X, **{**RIGHT, **attributes})


def test_right_attributes_reach_the_launch():
    with pytest.raises(Exception, match="kernel_call: k: a CUDA kernel runs on an NVIDIA GPU alone"):
        run()


INT64 = np.iinfo(np.int64)
WRONG = {
    "two numbers": (dict(grid=THREE[:2]), "grid: expected 3 numbers, got 2"),
    "no numbers": (dict(block=THREE[:0]), "block: expected 3 numbers, got 0"),
    "grid of 0": (dict(grid=np.array([1, 0, 1])), r"k: grid: expected 1 to .* CTAs, got \(1, 0, 1\)"),
    "negative grid": (dict(grid=np.array([INT64.min, 1, 1])), "k: grid: expected 1 to"),
    "grid past the limit": (dict(grid=np.array([1, 1, 65536])), "k: grid: expected 1 to"),
    "threads": (dict(block=np.array([1024, 2, 1])), "k: block: expected at most 1024 threads"),
    "block past the limit": (dict(block=np.array([1, 1, 65])), "k: block: expected 1 to"),
    "cluster": (dict(cluster=np.array([2, 1, 1])), "k: grid: expected whole clusters"),
    "large cluster": (dict(cluster=np.array([16, 16, 1]), grid=np.array([16, 16, 1])), "at most 16 CTAs in all"),
    "shared": (dict(shared=-1), "k: shared: expected 0 to 1048576 bytes, got -1"),
    "much shared": (dict(shared=2**40), "k: shared: expected 0 to"),
    "no cubin": (dict(cubin=np.zeros(0, np.uint8)), "k: cubin: expected an ELF file, got 0 bytes"),
    "other file": (dict(cubin=np.zeros(9, np.uint8)), "k: cubin: expected an ELF file, got 9 bytes"),
    "empty parameters": (dict(parameters=THREE[:0]), "k: parameters: expected a number and three more"),
    "count": (dict(parameters=np.array([3, 0, 0, 0, 1, 0, 0])), "k: parameters: expected a number and three more"),
    "negative count": (dict(parameters=np.array([-1])), "k: parameters: expected a number and three more"),
    "huge count": (dict(parameters=np.array([INT64.max])), "k: parameters: expected a number and three more"),
    "kind": (dict(parameters=np.array([1, 3, 0, 0])), "k: argument 0: expected an operand, a result or a number"),
    "operand": (dict(parameters=np.array([1, 0, 1, 0])), "k: argument 0: expected one of 1 operands, got operand 1"),
    "negative operand": (dict(parameters=np.array([1, 0, -1, 0])), "k: argument 0: expected one of 1 operands"),
    "result": (dict(parameters=np.array([1, 1, 1, 0])), "k: argument 0: expected one of 1 results, got result 1"),
    "size 0": (dict(parameters=np.array([1, 2, 0, 0])), "k: argument 0: expected a number of 1 to 8 bytes, got 0"),
    "size 9": (dict(parameters=np.array([1, 2, 0, 9])), "k: argument 0: expected a number of 1 to 8 bytes, got 9"),
    "alignment": (dict(parameters=np.array([1, 0, 0, 2**40])), "k: argument 0: expected memory aligned to"),
    "negative alignment": (dict(parameters=np.array([1, 0, 0, -16])), "k: argument 0: expected memory aligned to"),
    "too many bytes": (
        dict(parameters=np.array([4096, *([2, 0, 8] * 4096)])),
        "k: arguments: expected at most 32764 bytes, got 32768",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_attributes(name):
    attributes, text = WRONG[name]
    attributes = {key: v.astype(v.dtype if v.dtype == np.uint8 else np.int64) if hasattr(v, "dtype") else v
                  for key, v in attributes.items()}  # fmt: skip
    with pytest.raises(ValueError, match=text):
        run(**attributes)


@pytest.mark.parametrize("name", RIGHT)
def test_missing_attribute(name):
    given = {key: value for key, value in RIGHT.items() if key != name}
    with pytest.raises(Exception, match="kernel_call"):
        xg.ffi_call("xla_gpu_kernel_call", X)(X, **given)


@pytest.mark.parametrize("name", RIGHT)
def test_attribute_of_another_type(name):
    with pytest.raises(Exception, match="kernel_call"):
        run(**{name: np.float32(1)})
