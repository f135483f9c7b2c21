"""The bits of a sequence's rows do not depend on its neighbours where these change what CUDA chooses by shapes alone:
the rows of a work tile, and whether CTAs share the keys of a row."""

from __future__ import annotations

import pytest

from tests.common import compare
from tests.properties.test_batch_invariance import ONE_KV_HEAD_SHAPES, batch, results, sequence, subject


def assert_same_bits(frontend, name, shape, batches):
    """batches: what is special, the sequences before the subject and behind it, and other changes of the batch."""
    case, inputs = subject(name, shape)
    want = results(frontend, inputs.arrays(), case)
    for what, before, after, *changes in batches:
        options = {"spare_seqs": 0, "padding_tokens": 0, **(changes[0] if changes else {})}
        got = results(frontend, *batch(name, shape, before, after, **options))
        for result, g, w in zip(("out", "lse"), got, want, strict=True):
            compare.assert_bitwise_equal(g, w, f"{frontend.name} {name} {shape} {what}: {result}")


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
    rows, context = sequence(name)
    others = tuple((rows, context - i % 7) for i in range(sequences - 1))
    batches = [
        (f"{sequences} alike", others[:1], others[1:]),
        (f"{sequences}, one more", ((rows + 1, context), *others[:1]), others[2:]),
    ]
    assert_same_bits(frontend, name, shape, batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize(
    ("name", "shape", "sequences"),
    [
        ("speculative-1400", "group-8-bf16", 50),
        ("speculative-2900", "group-8-bf16", 40),
        ("speculative-2900", "group-4-bf16", 36),
    ],
)
def test_sequences_of_the_last_round_do_not_change_bits(frontend, name, shape, sequences):
    """On CUDA 200, 160 or 288 work tiles before their keys are split are a round of 132 CTAs, or two, and 68, 28 or 24
    more, those of the first sequences, which all CTAs share."""
    rows, context = sequence(name)
    others = tuple((rows, context - i % 5) for i in range(sequences - 1))
    batches = [(f"behind {before}", others[:before], others[before:]) for before in (1, sequences - 2)]
    assert_same_bits(frontend, name, shape, batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", ONE_KV_HEAD_SHAPES)
def test_accumulators_of_the_longest_contexts_do_not_change_bits(frontend, shape):
    """On CUDA, where contexts may be as long as here and not all accumulators fit the scratch, sequences of the longest
    contexts have them: the subject among shorter ones, and not among longer ones. Beside one token, whose path needs
    its part of the scratch, fewer have."""
    shorter = tuple((30, 3000 + 100 * i) for i in range(30))
    longer = tuple((30, 12000 + i) for i in range(20))
    columns = {"spare_columns": 1400}
    batches = [
        ("the longest", shorter[:7], shorter[7:], columns),
        ("the shortest", longer[:3], longer[3:], columns),
        ("beside one token", longer[:2], ((1, 500), *shorter[:9]), columns),
        ("behind a prompt", ((600, 600), *longer[:5]), shorter[:3], columns),
    ]
    assert_same_bits(frontend, "thirty-tokens", shape, batches)


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
    batches = [
        ("two", ((8, 100),), ()),
        ("idle", ((8, 100),), ((8, 3000), (5, 40))),
        ("few idle", ((8, 4700),), ((8, 4900),)),
        ("padding", ((1, 700), (1, 30)), ((1, 4000),), {"padding_tokens": 20}),
        ("spare", ((8, 100),), ((8, 300),), {"spare_seqs": 1}),
    ]
    assert_same_bits(frontend, name, "group-8-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("name", ["decode", "two-behind-few"])
def test_few_tokens_behind_short_contexts_in_the_kernel_of_their_neighbours_do_not_change_bits(frontend, name):
    """As above, by whole work tiles."""
    short = {"spare_columns": 0}
    batches = [("idle", ((8, 100),), ((8, 900), (5, 40)), short), ("many", (), ((8, 1000),) * 15, short)]
    assert_same_bits(frontend, name, "group-8-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize(
    "shape", ["gqa-bf16", "gqa-fp8", "group-7-f16", "head-64-bf16", "head-256-bf16", "one-kv-head-bf16"]
)
@pytest.mark.parametrize("name", ["decode", "two-behind-few"])
def test_whole_work_tiles_of_many_short_sequences_do_not_change_bits(frontend, name, shape):
    """On CUDA, of more than 32 sequences in a table of up to 128, each CTA group takes one whole work tile where there
    are no more of these, which 33 are of 8 kv heads on an H100 or H200, and none is much longer than the others. Else
    equal parts of all, which a second kernel merges."""
    short = tuple((1, 129 + 7 * i) for i in range(32))
    batches = [
        ("whole", short[:9], short[9:]),
        ("with empty ones", ((0, 0), (1, 0), *short[:9]), ((0, 50), *short[12:])),
        ("in a table of more", short[:9], short[9:], {"spare_seqs": 40}),
        ("beside a longer one", ((1, 3000), *short[:9]), short[10:]),
        ("more work tiles", short[:9], short * 2),
        ("in a large table", short[:9], short[9:], {"spare_seqs": 300}),
    ]
    assert_same_bits(frontend, name, shape, batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("name", ["twelve-tokens", "forty-tokens", "speculative-short", "speculative-2900"])
def test_work_tiles_at_head_dim_64_do_not_change_bits(frontend, name):
    """On CUDA sequences of few rows have work tiles of 64, computed in turns by two warpgroups, others of 192."""
    rows, context = sequence(name)
    alike = tuple((rows, context - i % 7) for i in range(36))
    batches = [
        ("three alike", alike[:1], alike[1:2]),
        ("thirty-six alike", alike[:20], alike[20:35]),
        ("beside decode rows", ((1, 900), (1, 2100)), ((1, 5),)),
        ("beside a chunk", ((500, 1000),), ((1, 700),)),
    ]
    assert_same_bits(frontend, name, "two-kv-heads-64-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("name", ["few-rows", "forty-tokens", "speculative-long"])
def test_few_unequal_sequences_do_not_change_bits(frontend, name):
    """On CUDA work tiles of a few sequences of unequal numbers of tokens behind long contexts have up to 128 rows."""
    batches = [
        ("unequal", ((3, 8500),), ((1, 400), (7, 9000))),
        ("many", ((3, 8500), (200, 900)), ((1, 400),) * 10),
    ]
    assert_same_bits(frontend, name, "two-kv-heads-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
def test_shared_scratch_does_not_change_bits(frontend):
    """The split accumulators of six such sequences need more than the prefill path's part of the scratch: on CUDA it
    gets all, where sequences have as many tokens each."""
    rows, context = sequence("few-rows")
    alike = ((rows, context),) * 5
    batches = [("alike", alike[:2], alike[2:]), ("one more", ((rows + 1, context),), alike[1:])]
    assert_same_bits(frontend, "few-rows", "gqa-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
def test_long_chunk_does_not_change_bits(frontend):
    """On CUDA the keys before such a chunk, of 70 work tiles, are split in three: more work tiles than SMs."""
    batches = [("beside decode rows", ((1, 300),) * 3, ()), ("beside a prompt", ((300, 300),), ((5, 900),))]
    assert_same_bits(frontend, "chunk-of-1100", "two-kv-heads-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
def test_decode_rows_beside_a_chunk_do_not_change_bits(frontend):
    """On CUDA the decode path divides their keys unevenly, where some of its CTAs start before the last work tiles of a
    chunk of a prompt end."""
    decodes = tuple((1, 740 + 22 * i) for i in range(36))
    batches = [("behind a chunk", ((260, 1800), *decodes[:20]), decodes[20:])]
    assert_same_bits(frontend, "decode", "gqa-bf16", batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize(
    ("shape", "sequences"),
    [("gqa-bf16", 40), ("one-kv-head-bf16", 70), ("one-kv-head-bf16", 150), ("two-kv-heads-64-bf16", 330)],
)
@pytest.mark.parametrize("name", ["decode", "long", "one-token"])
def test_many_decode_rows_do_not_change_bits(frontend, name, shape, sequences):
    """On CUDA the lengths of all sequences say where a sequence's keys are cut between CTAs. The combine kernel looks
    at 32 sequences at a time, each warp at some of them."""
    others = tuple((1, 50 + 137 * i % 900) for i in range(sequences - 1))
    batches = [
        ("first", (), others),
        ("in the middle", others[: sequences // 2], others[sequences // 2 :]),
        ("behind a longer one", ((1, 6000), *others[1:]), ()),
    ]
    assert_same_bits(frontend, name, shape, batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
@pytest.mark.parametrize("shape", ["group-4-bf16", "group-8-bf16", "two-kv-heads-64-bf16"])
@pytest.mark.parametrize("name", ["speculative-long", "speculative-short", "one-token"])
def test_both_paths_in_one_scratch_do_not_change_bits(frontend, name, shape):
    """On CUDA the decode path comes first where sequences have few tokens on average. The split accumulators of several
    tokens stand where those of one token are until they have merged."""
    batches = [
        ("few", ((1, 4000),) * 12, ((1, 3000),) * 6 + ((8, 2000),)),
        ("many", ((1, 1200),) * 50, ((8, 5000),)),
        ("short", ((8, 700), *((1, 90),) * 12), ((1, 30),) * 6),
    ]
    assert_same_bits(frontend, name, shape, batches)


@pytest.mark.frontends("eager-cuda", "jax-cuda")
def test_row_tiles_for_nearly_all_ctas_do_not_change_bits(frontend):
    """On CUDA one CTA takes all splits of its rows where many sequences of unequal few tokens have row tiles for nearly
    all CTAs, and contexts are short."""
    unequal = tuple((3 + i % 4, 2600 + i) for i in range(119))
    batches = [
        ("nearly all", unequal[:40], unequal[40:]),
        ("few", unequal[:20], unequal[20:39]),
        ("longer contexts", unequal[:40], (*unequal[40:], (3, 9000))),
    ]
    assert_same_bits(frontend, "speculative-2900", "one-kv-head-bf16", batches)
