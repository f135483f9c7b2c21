"""Quantised weights: packing byte by byte, quantising, joining."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests.common import cases, reference
from xla_gpu import quantization as q
from xla_gpu.quantization import LinearWeight


def _libraries():
    yield pytest.param(lambda x: x, np.asarray, id="numpy")

    def to_torch(x):
        arrays = pytest.importorskip("tests.common.arrays")
        return arrays.to_torch(x)

    def from_torch(x):
        from tests.common.arrays import to_numpy

        return to_numpy(x)

    def to_jax(x):
        return pytest.importorskip("jax").numpy.asarray(x)

    yield pytest.param(to_torch, from_torch, id="torch")
    yield pytest.param(to_jax, np.asarray, id="jax")


LIBRARIES = tuple(_libraries())


@pytest.mark.parametrize(("put", "take"), LIBRARIES)
def test_bytes_of_packed_int4(put, take):
    """As documented: byte 0 has values 0 and 2, byte 1 values 4 and 6, byte 2 values 1 and 3, byte 3 values 5 and 7."""
    values = cases.rng_for("pack").integers(0, 16, (3, 256), dtype=np.uint8)
    packed = take(q.pack_weight(put(values)))
    assert packed.dtype == np.uint8 and packed.shape == (3, 128)
    for byte, (low, high) in enumerate(((0, 2), (4, 6), (1, 3), (5, 7))):
        np.testing.assert_array_equal(packed[:, byte::4], values[:, low::8] | values[:, high::8] << 4)
    np.testing.assert_array_equal(take(q.unpack_weight(put(packed))), values)


def test_packing_refuses():
    with pytest.raises(TypeError, match="pack_weight: values: expected dtype uint8, got int32"):
        q.pack_weight(np.zeros((4, 128), np.int32))
    with pytest.raises(ValueError, match=r"pack_weight: values: expected .* multiple of 128, got shape \[4, 100\]"):
        q.pack_weight(np.zeros((4, 100), np.uint8))
    with pytest.raises(ValueError, match=r"unpack_weight: packed: .* got shape \[64\]"):
        q.unpack_weight(np.zeros(64, np.uint8))
    with pytest.raises(TypeError, match="pack_weight: values: expected an array of NumPy, PyTorch or JAX, got list"):
        q.pack_weight([[1]])
    with pytest.raises(ValueError, match="quantize: weight_format: expected float8 or int8 or int4, got 'int5'"):
        q.quantize(np.zeros((16, 128), np.float32), "int5")
    with pytest.raises(TypeError, match=r"quantize: weight: expected dtype float32 or .*, got int32\[16, 128\]"):
        q.quantize(np.ones((16, 128), np.int32), "int8")
    with pytest.raises(TypeError, match="quantize: weight: expected an array of NumPy, PyTorch or JAX, got list"):
        q.quantize([[1.0]], "int8")
    with pytest.raises(ValueError, match=r"weight: expected shape \[n, k\] with n and k from 1, got \[0, 128\]"):
        q.quantize(np.zeros((0, 128), np.float32), "int8")
    with pytest.raises(ValueError, match=r"weight: expected shape \[n, k\] .* k a multiple of 128, got \[16, 100\]"):
        q.quantize(np.zeros((16, 100), np.float32), "int4")
    with pytest.raises(TypeError, match="dequantize: weight: expected a LinearWeight, got ndarray"):
        q.dequantize(np.zeros((16, 128), np.float32))


@pytest.mark.parametrize(
    ("dtype", "scale", "fragment"),
    [
        ("int8", None, "expected an array, since weight is int8, got None"),
        ("float8_e4m3fn", None, "expected an array, since weight is float8_e4m3fn, got None"),
        ("int8", (1,), r"expected shape \[256\], got float32\[1\]"),
        ("int8", (256, 1), r"expected shape \[256\], got float32\[256, 1\]"),
        ("float8_e4m3fn", (1, 2), r"expected shape \[1\], \[256\] or \[2, 2\], got float32\[1, 2\]"),
        ("uint8", (256, 1), r"expected shape \[256, 4\] .*, got float32\[256, 1\]"),
        ("float32", (256,), r"expected None, since weight is of x's dtype, got float32\[256\]"),
    ],
)
def test_dequantize_takes_the_scales_of_linear(dtype, scale, fragment):
    """Not those that NumPy would broadcast to other numbers."""
    weight = LinearWeight(
        np.zeros((256, 256), cases.DTYPES[dtype]), None if scale is None else np.ones(scale, np.float32)
    )
    with pytest.raises(ValueError, match=f"^dequantize: weight_scale: {fragment}"):
        q.dequantize(weight)


def test_a_scale_is_an_array():
    weight = LinearWeight(np.zeros((16, 128), np.int8), 0.5)
    for name, call in (("dequantize", lambda: q.dequantize(weight)), ("concatenate", lambda: q.concatenate([weight]))):
        with pytest.raises(TypeError, match=f"^{name}: weight_scale: expected an array of NumPy, .*, got float$"):
            call()


@pytest.mark.parametrize(("put", "take"), LIBRARIES)
def test_values_above_15_are_not_packed(put, take):
    """They would change their neighbours."""
    values = np.full((16, 128), 15, np.uint8)
    values[7, 9] = 16
    with pytest.raises(ValueError, match="pack_weight: values: expected values of 0 to 15, got 16"):
        q.pack_weight(put(values))


def test_packing_in_compiled_functions():
    """There values are not known."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    values = cases.rng_for("pack").integers(0, 16, (16, 256), dtype=np.uint8)
    want = q.pack_weight(values)
    np.testing.assert_array_equal(jax.jit(q.pack_weight)(values), want)
    tensor = torch.from_numpy(values)
    packed = torch.compile(q.pack_weight, backend="eager", fullgraph=True)(tensor)
    np.testing.assert_array_equal(packed.numpy(), want)
    assert q.pack_weight(tensor.to("meta")).shape == (16, 128)
    with torch._subclasses.FakeTensorMode() as mode:
        assert q.pack_weight(mode.from_tensor(tensor)).shape == (16, 128)
    for experts in torch.vmap(q.pack_weight)(torch.stack([tensor, tensor])), jax.vmap(q.pack_weight)(values[None]):
        np.testing.assert_array_equal(np.asarray(experts)[0], want)


@pytest.mark.parametrize("weight_format", q.FORMATS)
def test_a_models_parameter_is_quantised_without_its_graph(weight_format):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Linear(128, 16).weight
    for array in q.quantize(weight, weight_format).arguments().values():
        assert not array.requires_grad


def test_classes_that_are_derived_from_arrays():
    """As vLLM's parameters are."""
    torch = pytest.importorskip("torch")
    parameter = type("ModelParameter", (torch.nn.Parameter,), {})
    array = type("Weights", (np.ndarray,), {})
    values = cases.rng_for("derived").standard_normal((16, 128)).astype(np.float32)
    for weight in (parameter(torch.from_numpy(values)), values.view(array)):
        made = q.quantize(weight, "int8")
        np.testing.assert_array_equal(np.asarray(made.weight), q.quantize(values, "int8").weight)


@pytest.mark.parametrize(("put", "take"), LIBRARIES)
@pytest.mark.parametrize(("weight_format", "steps"), [("float8", 14.0), ("int8", 127.0), ("int4", 5.8)])
def test_quantize(put, take, weight_format, steps):
    """Every value within half a step of its row's or group's largest; rows of zeros stay zeros."""
    weight = cases.rng_for("quantize").standard_normal((32, 256)).astype(cases.DTYPES["bfloat16"])
    weight[5] = 0
    made = q.quantize(put(weight), weight_format)
    stored = [None if x is None else take(x) for x in made]
    meaning = reference.linear_weight(*stored)
    np.testing.assert_allclose(take(q.dequantize(made)), meaning, rtol=1e-6)
    wide = weight.astype(np.float64)
    largest = np.abs(wide).reshape(32, -1, 128 if weight_format == "int4" else 256).max(-1)
    largest = np.repeat(largest, 256 // largest.shape[1], axis=1)
    # Half a step, and a quarter more for the scale's rounding to bfloat16. float8: the step of its largest numbers.
    # int4: the largest magnitude has the sign of -8, and its opposite is a step away from 7.
    assert (np.abs(meaning - wide) <= 0.75 / steps * largest).all()
    assert not meaning[5].any()
    assert stored[0].dtype.name == {"float8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}[weight_format]


@pytest.mark.parametrize(("put", "take"), LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("weight_format", "columns"), [("float8", 256), ("int8", 256), ("int4", 128)])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_nan_is_kept(put, take, dtype, weight_format, columns, number):
    """Of the row, or of the group of 128 numbers; an infinity becomes NaN."""
    weight = np.full((16, 256), 0.01, cases.DTYPES[dtype])
    weight[3, 5] = number
    got = np.asarray(take(q.dequantize(q.quantize(put(weight), weight_format))))
    is_nan = np.zeros((16, 256), bool)
    is_nan[3, :columns] = True
    np.testing.assert_array_equal(np.isnan(got), is_nan)


def test_numpy_without_ml_dtypes(monkeypatch):
    """It comes with JAX; PyTorch needs none."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ModuleNotFoundError, match="NumPy has float8_e4m3fn with the package ml_dtypes"):
        q.quantize(np.ones((16, 16), np.float32), "float8")


def test_groups_whose_scale_rounds_to_zero():
    made = q.quantize(np.full((16, 128), 6e-8, np.float16), "int4")  # with no warning, which is an error in tests
    assert not q.dequantize(made).any() and made.weight_scale.all()


def test_concatenate():
    parts = [q.quantize(cases.rng_for(str(n)).standard_normal((n, 128)).astype(np.float32), "int8") for n in (16, 48)]
    whole = q.concatenate(parts)
    np.testing.assert_array_equal(q.dequantize(whole), np.concatenate([q.dequantize(part) for part in parts]))
    # One scale of a whole part beside another's.
    stored = np.ones((16, 128), cases.DTYPES["float8_e4m3fn"])
    tensors = [LinearWeight(stored, np.array([scale], np.float32)) for scale in (0.5, 2.0)]
    assert set(q.dequantize(q.concatenate(tensors))[:, 0].tolist()) == {0.5, 2.0}
    int4 = [q.quantize(np.ones((16, 128), np.float32) * i, "int4") for i in (1, 2)]
    zeros = int4[1]._replace(weight_zero_point=np.full((16, 1), 8, np.uint8))
    np.testing.assert_array_equal(
        q.dequantize(q.concatenate([int4[0], zeros])), np.repeat([[1.0], [2.0]], 16, 0) * np.ones(128)
    )
    with pytest.raises(ValueError, match="concatenate: parts: expected one dtype, got int8, uint8"):
        q.concatenate([parts[0], int4[0]])
    for unscaled in (LinearWeight(stored), tensors[0]), (tensors[0], LinearWeight(stored)):
        with pytest.raises(ValueError, match="concatenate: parts: expected one kind of scale, got None, rank 1"):
            q.concatenate(unscaled)
    with pytest.raises(ValueError, match="concatenate: parts: expected one k, got 128, 256"):
        q.concatenate([parts[0], q.quantize(np.ones((16, 256), np.float32), "int8")])
    with pytest.raises(ValueError, match="concatenate: parts: expected one k, got 128, 256"):
        q.concatenate([int4[0], q.quantize(np.ones((16, 256), np.float32), "int4")])
    halves = q.quantize(np.ones((16, 128), np.float16), "int4")
    with pytest.raises(ValueError, match="concatenate: parts: expected one dtype of scales, got float16, float32"):
        q.concatenate([int4[0], halves])
    with pytest.raises(TypeError, match="concatenate: parts: expected LinearWeights, got one of them alone"):
        q.concatenate(parts[0])
    with pytest.raises(ValueError, match="expected one or more, got none"):
        q.concatenate([])
    with pytest.raises(TypeError, match="expected LinearWeights, got ndarray"):
        q.concatenate([stored])
    for wrong in (None, 5):
        with pytest.raises(TypeError, match=f"concatenate: parts: expected LinearWeights, got {type(wrong).__name__}"):
            q.concatenate(wrong)
    longer = [parts[0]._replace(weight_scale=np.ones(len(parts[0].weight) + more, np.float32)) for more in (1, -1)]
    with pytest.raises(ValueError, match=r"concatenate: weight_scale: expected shape \[\d+\], got float32\[\d+\]"):
        q.concatenate(longer)  # as many scales as rows
    blocks = LinearWeight(stored, np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="concatenate: parts: expected a multiple of 128 rows"):
        q.concatenate([blocks, blocks])


def test_parts_of_two_libraries():
    jax = pytest.importorskip("jax")
    weights = [xp.ones((16, 128), "float32") for xp in (np, jax.numpy)]
    with pytest.raises(ValueError, match=r"concatenate: parts: expected one library of arrays, got jax\.numpy, numpy"):
        q.concatenate([q.quantize(weight, "int8") for weight in weights])


@pytest.mark.frontends("eager", "torch_xla", "jax", "torchax")
def test_a_weight_is_not_an_array(frontend):
    arrays = {
        "x": np.ones((3, 128), np.float32),
        "weight": np.ones((16, 128), np.int8),
        "scale": np.ones(16, np.float32),
    }

    def linear(ops, x, weight, scale):
        return ops.linear(x, LinearWeight(weight, scale))

    text = "got LinearWeight, whose arrays are arguments of their own, as in linear(x, **weight.arguments())"
    with pytest.raises(TypeError, match=f"linear: weight: expected .*, {re.escape(text)}"):
        frontend.run(linear, arrays)
