"""Quantised checkpoints: the layouts of public ones, made by hand, and what is not in order with them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, reference
from xla_gpu import quantization as q
from xla_gpu.quantization import CheckpointFormat

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


SCALES = [("tensor", (1,)), ("tensor", ()), ("channel", (N, 1))]


@pytest.mark.parametrize(
    ("kind", "strategy", "shape"),
    [*(("int", *scale) for scale in SCALES), *(("float", *scale) for scale in [*SCALES, ("block", (1, 3))])],
    ids=str,
)
def test_stored_as_they_are(kind, strategy, shape):
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


def test_sound_checkpoints_of_other_tools():
    """Symmetric GPTQ has zero points of 8 alone; whole rows as a group; a strategy and a scale of another name."""
    values, _, scales, _ = int4_layer()
    qweight, wide = words(values).T.copy(), scales.astype(np.float64)
    stored = {"qweight": qweight, "scales": scales.T.copy(), "g_idx": np.arange(K, dtype=np.int32) // 128}
    for layout, word in (("gptq", 0x77777777), ("gptq_v2", 0x88888888 - (1 << 32))):
        config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": layout}
        tensors = stored | {"qzeros": np.full((K // 128, N // 8), word, np.int32)}
        np.testing.assert_array_equal(loaded(config, tensors), (values - 8) * np.repeat(wide, 128, 1))
    whole = {"qweight": qweight, "scales": scales.T[:1].copy(), "g_idx": np.zeros(K, np.int32)}
    whole["qzeros"] = np.full((1, N // 8), 0x77777777, np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}
    np.testing.assert_array_equal(loaded(config, whole), (values - 8) * wide[:, :1])
    packed = {"weight_packed": words(values), "weight_scale": scales}
    for strategy, size, used in (("channel", None, scales[:, :1]), (None, 128, scales)):
        config = compressed("pack-quantized", num_bits=4, type="int", strategy=strategy, group_size=size)
        expected = (values - 8) * np.repeat(used.astype(np.float64), K // used.shape[1], 1)
        np.testing.assert_array_equal(loaded(config, packed | {"weight_scale": used}), expected)
    eights = np.ones((N, K), cases.DTYPES["float8_e4m3fn"])
    for scale in (np.float32(0.5), np.full(1, 0.5, np.float32)):
        config = {"quant_method": "fp8", "weight_block_size": None}
        got = loaded(config, {"weight": eights, "weight_scale_inv": np.asarray(scale)})
        np.testing.assert_array_equal(got, np.full((N, K), 0.5))


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
        (
            compressed("pack-quantized", **INT4 | {"num_bits": 8}),
            "weights: expected 4-bit int for pack-quantized, got '8-bit int'",
        ),
        (
            compressed("int-quantized", num_bits=4, type="int", strategy="channel"),
            "weights: expected 8-bit float or int",
        ),
        (compressed("float-quantized", strategy="block", block_structure=[64, 64]), r"block_structure: expected \[128"),
        (compressed("float-quantized", strategy="block", block_structure=128), "block_structure: .*, got 128"),
        (compressed("marlin-24"), "format: expected float-quantized"),
        (compressed("pack-quantized", **INT4, group_size=32), "group_size: expected a multiple of 128, or -1, got 32"),
        (compressed("pack-quantized", **INT4, group_size=128, actorder="group"), "actorder"),
        (compressed("int-quantized", type="int", symmetric=False, strategy="channel"), "symmetric"),
        (compressed("float-quantized", strategy="group", group_size=128), "strategy"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups: expected one group, got 0"),
        (
            compressed("float-quantized", strategy="channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: expected dense, got 'sparse-24-bitmask'",
        ),
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
    CheckpointFormat({"quantization_config": rotated() | {"sparsity_config": {"format": "dense"}}})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_quantised_weights_without_a_scale_are_refused(dtype):
    """Their scale has a name that is not looked for; without it they would be other numbers."""
    tensors = {"weight": np.ones((16, 128), cases.DTYPES[dtype]), "scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match=rf"{LAYER}.weight: expected float32 .* no scale for it, .*, got {dtype}"):
        loaded({"quant_method": "fp8"}, tensors)


def _broken_int4(method: str) -> tuple[dict, dict]:
    """(settings, tensors) of a sound layer of int4."""
    values, zeros, scales, _ = int4_layer()
    order = {"g_idx": np.arange(K, dtype=np.int32) // 128}
    if method == "pack":
        settings = compressed("pack-quantized", **INT4, group_size=128, symmetric=False)
        names = {"weight_packed": words(values), "weight_zero_point": words(zeros.T).T.copy(), "weight_scale": scales}
        return settings, names | {f"weight_{name}": x for name, x in order.items()}
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    sizes = {"qweight": words(values).T.copy() if method == "gptq" else words(values.T)}
    return settings, sizes | {"qzeros": words(zeros.T), "scales": scales.T.copy()} | (order if method == "gptq" else {})


@pytest.mark.parametrize(
    ("method", "name", "change", "text"),
    [
        ("awq", "scales", lambda x: x[:1], r"expected 3 groups of 48 outputs, \[3, 48\], .*, got shape \[1, 48\]"),
        ("awq", "scales", lambda x: x[0], r"expected 3 groups .*, got shape \[48\]"),
        ("awq", "scales", lambda x: x.astype(np.int32), r"expected float32 or .*, got int32\[3, 48\]"),
        ("awq", "qzeros", lambda x: x[:, :1], r"expected 3 groups .*, got shape \[3, 8\]"),
        ("awq", "qweight", lambda x: x[:200], "expected k of a multiple of 128, as its groups, got 200"),
        ("awq", "qweight", lambda x: x[0], r"expected packed int4, .*, got int32\[6\]"),
        (
            "gptq",
            "qweight",
            lambda x: np.concatenate([x, x]),
            r"the group of each of 768 values, got shape \[384\]",
        ),
        ("gptq", "g_idx", lambda x: x[:5], r"expected the group of each of 384 values, got shape \[5\]"),
        ("gptq", "g_idx", lambda x: np.maximum(x, 1), "expected groups of 128 values as group_size says"),
        ("gptq", "g_idx", lambda x: x[::-1].copy(), "expected groups in order, got act-order"),
        ("pack", "weight_g_idx", lambda x: np.minimum(x, 1), "expected groups of 128 values as group_size says"),
        ("pack", "weight_zero_point", lambda x: np.repeat(x, 8, 0), r"expected 3 groups .*, got shape \[384, 3\]"),
        ("pack", "weight_zero_point", lambda x: x[0], r"expected packed int4, .*, got int32\[3\]"),
        ("pack", "weight_zero_point", lambda x: None, "weight_zero_point.*asks for"),
        (
            "pack",
            "weight_scale",
            lambda x: x[:, :2],
            r"expected 3 groups of 48 outputs, \[48, 3\], .*, got shape \[48, 2\]",
        ),
    ],
)
def test_int4_whose_tensors_do_not_fit_is_refused(method, name, change, text):
    """What another loader would read as other numbers, or not at all."""
    settings, tensors = _broken_int4(method)
    assert np.isfinite(loaded(settings, tensors)).all()
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=rf"(?s){LAYER}.*{text}"):
        loaded(settings, {n: x for n, x in tensors.items() if x is not None})


def test_gptq_of_a_part_of_k_and_without_an_order():
    """A device's part of k has the later groups; g_idx of zeros alone says nothing; act-order without it is refused."""
    settings, tensors = _broken_int4("gptq")
    want = loaded(settings, tensors)
    for order in (tensors["g_idx"] + 7, np.zeros(K, np.int32)):
        np.testing.assert_array_equal(loaded(settings, tensors | {"g_idx": order}), want)
    del tensors["g_idx"]
    np.testing.assert_array_equal(loaded(settings, tensors), want)
    with pytest.raises(ValueError, match=rf"no tensor '{LAYER}.g_idx'"):
        loaded(settings | {"desc_act": True}, tensors)


@pytest.mark.parametrize(
    ("config", "weight", "scale", "text"),
    [
        (
            {"quant_method": "fp8"},
            ("int8", (N, K)),
            (1,),
            r"weight: expected float8_e4m3fn\[n, k\] .*, got int8\[48, 384\]",
        ),
        ({"quant_method": "fp8"}, ("float32", (N, K)), (1,), r"weight: expected float8_e4m3fn\[n, k\] .*, got float32"),
        (
            {"quant_method": "fp8"},
            ("float8_e4m3fn", (K,)),
            (1,),
            r"weight: expected float8_e4m3fn\[n, k\] .*, got float8",
        ),
        ({"quant_method": "fp8"}, ("float8_e4m3fn", (N, K)), (1, N), r"weight_scale: expected one scale, .* \[1, 48\]"),
        (compressed("float-quantized", strategy="channel"), ("int8", (N, K)), (N, 1), "weight: expected float8_e4m3fn"),
        (
            compressed("float-quantized", strategy="block", block_structure=[128, 128]),
            ("float8_e4m3fn", (N, K)),
            (1, 1),
            r"weight_scale: expected one for each of 48 rows or for each block of 128, got shape \[1, 1\]",
        ),
    ],
    ids=range(6),
)
def test_weights_that_do_not_fit_their_scale_are_refused(config, weight, scale, text):
    dtype, shape = weight
    tensors = {"weight": np.ones(shape, cases.DTYPES.get(dtype, dtype)), "weight_scale": np.ones(scale, np.float32)}
    with pytest.raises(ValueError, match=rf"{LAYER}.{text}"):
        loaded(config, tensors)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_settings_of_the_text_in_a_model_with_images(key):
    """Those of the whole checkpoint come first."""
    rng = cases.rng_for("text_config")
    stored = rng.standard_normal((N, K)).astype(cases.DTYPES["float8_e4m3fn"])
    named = {f"{LAYER}.weight": stored, f"{LAYER}.weight_scale": np.full((N, 1), 0.5, np.float32)}
    settings = compressed("float-quantized", strategy="channel")
    checkpoint = CheckpointFormat({"vision_config": {}, "text_config": {"hidden_size": K, key: settings}})
    assert checkpoint.method == "compressed-tensors"
    weight = checkpoint.load(LAYER, named.__getitem__, set(named), "float16")
    np.testing.assert_array_equal(reference.linear_weight(*weight), stored.astype(np.float64) * 0.5)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    assert CheckpointFormat({"quantization_config": awq, "text_config": {key: settings}}).method == "awq"
    assert CheckpointFormat({"text_config": {"hidden_size": K}}).method == "none"


def test_settings_alone():
    with pytest.raises(ValueError, match=r"CheckpointFormat: config: expected all of config\.json, got"):
        CheckpointFormat({"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize(
    "config",
    [
        None,
        [],
        {"quantization_config": "awq"},
        {"quantization_config": {"config_groups": [1]}},
        {"quantization_config": compressed("int-quantized") | {"sparsity_config": "dense"}},
        {"quantization_config": rotated() | {"transform_config": {"config_groups": "R"}}},
        {"text_config": "llama"},
        {"text_config": {"quantization_config": "awq"}},
    ],
    ids=str,
)
def test_settings_that_are_no_dict(config):
    with pytest.raises(TypeError, match=r"CheckpointFormat: .*: expected a dict, got (NoneType|list|str)"):
        CheckpointFormat(config)


def test_what_load_takes():
    """Names in any collection; a dtype that weights have."""
    named = {"head.weight": np.ones((N, K), np.float32)}
    for names in (list(named), named, named.keys(), tuple(named)):
        assert CheckpointFormat({}).load("head", named.__getitem__, names, "float16").weight.dtype == np.float16
    with pytest.raises(TypeError, match=r"dtype: expected float32, .*, got 'float99'"):
        CheckpointFormat({}).load("head", named.__getitem__, set(named), "float99")
    parts = [q.quantize(np.ones((16, 128), np.float32), "int8")] * 2
    assert q.concatenate(part for part in parts).weight.shape == (32, 128)


def test_words_of_another_dtype_are_refused():
    tensors = {name: np.ones((8, 8), np.int16) for name in ("qweight", "qzeros", "scales")}
    with pytest.raises(
        ValueError, match=rf"{LAYER}.qweight: expected packed int4, words of int32 in two .*, got int16\[8, 8\]"
    ):
        loaded({"quant_method": "gptq", "bits": 4, "group_size": 128}, tensors)


def test_a_tensor_that_is_missing_is_named():
    with pytest.raises(ValueError, match=rf"no tensor '{LAYER}.qweight'"):
        loaded({"quant_method": "awq", "bits": 4, "group_size": 128}, {"scales": np.ones(1)})
    with pytest.raises(ValueError, match=rf"no tensor '{LAYER}.weight', and config.json has no quantization_config"):
        CheckpointFormat({}).load(LAYER, {}.__getitem__, set(), "float16")
