"""What hypothesis draws for products with weights in all formats, and for the blocks that have them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.common import cases, grouped_cases
from tests.fuzz import layer


@st.composite
def linears(draw) -> layer.Linear:
    weight_format = draw(st.sampled_from(cases.WEIGHT_FORMATS))
    unit = 128 if weight_format.startswith("int4") else 16
    return layer.Linear(
        weight_format,
        rows=draw(st.one_of(st.integers(0, 12), st.integers(0, 70))),
        n=16 * draw(st.integers(1, 24)),
        k=unit * draw(st.integers(1, 640 // unit)),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        activation=draw(st.sampled_from([None, None, "silu_and_mul", "gelu_and_mul"])),
        specials=draw(st.booleans()),
    )


@st.composite
def grouped_linears(draw) -> layer.GroupedLinear:
    weight_format = draw(st.sampled_from(grouped_cases.FORMATS))
    unit = 128 if weight_format.startswith("int4") else 32 if weight_format == "mxfp4" else 16
    size = st.one_of(st.integers(0, 4), st.integers(0, 100), st.integers(-(2**31), 2**31 - 1))
    sizes = tuple(draw(st.lists(size, min_size=1, max_size=9)))
    used = sum(max(size, 0) for size in sizes)
    return layer.GroupedLinear(
        weight_format,
        sizes,
        rows=draw(st.one_of(st.just(min(used, 300)), st.integers(0, 150))),
        n=16 * draw(st.integers(1, 20)),
        k=unit * draw(st.integers(1, 640 // unit)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        bias=draw(st.booleans()),
        specials=draw(st.booleans()),
    )


def _large_sizes(draw, weight_format: str, most: int) -> tuple[int, int]:
    """Sizes (k, features) for which kernels' rings go round, and CTAs have several work tiles or parts of k."""
    unit = 128 if weight_format.startswith("int4") else 16
    k = draw(st.one_of(st.sampled_from([4096, 14336]), st.integers(1, 14336 // unit).map(lambda n: unit * n)))
    features = draw(st.one_of(st.sampled_from([4096, 6144, 28672]), st.integers(1, 1800).map(lambda n: 16 * n)))
    return k, max(unit, min(features, most // k) // unit * unit)


def _of_large_products(draw) -> dict:
    return {
        "rows": draw(st.integers(1, 64)),
        "dtype": draw(st.sampled_from(["bfloat16", "float16"])),
        "bias": draw(st.booleans()),
        "residual": draw(st.booleans()),
    }


@st.composite
def large_linears(draw) -> layer.Linear:
    weight_format = draw(st.sampled_from(cases.WEIGHT_FORMATS))
    k, n = _large_sizes(draw, weight_format, most=6_000_000)
    activation = draw(st.sampled_from([None, None, "silu_and_mul"]))
    return layer.Linear(weight_format, n=n, k=k, activation=activation, **_of_large_products(draw))


@st.composite
def large_gated_mlps(draw) -> layer.GatedMlp:
    weight_format = draw(st.sampled_from(cases.WEIGHT_FORMATS))
    hidden, intermediate = _large_sizes(draw, weight_format, most=2_500_000)
    norm = draw(st.booleans())
    return layer.GatedMlp(
        weight_format, hidden=hidden, intermediate=intermediate, norm=norm, **_of_large_products(draw)
    )


@st.composite
def gated_mlps(draw) -> layer.GatedMlp:
    weight_format = draw(st.sampled_from(cases.WEIGHT_FORMATS))
    unit = 128 if weight_format.startswith("int4") else 16
    return layer.GatedMlp(
        weight_format,
        rows=draw(st.one_of(st.integers(0, 12), st.integers(0, 70))),
        hidden=unit * draw(st.integers(1, 320 // unit)),
        intermediate=unit * draw(st.integers(1, 320 // unit)),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        norm=draw(st.booleans()),
        residual=draw(st.booleans()),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(["silu_and_mul", "gelu_and_mul"])),
    )


@st.composite
def attention_blocks(draw) -> layer.AttentionBlock:
    weight_format = draw(st.sampled_from(cases.WEIGHT_FORMATS))
    int4 = weight_format.startswith("int4")
    sequences = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 90)), max_size=12))
    kv_heads, cache_dtype = draw(st.integers(1, 3)), draw(st.sampled_from([None, None, *cases.FLOAT8S]))
    case = cases.AttentionCase(
        "fuzz",
        tuple((q, q + behind) for q, behind in sequences),
        num_heads=kv_heads * draw(st.integers(1, 4)) * (2 if int4 else 1),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128] if int4 else [16, 64, 80, 128])),
        page_size=draw(st.sampled_from([1, 8, 16])),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        cache_dtype=cache_dtype,
        scales=draw(st.sampled_from(["one", "per_head"])) if cache_dtype else None,
        layout=draw(st.sampled_from(["combined", "split"])),
        sliding_window=draw(st.sampled_from([None, None, 7, 33])),
        soft_cap=draw(st.sampled_from([None, None, 20.0])),
        sinks=draw(st.booleans()),
    )
    return layer.AttentionBlock(
        case,
        weight_format,
        hidden=128 * draw(st.integers(1, 2)) if int4 else 16 * draw(st.integers(1, 12)),
        norm=draw(st.booleans()),
        residual=draw(st.booleans()),
        bias=draw(st.booleans()),
        head_norms=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        products=draw(st.sampled_from([("qkv", "out"), ("qkv", "out"), (), ("qkv",), ("out",)])),
    )
