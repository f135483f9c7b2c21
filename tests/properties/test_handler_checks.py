"""The handlers' own checks, for callers of the target itself: the same bad inputs, passed by ffi_call."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest

from tests.common import frontends, layer_cases
from tests.properties import test_bad_inputs as bad_inputs
from tests.properties.bad import Bad
from tests.properties.test_bad_inputs import BAD
from xla_gpu._core.attributes import numpy_value
from xla_gpu._core.operator import ArraySpec
from xla_gpu._runtime.scratch import all_results
from xla_gpu.ops import OPERATORS

torch = pytest.importorskip("torch")
from tests.common.arrays import TORCH_DTYPES  # noqa: E402 - it imports torch

pytestmark = pytest.mark.frontends("eager", "eager-cuda")

# In the order of the custom call.
OPERANDS = {
    "simple_add": ("a", "b"),
    "reshape_and_cache": ("key", "value", "kv_cache", "slot_mapping", "k_scale", "v_scale"),
    "merge_attention_states": ("out_a", "lse_a", "out_b", "lse_b"),
    "paged_attention": (
        *("query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"),
        *("k_scale", "v_scale", "sinks", "tree_mask"),
    ),
}
OPERANDS["paged_attention_with_lse"] = OPERANDS["paged_attention"]


def spec(shape, dtype="float32"):
    return torch.empty(shape, dtype=TORCH_DTYPES.get(dtype, None) or getattr(torch, dtype), device="meta")


def bound(operator: str):
    """The call that a declaration makes of sound arguments: what its target is to be called with."""
    arrays, options = layer_cases.samples()[operator]
    declaration = next(op for op in OPERATORS if op.name == operator)
    return declaration.bind(**{n: ArraySpec(x.shape, x.dtype.name) for n, x in arrays.items()}, **options)


def results(operator: str, arrays: dict):
    if operator in layer_cases.NAMES:
        sound = bound(operator)
        specs = [spec(result.shape, result.dtype) for result in all_results(sound)]
        for operand, result in sound.aliases:
            array = arrays[sound.operand_names[operand]]
            specs[result] = spec(array.shape, array.dtype.name)
        return tuple(specs)
    if operator == "simple_add":
        return (spec(arrays["a"].shape, arrays["a"].dtype.name),)
    if operator == "reshape_and_cache":
        return (spec(arrays["kv_cache"].shape, arrays["kv_cache"].dtype.name),)
    if operator == "merge_attention_states":
        return (spec(arrays["out_a"].shape, arrays["out_a"].dtype.name), spec(arrays["lse_a"].shape))
    query = arrays["query"]
    lse = (spec(query.shape[:2]),) if operator.endswith("lse") else ()
    return (spec(query.shape, query.dtype.name), *lse, spec((1 << 22,), "uint8"))  # scratch, more than enough


def call(frontend, operator: str, arrays: dict, options: dict, **changes):
    import xla_gpu.torch as ffi

    attributes, aliases, operand_names = {}, None, OPERANDS.get(operator)
    if operator == "reshape_and_cache":
        attributes, aliases = {"check_inputs": False, "kv_scales": "k_scale" in arrays}, {2: 0}
    elif (
        operator in layer_cases.NAMES
    ):  # rms_norm, silu_and_mul, rotary_embedding, sample, linear, grouped_linear, gated_mlp, attention_block,
        # bidirectional_attention, mla_attention, concat_and_cache_mla
        sound = bound(operator)
        attributes = {name: numpy_value(attribute) for name, attribute in sound.attributes}
        attributes |= {n: type(attributes[n])(options[n]) for n in attributes if options.get(n) is not None}
        aliases, operand_names = dict(sound.aliases) or None, sound.operand_names
    elif operator.startswith("paged_attention"):
        window, cap = options["sliding_window"], options["soft_cap"]
        attributes = {
            "scale": np.float32(options["scale"]),
            "sliding_window": np.int64(0 if window is None else window),
            "soft_cap": np.float32(0 if cap is None else cap),
            "check_inputs": False,
            "kv_scales": "k_scale" in arrays,
            "has_sinks": "sinks" in arrays,
        }
    tensors = frontend.tensors(arrays)
    operands = [tensors[name] for name in operand_names if name in tensors]
    target = ffi.ffi_call(f"xla_gpu_{operator}", results(operator, arrays), input_output_aliases=aliases)
    return target(*operands, **(attributes | changes))


# Values that the attributes' own zero stands for, and operands that are there or not by an attribute.
NOT_HERE = {"halved", "unknown", "zero", "missing", "without-float8", "past-float32"}
HERE = [b for b in BAD if b.name not in NOT_HERE]


@pytest.mark.parametrize("bad", HERE, ids=str)
def test_handler_refuses(frontend, bad):
    arrays, options = bad_inputs.valid(bad)
    bad.change(arrays, options)
    with pytest.raises(ValueError) as caught:
        call(frontend, bad.operator, arrays, options)
    text = str(caught.value)
    assert re.search(rf"\b{bad.operator}: (\w+): expected .*, got .+", text), text
    # A mismatch of two arguments may be laid on either.
    assert bad.argument in text


def test_handler_takes_the_unchanged_inputs(frontend):
    for operator, base in (*bad_inputs.UNCHANGED, ("paged_attention_with_lse", "float32")):
        call(frontend, operator, *bad_inputs.valid(Bad(operator, "", "", "", lambda a, o: None, base=base)))


@pytest.mark.parametrize(("operator", "most"), [("linear", 2**31 - 1), ("grouped_linear", 2**29 - 1)])
def test_sizes_past_a_limit_are_told_so(frontend, operator, most):
    """By Python and by the handler; not as sizes of another multiple."""
    past = [bad for bad in HERE if bad.operator == operator and "-past-" in bad.name]
    assert [bad.argument for bad in past] == ["x", "weight"]
    for bad, size in zip(past, "kn", strict=True):
        arrays, options = bad_inputs.valid(bad)
        bad.change(arrays, options)
        text = f"{operator}: {bad.argument}: expected {size} up to {most}, got .*{most + 1}"
        with pytest.raises(ValueError, match=text):
            frontend.call(operator, arrays, **options)
        with pytest.raises(ValueError, match=text):
            call(frontend, operator, arrays, options)


ATTENTION = Bad("paged_attention", "", "", "", lambda a, o: None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sliding_window": np.int64(-1)}, "paged_attention: sliding_window: expected .*, got -1"),
        ({"soft_cap": np.float32(-1)}, "paged_attention: soft_cap: expected .*, got -1"),
        ({"soft_cap": np.float32(math.nan)}, "paged_attention: soft_cap: expected .*, got -?nan"),
        ({"soft_cap": np.float32(2**14)}, "paged_attention: soft_cap: expected .*, got 16384"),
        ({"soft_cap": np.float32(2**-101)}, "paged_attention: soft_cap: expected .*, got 3.9"),
        ({"scale": np.float32(math.inf)}, "paged_attention: scale: expected .*, got inf"),
        ({"kv_scales": True}, "paged_attention: .*(k_scale|scales|operands): expected"),
        ({"has_sinks": True}, "paged_attention: .*(sinks|operands): expected"),
        ({"scale": 0.5}, "expected F32 but got F64"),  # a double
        ({"sliding_window": np.int32(4)}, "expected S64 but got S32"),
        ({"check_inputs": 1}, "(?i)expected PRED but got S64"),
    ],
    ids=str,
)
def test_handler_refuses_attributes(frontend, changes, text):
    with pytest.raises(ValueError, match=text):
        call(frontend, "paged_attention", *bad_inputs.valid(ATTENTION), **changes)


@pytest.mark.parametrize("result", [spec((7, 4, 64), "float16"), spec((6, 4, 64))], ids=["dtype", "shape"])
def test_handler_refuses_another_result(frontend, result, monkeypatch):
    monkeypatch.setitem(globals(), "results", lambda operator, arrays: (result, spec((1 << 22,), "uint8")))
    with pytest.raises(ValueError, match=r"paged_attention: out: expected float32.* as query, got"):
        call(frontend, "paged_attention", *bad_inputs.valid(ATTENTION))


def test_handler_refuses_too_little_scratch(frontend, monkeypatch):
    arrays, options = bad_inputs.valid(ATTENTION)
    # float32 needs none
    arrays |= {name: arrays[name].astype(ml_dtypes.bfloat16) for name in ("query", "kv_cache")}
    out = spec(arrays["query"].shape, "bfloat16")
    monkeypatch.setitem(globals(), "results", lambda operator, arrays: (out, spec((0,), "uint8")))
    with pytest.raises(ValueError, match=r"paged_attention: scratch: expected at least .* bytes, got 0"):
        call(frontend, "paged_attention", arrays, options)


@pytest.mark.parametrize("bad", [b for b in HERE if b.operator in ("simple_add", "merge_attention_states")], ids=str)
@pytest.mark.frontends("jax", "jax-cuda")
def test_handler_refuses_under_jax(frontend, bad):
    """The same through jax.ffi.ffi_call, for the operators that take no attributes."""
    import jax

    import xla_gpu.jax

    (ready,) = frontend.call(
        "simple_add", {"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)}
    )  # registers the targets
    assert ready == 2 and xla_gpu.jax
    arrays, options = bad_inputs.valid(bad)
    bad.change(arrays, options)
    with frontends.enable_x64():  # without, JAX makes float64 float32
        shapes = [
            jax.ShapeDtypeStruct(tuple(r.shape), str(r.dtype).removeprefix("torch."))
            for r in results(bad.operator, arrays)
        ]
        operands = jax.device_put([arrays[name] for name in OPERANDS[bad.operator]], frontend.device())
        with pytest.raises(Exception, match=rf"{bad.operator}: \w+: expected"):
            jax.block_until_ready(jax.ffi.ffi_call(f"xla_gpu_{bad.operator}", shapes)(*operands))
