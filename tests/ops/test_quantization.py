"""Quantised weights: packing byte by byte, quantising, and the layouts of public checkpoints, made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, reference
from xla_gpu import quantization as q
from xla_gpu.quantization import CheckpointFormat, LinearWeight


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
    with pytest.raises(TypeError, match="expected an array of NumPy, PyTorch or JAX, got list"):
        q.pack_weight([[1]])
    with pytest.raises(ValueError, match="quantize: weight_format: expected float8 or int8 or int4, got 'int5'"):
        q.quantize(np.zeros((16, 128), np.float32), "int5")
    with pytest.raises(TypeError, match=r"quantize: weight: expected dtype float32 or .*, got int32\[16, 128\]"):
        q.quantize(np.ones((16, 128), np.int32), "int8")
    with pytest.raises(TypeError, match="expected an array of NumPy, PyTorch or JAX, got list"):
        q.quantize([[1.0]], "int8")
    with pytest.raises(ValueError, match=r"quantize: weight: .* got shape \[0, 128\]"):
        q.quantize(np.zeros((0, 128), np.float32), "int4")
    with pytest.raises(TypeError, match="dequantize: weight: expected a LinearWeight, got ndarray"):
        q.dequantize(np.zeros((16, 128), np.float32))


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
    with pytest.raises(ValueError, match="expected parts of one dtype, got int8, uint8"):
        q.concatenate([parts[0], int4[0]])
    for unscaled in (LinearWeight(stored), tensors[0]), (tensors[0], LinearWeight(stored)):
        with pytest.raises(ValueError, match="expected parts of one kind of scale, got None, rank 1"):
            q.concatenate(unscaled)
    with pytest.raises(ValueError, match="expected parts of one k, got 128, 256"):
        q.concatenate([parts[0], q.quantize(np.ones((16, 256), np.float32), "int8")])
    with pytest.raises(ValueError, match="expected parts of one k, got 128, 256"):
        q.concatenate([int4[0], q.quantize(np.ones((16, 256), np.float32), "int4")])
    halves = q.quantize(np.ones((16, 128), np.float16), "int4")
    with pytest.raises(ValueError, match="expected parts of one dtype of scales, got float16, float32"):
        q.concatenate([int4[0], halves])
    with pytest.raises(ValueError, match="expected one or more, got none"):
        q.concatenate([])
    with pytest.raises(TypeError, match="expected LinearWeights, got ndarray"):
        q.concatenate([stored])
    blocks = LinearWeight(stored, np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="expected parts of a multiple of 128 rows"):
        q.concatenate([blocks, blocks])


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
N, K, LAYER = 48, 384, "model.layers.3.mlp.down_proj"


def words(nibbles):
    """int32 of eight nibbles along the last axis, the first lowest."""
    packed = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), np.uint32)
    for i in range(8):
        packed |= nibbles[..., i::8].astype(np.uint32) << (4 * i)
    return packed.view(np.int32)


def int4_layer(group: int = 128):
    """(values, zero points, scales, the weight that they mean)."""
    rng = cases.rng_for("checkpoint")
    values, zeros = rng.integers(0, 16, (N, K)), rng.integers(1, 16, (N, K // group))
    scales = rng.uniform(0.01, 0.02, (N, K // group)).astype(np.float16)
    meaning = (values - np.repeat(zeros, group, 1)) * np.repeat(scales.astype(np.float64), group, 1)
    return values, zeros, scales, meaning


def loaded(config: dict, tensors: dict, dtype="float16") -> np.ndarray:
    named = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    weight = CheckpointFormat({"quantization_config": config}).load(LAYER, named.__getitem__, set(named), dtype)
    return reference.linear_weight(*weight)


@pytest.mark.parametrize("group", [128, 384])
def test_awq(group):
    """Along n, nibble i of a word holds column 0, 2, 4, 6, 1, 3, 5, 7."""
    values, zeros, scales, meaning = int4_layer(group)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    columns = (np.arange(N) // 8 * 8).reshape(-1, 8) + order
    tensors = {
        "qweight": words(values.T[:, columns.reshape(-1)]),
        "qzeros": words(zeros.T[:, columns.reshape(-1)]),
        "scales": scales.T.copy(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    np.testing.assert_array_equal(loaded(config, tensors), meaning)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq(layout):
    """Along k; zero points are stored less 1 in the first layout."""
    values, zeros, scales, meaning = int4_layer()
    tensors = {
        "qweight": words(values).T.copy(),
        "qzeros": words((zeros - (layout == "gptq")).T),
        "scales": scales.T.copy(),
        "g_idx": np.arange(K, dtype=np.int32) // 128,
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "checkpoint_format": layout}
    np.testing.assert_array_equal(loaded(config, tensors), meaning)
    shuffled = tensors | {"g_idx": tensors["g_idx"][::-1].copy()}
    with pytest.raises(ValueError, match=rf"{LAYER}.g_idx: expected groups in order, got act-order"):
        loaded(config, shuffled)


def compressed(layout: str, **weights) -> dict:
    groups = {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "symmetric": True} | weights, "targets": ["Linear"]}
    }
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized(symmetric):
    values, zeros, scales, meaning = int4_layer()
    if symmetric:
        meaning = meaning + np.repeat((zeros - 8) * scales.astype(np.float64), 128, 1)
    tensors = {"weight_packed": words(values), "weight_scale": scales, "weight_shape": np.array([N, K])}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T).T.copy()
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128, symmetric=symmetric)
    np.testing.assert_allclose(loaded(config, tensors), meaning, rtol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "shape"), [("tensor", (1,)), ("tensor", ()), ("channel", (N, 1)), ("block", (1, 3))], ids=str
)
@pytest.mark.parametrize("kind", ["float", "int"])
def test_stored_as_they_are(strategy, shape, kind):
    if kind == "int" and strategy == "block":
        pytest.skip("int8 has no blocks")
    rng = cases.rng_for("stored")
    stored = rng.integers(-128, 128, (N, K)) if kind == "int" else rng.standard_normal((N, K))
    stored = stored.astype(cases.DTYPES["int8" if kind == "int" else "float8_e4m3fn"])
    scale = np.asarray(rng.uniform(0.5, 1, shape)).astype(np.float32)
    wide = np.repeat(scale, 128, 1)[:, :K] if strategy == "block" else scale.reshape(-1, 1)
    config = compressed(f"{kind}-quantized", type=kind, strategy=strategy, block_structure=[128, 128])
    tensors = {"weight": stored, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    want = stored.astype(np.float64) * wide.astype(np.float64)
    np.testing.assert_array_equal(loaded(config, tensors), want)
    if strategy == "block":
        fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        np.testing.assert_array_equal(loaded(fp8, {"weight": stored, "weight_scale_inv": scale}), want)


@pytest.mark.parametrize("n", [16, 256])
def test_as_many_blocks_as_rows(n):
    """With k = 16384, as in the attention of DeepSeek-V3, a weight has one block scale for each of its rows' number."""
    k = 128 * 128 if n > 128 else 128 * n
    rng = cases.rng_for("blocks")
    stored = rng.standard_normal((n, k)).astype(cases.DTYPES["float8_e4m3fn"])
    scale = rng.uniform(0.5, 1, (-(-n // 128), k // 128)).astype(np.float32)
    assert scale.size == n
    wide = np.repeat(np.repeat(scale, 128, 0)[:n], 128, 1)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    got = loaded(config, {"weight": stored, "weight_scale_inv": scale})
    np.testing.assert_allclose(got, stored.astype(np.float64) * wide, rtol=1e-6)


def test_layers_that_are_not_quantised():
    plain = cases.rng_for("plain").standard_normal((N, K)).astype(np.float32)
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["down_proj"]}
    np.testing.assert_array_equal(loaded(config, {"weight": plain}, "float32"), plain)
    weight = CheckpointFormat({}).load("head", {"head.weight": plain}.__getitem__, {"head.weight"}, "float32")
    np.testing.assert_array_equal(weight.weight, plain)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}


def rotated(*locations):
    """Hadamard transforms at these places, as of QuIP and SpinQuant."""
    config = compressed("pack-quantized", **INT4, group_size=128)
    apply = [{"targets": ["Linear"], "location": location} for location in locations]
    return config | {"transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": apply}}}}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: expected compressed-tensors, fp8, awq or gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: expected gemm, got 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits: expected 4, got 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "group_size: expected a multiple of 128, or -1, got 64"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: expected 4, got 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: expected gptq"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        (compressed("marlin-24"), "format: expected float-quantized"),
        (compressed("pack-quantized", **INT4, group_size=32), "group_size: expected a multiple of 128, or -1, got 32"),
        (compressed("pack-quantized", **INT4, group_size=128, actorder="group"), "actorder"),
        (compressed("int-quantized", type="int", symmetric=False, strategy="channel"), "symmetric"),
        (compressed("float-quantized", strategy="group", group_size=128), "strategy"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups: expected one group, got 0"),
        (rotated("weight_input", "input"), "transform_config: expected transforms of weights alone, got 'input'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_no_format_has_is_refused(config, text):
    with pytest.raises(ValueError, match=f"quantization_config: {text}"):
        CheckpointFormat({"quantization_config": config})


def test_transforms_that_are_in_the_weights_are_no_matter():
    CheckpointFormat({"quantization_config": rotated("weight_input", "weight_output")})
    CheckpointFormat({"quantization_config": rotated() | {"transform_config": {}}})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_quantised_weights_without_a_scale_are_refused(dtype):
    """Their scale has a name that nobody looks for; without it they would be other numbers."""
    tensors = {"weight": np.ones((16, 128), cases.DTYPES[dtype]), "scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match=rf"{LAYER}.weight: expected float32 .* no scale for it, .*, got {dtype}"):
        loaded({"quant_method": "fp8"}, tensors)


def test_words_of_another_dtype_are_refused():
    tensors = {name: np.ones((8, 8), np.int16) for name in ("qweight", "qzeros", "scales")}
    with pytest.raises(ValueError, match="packed int4: expected words of int32, got int16"):
        loaded({"quant_method": "gptq", "bits": 4, "group_size": 128}, tensors)


def test_a_tensor_that_is_missing_is_named():
    with pytest.raises(ValueError, match=rf"no tensor '{LAYER}.qweight'"):
        loaded({"quant_method": "awq", "bits": 4, "group_size": 128}, {"scales": np.ones(1)})
    with pytest.raises(ValueError, match=rf"no tensor '{LAYER}.weight', and config.json has no quantization_config"):
        CheckpointFormat({}).load(LAYER, {}.__getitem__, set(), "float16")
