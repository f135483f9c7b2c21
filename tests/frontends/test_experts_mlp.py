"""experts_mlp in each framework: wrong arguments, transformations and programs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare, experts_cases, frontends
from tests.properties.bad import Bad, drop, option, put

EAGER = pytest.mark.frontends("eager", "eager-cuda")
JAX = pytest.mark.frontends("jax", "jax-cuda")


def small(rows: int = 5, weight_format: str = "plain") -> dict[str, np.ndarray]:
    hidden = 64 if weight_format == "plain" else 256
    return experts_cases.inputs(weight_format, rows, 4, 2, hidden, hidden // 2, bias=True)


# ---- Wrong arguments -------------------------------------------------------------------------------------------------
def bad(*args, **kwargs) -> Bad:
    return Bad("experts_mlp", *args, **kwargs)


FLOAT8, BFLOAT16 = cases.DTYPES["float8_e4m3fn"], cases.DTYPES["bfloat16"]
# 5 rows, 4 experts, 2 of them for each row, hidden 256, intermediate 128; int4 with zero points, bfloat16.
BAD = [
    bad("float32", "x", "float32", put("x", dtype=np.float32), TypeError),
    bad("rank-3", "x", "[1, 5, 256]", put("x", (1, 5, 256))),
    bad("other-hidden", "gate_up_weight", "[4, 256, 128]", put("x", (5, 128))),
    bad("part-of-a-group", "x", "[5, 192]", put("x", (5, 192))),
    bad("rank-2", "gate_up_weight", "[256, 128]", put("gate_up_weight", (256, 128))),
    bad("other-float", "gate_up_weight", "float16", put("gate_up_weight", (4, 256, 256), np.float16), TypeError),
    bad("no-expert", "gate_up_weight", "[0, 256, 128]", put("gate_up_weight", (0, 256, 128))),
    bad("missing", "gate_up_scale", "None", drop("gate_up_scale")),
    bad("float32", "gate_up_scale", "float32", put("gate_up_scale", dtype=np.float32), TypeError),
    bad("other-experts", "gate_up_zero_point", "[3, 256, 2]", put("gate_up_zero_point", (3, 256, 2))),
    bad("of-hidden", "gate_up_bias", "[4, 128]", put("gate_up_bias", (4, 128))),
    bad("half-a-group", "gate_up_weight", "[4, 128, 128]", put("gate_up_weight", (4, 128, 128))),
    bad("other-experts", "down_weight", "[3, 256, 64]", put("down_weight", (3, 256, 64))),
    bad("transposed", "down_weight", "[4, 64, 256]", put("down_weight", (4, 64, 256))),
    bad("missing", "down_scale", "None", drop("down_scale")),
    bad("needless", "down_zero_point", "uint8[4, 256, 1]", put("down_weight", (4, 256, 128), BFLOAT16)),
    bad("other-dtype", "down_bias", "float32", put("down_bias", dtype=np.float32), TypeError),
    bad("float16", "topk_weights", "float16", put("topk_weights", dtype=np.float16), TypeError),
    bad("rank-1", "topk_weights", "[10]", put("topk_weights", (10,))),
    bad("other-rows", "topk_weights", "[4, 2]", put("topk_weights", (4, 2))),
    bad("other-top-k", "topk_ids", "[5, 3]", put("topk_ids", (5, 3))),
    bad("floats", "topk_ids", "float32", put("topk_ids", dtype=np.float32), TypeError),
    bad("bytes", "topk_ids", "uint8", put("topk_ids", dtype=np.uint8), TypeError),
    bad("unknown", "activation", "'silu'", option("activation", "silu")),
    bad("no-text", "activation", "NoneType", option("activation", None), TypeError),
]


def changed(case: Bad) -> tuple[dict, dict]:
    arrays, options = small(5, "int4-zero-point"), {}
    case.change(arrays, options)
    if case.name == "needless":
        del arrays["down_scale"]
    if case.name == "half-a-group":
        for name in ("gate_up_scale", "gate_up_zero_point", "gate_up_bias"):
            arrays[name] = arrays[name][:, :128]
    if case.name == "other-experts" and case.argument == "down_weight":
        arrays |= {name: x[:3] for name, x in arrays.items() if name.startswith("down_") and name != "down_weight"}
    return arrays, options


@pytest.mark.parametrize("case", BAD, ids=str)
@pytest.mark.frontends("eager", "torch_xla", "jax", "torchax")
def test_wrong_arguments(frontend, case):
    arrays, options = changed(case)
    with pytest.raises(case.error, match=f"^experts_mlp: {case.argument}: expected ") as error:
        frontend.call("experts_mlp", arrays, **options)
    assert case.got in str(error.value).partition(", got ")[2]


@pytest.mark.parametrize("rows", [2**27, 2**31])
def test_more_pairs_than_a_kernel_takes(rows):
    """Of arrays without memory."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    import xla_gpu.jax
    import xla_gpu.torch

    arrays = small()
    by_row = {"x": (64,), "topk_weights": (8,), "topk_ids": (8,)}
    shapes = {name: (rows, *by_row[name]) if name in by_row else x.shape for name, x in arrays.items()}
    text = r"^experts_mlp: topk_ids: expected up to 1073741823 pairs of a row and an expert, got int32\[\d+, 8\]"
    with pytest.raises(ValueError, match=text):
        described = {name: jax.ShapeDtypeStruct(shape, arrays[name].dtype) for name, shape in shapes.items()}
        jax.eval_shape(lambda a: xla_gpu.jax.experts_mlp(**a), described)
    with pytest.raises(ValueError, match=text):
        dtypes = {name: getattr(torch, x.dtype.name) for name, x in arrays.items()}
        tensors = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
        xla_gpu.torch.experts_mlp(**tensors)


@pytest.mark.frontends("eager", "torch_xla", "jax", "torchax")
def test_the_unchanged_arguments_are_valid(frontend):
    frontend.call("experts_mlp", small(5, "int4-zero-point"))


@pytest.mark.parametrize("value", [None, "text", [1.0], 1.5], ids=str)
@pytest.mark.parametrize("argument", ["x", "gate_up_weight", "down_weight", "topk_weights", "topk_ids", "down_bias"])
def test_the_same_words_for_what_is_no_array(argument, value):
    texts = {}
    for name in ("eager", "torch_xla", "jax"):
        frontend = frontends.ALL[name]
        if frontend.unavailable():
            continue
        arrays = small()
        del arrays[argument]
        try:
            frontend.call("experts_mlp", arrays, **{argument: value})
        except TypeError as error:
            texts[name] = str(error).replace("a JAX or NumPy array", "a tensor")
        else:
            texts[name] = ""
    optional = argument == "down_bias" and value is None
    want = "" if optional else f"experts_mlp: {argument}: expected a tensor, got {type(value).__name__}"
    assert set(texts.values()) == {want}


@EAGER
def test_one_device_is_named(frontend):
    tensors = frontend.tensors(small())
    tensors["topk_ids"] = tensors["topk_ids"].to("meta")
    with pytest.raises(ValueError, match=r"experts_mlp: topk_ids: expected a tensor on .* got one on meta"):
        frontend.module().experts_mlp(**tensors)


@pytest.mark.frontends("eager", "jax")
def test_zero_points_out_of_range_are_an_error_on_cpus(frontend):
    arrays = small(5, "int4-zero-point")
    arrays["down_zero_point"][1, 9, 0] = 200
    with pytest.raises(Exception, match="weight_zero_point: expected values of 0 to 127, got 200"):
        frontend.call("experts_mlp", arrays)


@pytest.mark.frontends(*(name for name in frontends.ALL if not name.startswith("eager")))
@pytest.mark.parametrize("rows", [6, 300])
def test_bit_for_bit(frontend, rows):
    """The sum has one order and no roundings that depend on a compiler."""
    other = frontends.beside(frontend)
    if other is None:
        pytest.skip("the only front end of its platform in this process")
    arrays = experts_cases.inputs("plain", rows, 6, 4, 64, 32)
    arrays["topk_weights"][::5] = 0  # times negative numbers: -0
    arrays["topk_ids"][::7] = -1
    (got,), (want,) = frontend.call("experts_mlp", arrays), other.call("experts_mlp", arrays)
    compare.assert_bitwise_equal(got, want, f"{frontend.name} against {other.name}")


# ---- JAX -------------------------------------------------------------------------------------------------------------
@JAX
def test_outside_of_jit(frontend):
    """Of NumPy's arrays too."""
    import jax

    import xla_gpu.jax as ops

    arrays = small()
    (want,) = frontend.call("experts_mlp", arrays)
    with jax.default_device(frontend.device()):
        for given in (arrays, jax.device_put(arrays)):
            compare.assert_bitwise_equal(np.asarray(ops.experts_mlp(**given)), want)


@JAX
@pytest.mark.parametrize("jitted", [False, True])
def test_jax_vmap(frontend, jitted):
    """Of rows and their routing, of weights too, and of one alone."""
    import jax

    import xla_gpu.jax as ops

    arrays = small(6)
    (want,) = frontend.call("experts_mlp", arrays)
    placed = jax.device_put(arrays, frontend.device())
    by_row = ("x", "topk_weights", "topk_ids")
    split = {name: placed[name].reshape(3, 2, -1) for name in by_row}

    def experts(split, others):
        return ops.experts_mlp(**split, **others)

    others = {name: x for name, x in placed.items() if name not in by_row}
    function = jax.vmap(experts, (0, None))
    got = (jax.jit(function) if jitted else function)(split, others)
    compare.assert_bitwise_equal(np.asarray(got).reshape(6, -1), want)
    # Two sets of experts.
    both = {name: jax.numpy.stack([x, x[::-1]]) for name, x in others.items()}
    got = jax.vmap(experts, (None, 0))({name: placed[name] for name in by_row}, both)
    compare.assert_bitwise_equal(np.asarray(got[0]), want)
    turned = {**arrays, "topk_ids": 3 - arrays["topk_ids"]}
    compare.assert_bitwise_equal(np.asarray(got[1]), frontend.call("experts_mlp", turned)[0])


@JAX
def test_int64_ids_without_x64(frontend):
    """As NumPy has them."""
    import xla_gpu.jax as ops

    arrays = small()
    wide = {**arrays, "topk_ids": arrays["topk_ids"].astype(np.int64)}
    compare.assert_bitwise_equal(np.asarray(ops.experts_mlp(**wide)), np.asarray(ops.experts_mlp(**arrays)))


@JAX
@pytest.mark.parametrize("argument", ["x", "topk_weights", "down_bias"])
def test_jax_gradients_are_refused(frontend, argument):
    import jax

    import xla_gpu.jax as ops

    arrays = jax.device_put(small(), frontend.device())

    def total(value):
        return ops.experts_mlp(**arrays | {argument: value}).astype(np.float32).sum()

    with pytest.raises(ValueError, match=f"experts_mlp has no gradient for {argument}, "):
        jax.grad(total)(arrays[argument])


@JAX
def test_export_with_any_number_of_rows(frontend):
    pytest.importorskip("flatbuffers")
    import jax
    from jax import export

    import xla_gpu.jax as ops

    arrays = small(6)
    (rows,) = export.symbolic_shape("rows")
    by_row = ("x", "topk_weights", "topk_ids")
    described = {
        name: jax.ShapeDtypeStruct((rows if name in by_row else x.shape[0], *x.shape[1:]), x.dtype)
        for name, x in arrays.items()
    }
    checks = [export.DisabledSafetyCheck.custom_call(f"xla_gpu_{name}") for name in ("grouped_linear", "silu_and_mul")]
    platform = "cuda" if frontend.platform == "cuda" else "cpu"
    made = export.export(jax.jit(lambda a: ops.experts_mlp(**a)), platforms=[platform], disabled_checks=checks)
    program = export.deserialize(made(described).serialize())
    (want,) = frontend.call("experts_mlp", arrays)
    got = program.call(jax.device_put(arrays, frontend.device()))
    compare.assert_bitwise_equal(np.asarray(got), want)


@pytest.mark.parametrize(
    ("symbols", "text"),
    [
        (
            {"topk_ids": "rows, k", "topk_weights": "rows, k"},
            r"experts_mlp: topk_ids: expected a known top_k, got .*k\]",
        ),
        ({"x": "rows, h"}, r"experts_mlp: expected known sizes .* got x bfloat16\[rows, h\], .*'h' < '16'"),
        ({"gate_up_weight": "e, 64, 64"}, r"experts_mlp: expected known sizes .* got .*weight bfloat16\[e, 64, 64\]"),
    ],
    ids=["top-k", "hidden", "experts"],
)
@pytest.mark.frontends("jax")
def test_export_with_other_symbolic_sizes_is_refused(frontend, symbols, text):
    import jax
    from jax import export

    import xla_gpu.jax as ops

    scope = export.SymbolicScope()
    described = {
        name: jax.ShapeDtypeStruct(export.symbolic_shape(symbols.get(name, "..."), like=x.shape, scope=scope), x.dtype)
        for name, x in small(6).items()
    }
    for name in {"x", "topk_weights", "topk_ids"} - set(symbols):
        shape = export.symbolic_shape("rows, ...", like=described[name].shape, scope=scope)
        described[name] = jax.ShapeDtypeStruct(shape, described[name].dtype)
    with pytest.raises(ValueError, match=f"^{text}"):
        export.export(jax.jit(lambda a: ops.experts_mlp(**a)))(described)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------
@EAGER
def test_torch_vmap(frontend):
    import torch

    arrays = small(6)
    (want,) = frontend.call("experts_mlp", arrays)
    tensors, ops = frontend.tensors(arrays), frontend.module()
    by_row = ("x", "topk_weights", "topk_ids")
    split = {name: tensors.pop(name).reshape(3, 2, -1) for name in by_row}

    def experts(*given):
        return ops.experts_mlp(**dict(zip(by_row, given, strict=True)), **tensors)

    got = torch.vmap(experts)(*split.values())
    assert torch.equal(got.reshape(6, -1), frontend.tensors({"want": want})["want"])


@pytest.mark.parametrize("argument", ["x", "topk_weights", "down_bias"])
@pytest.mark.frontends("eager", "eager-cuda", "torch_xla")
def test_torch_gradients_are_refused(frontend, argument):
    tensors = frontend.tensors(small())
    tensors[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"experts_mlp: {argument}: expected .* not require a gradient"):
        frontend.module().experts_mlp(**tensors)


@pytest.mark.frontends("eager")
@pytest.mark.parametrize("rows", [5, 600])
def test_nothing_waits_for_the_device(frontend, rows):
    """Tensors without values: a shape or a branch that needs some, for which a GPU's would wait, would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    frontend.module()  # defines the operators
    from xla_gpu._torch import experts_mlp as body

    tensors = frontend.tensors(small(rows))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in tensors.items()}
        out = body.experts(fake, "swigluoai_and_mul")
    assert out.shape == (rows, 64)


@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_lazy_graphs_stay_on_the_device(frontend):
    """None of its operations is one that torch_xla computes on the host."""
    from xla_gpu._torch_xla.counters import fallbacks

    before = fallbacks()
    for rows in (5, 600):
        frontend.call("experts_mlp", small(rows), activation="swigluoai_and_mul")
    assert fallbacks() == before


@pytest.mark.frontends("eager")
def test_compiled_for_any_number_of_rows(frontend):
    """torch.compile in one graph, with symbolic sizes."""
    import torch

    ops = frontend.module()
    torch._dynamo.reset()
    compiled = torch.compile(ops.experts_mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 9):
        tensors = frontend.tensors(small(rows))
        assert torch.equal(compiled(**tensors), ops.experts_mlp(**tensors))
    torch._dynamo.reset()
