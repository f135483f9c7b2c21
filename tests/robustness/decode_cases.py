"""Calls of paged_attention as decoding has them, for the sanitizers."""

from __future__ import annotations

from tests.common import cases

# Sequences as decoding has them: of 1 to 8 new rows, alone and many, behind contexts of one key up to many chunks.
DECODES = (
    ((1, 1),),
    ((1, 700),),
    ((1, 3000),),
    tuple((1, context) for context in (1, 15, 16, 17, 255, 256, 257, 1025)),
    ((1, 0), (1, 900), (0, 40), (1, 3)),
    ((2, 300), (3, 40)),
    ((4, 1500), (4, 4)),
    ((8, 2100),),
    ((5, 90), (6, 7), (7, 513), (8, 3)),
    tuple((1, 40 + 37 * i) for i in range(20)),
)


def decode_grid(count: int = 120) -> list[cases.AttentionCase]:
    """Every value of every axis equally often, against the others' in an order of its own."""
    axes = {
        "sequences": DECODES,
        "dtype": ("bfloat16", "bfloat16", "float16", "float32"),
        "cache_dtype": (None, None, *cases.FLOAT8S),
        "head_dim": (128, 64, 256, 80, 128, 96, 192, 112),
        "page_size": (16, 1, 2, 3, 7, 8, 32, 64, 128, 256),
        "group": (4, 8, 1, 2, 3, 5, 7, 16),
        "num_kv_heads": (2, 1, 4),
        "sliding_window": (None, None, None, 1, 100, 1024),
        "soft_cap": (None, None, 5.0),
        "sinks": (False, True),
        "tree": (0, 0, 0, 1, 2),
        "layout": ("combined", "split"),
        "scales": ("one", "per_head"),
        "spare_columns": (2, 0),
        "padding_tokens": (0, 3),
    }
    columns = {
        axis: [values[i % len(values)] for i in cases.rng_for(f"sanitize-{axis}").permutation(count)]
        for axis, values in axes.items()
    }
    made = []
    for i in range(count):
        fields = {axis: column[i] for axis, column in columns.items()}
        fields["num_heads"] = fields.pop("group") * fields["num_kv_heads"]
        if fields["cache_dtype"] is None:
            fields["scales"] = None
        made.append(cases.AttentionCase(f"decode-{i}", **fields))
    return made
