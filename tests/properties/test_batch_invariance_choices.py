"""The bits of a sequence's rows do not depend on its neighbours where these change what CUDA chooses by shapes alone:
the rows of a work tile, and whether CTAs share the keys of a row."""

from __future__ import annotations

import pytest

from tests.common import compare
from tests.properties.test_batch_invariance import batch, results, sequence, subject


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize(
    ("name", "shape", "sequences"),
    [
        ("twelve-tokens", "group-4-bf16", 40),
        ("twelve-tokens", "group-8-bf16", 36),
        ("forty-tokens", "group-4-bf16", 3),
        ("forty-tokens", "group-8-bf16", 20),
    ],
)
def test_sequences_of_as_many_tokens_do_not_change_bits(frontend, name, shape, sequences):
    """On CUDA sequences of as many tokens each, 48, 96, 160 or 320 rows of a KV head, have work tiles of 64, 128 or 192
    rows, by what is left of the last one. Not beside a sequence of one token more."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    rows, context = sequence(name)
    others = tuple((rows, context - i % 7) for i in range(sequences - 1))
    for what, before, after in (
        ("alike", others[:1], others[1:]),
        ("one more", ((rows + 1, context), *others[:1]), others[2:]),
    ):
        got = results(frontend, *batch(name, shape, before, after, spare_seqs=0, padding_tokens=0))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {sequences} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", ["gqa-bf16", "head-64-bf16"])
@pytest.mark.parametrize("name", ["few-rows", "speculative-short"])
def test_uneven_sequences_do_not_change_bits(frontend, name, shape):
    """On CUDA a few tokens behind a long context are split beside a chunk of many rows too, if the context may be as
    long as here."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    for what, before, after in (
        ("a longer one", ((400, 1000),), ((3, 17000), (2, 40), (1, 500))),
        ("room for one", ((400, 1000), (5, 30)), ((3, 900), (1, 500))),
    ):
        columns = 0 if what == "a longer one" else 1000
        got = results(frontend, *batch(name, shape, before, after, spare_seqs=0, spare_columns=columns))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("name", ["one-token", "two-tokens"])
def test_few_tokens_in_the_kernel_of_their_neighbours_do_not_change_bits(frontend, name):
    """On CUDA the kernel for several tokens of a few sequences computes those of one or two tokens too: by CTAs without
    a work tile, or by all of them where only padding makes more tokens."""
    shape = "group-8-bf16"
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    for what, before, after, changes in (
        ("two", ((8, 100),), (), {}),
        ("idle", ((8, 100),), ((8, 3000), (5, 40)), {}),
        ("few idle", ((8, 4700),), ((8, 4900),), {}),
        ("padding", ((1, 700), (1, 30)), ((1, 4000),), {"padding_tokens": 20}),
        ("spare", ((8, 100),), ((8, 300),), {"spare_seqs": 1}),
    ):
        got = results(frontend, *batch(name, shape, before, after, **{"spare_seqs": 0, "padding_tokens": 0, **changes}))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("name", ["decode", "two-behind-few"])
def test_few_tokens_behind_short_contexts_in_the_kernel_of_their_neighbours_do_not_change_bits(frontend, name):
    """As above, by whole work tiles."""
    shape = "group-8-bf16"
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    for what, before, after in (("idle", ((8, 100),), ((8, 900), (5, 40))), ("many", (), ((8, 1000),) * 15)):
        got = results(frontend, *batch(name, shape, before, after, spare_seqs=0, spare_columns=0, padding_tokens=0))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")
