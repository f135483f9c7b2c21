"""What hypothesis draws from. Sizes are small, since faults of indices, tiles and masks show in small inputs, and each
is compared with a reference that is slow; tests/common/cases.py has the large ones."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.common import cases
from tests.common.cache_cases import CacheCase
from tests.common.cases import AttentionCase
from tests.fuzz import layer
from tests.fuzz.inputs import Add, Attention, Hostile, Merge, Update

SEEDS = st.integers(0, 2**32 - 1)
# The sizes that models have, and all the others.
HEAD_DIMS = st.one_of(st.sampled_from([64, 128, 80, 96, 256, 192]), st.integers(1, 32).map(lambda n: 8 * n))
PAGE_SIZES = st.one_of(st.sampled_from([16, 1, 32, 64, 128]), st.integers(1, 33))
INT32 = st.integers(-(2**31), 2**31 - 1)
MAX_ROWS = 96  # query rows of a batch


@st.composite
def sequences(draw, longest: int) -> tuple[int, int]:
    """(query tokens, context length), by what servers send."""
    length = draw(st.one_of(st.integers(0, 40), st.integers(0, longest)))
    kind = draw(st.sampled_from(["decode", "chunk", "prompt", "few", "idle", "cut"]))
    match kind:
        case "decode":
            return 1, max(length, 1)
        case "few":
            return draw(st.integers(2, 9)), length + 9
        case "chunk":
            return draw(st.integers(1, 40)), length + 40
        case "prompt":
            rows = min(max(length, 1), 70)
            return rows, rows
        case "idle":
            return 0, length
    return draw(st.integers(1, 20)), draw(st.integers(0, 19))  # more query rows than keys


@st.composite
def batches(draw, longest: int):
    batch, rows = [], 0
    for q_len, context_len in draw(st.lists(sequences(longest), max_size=7)):
        if rows + q_len <= MAX_ROWS:
            batch.append((q_len, context_len))
            rows += q_len
    return tuple(batch)


@st.composite
def programs(draw) -> AttentionCase:
    num_kv_heads = draw(st.integers(1, 4))
    group = draw(st.one_of(st.sampled_from([1, 4, 8]), st.integers(1, 16)))
    cache_dtype = draw(st.sampled_from([None, None, None, *cases.FLOAT8S]))
    return AttentionCase(
        "fuzz",
        (),
        num_heads=num_kv_heads * min(group, 32 // num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=draw(HEAD_DIMS),
        page_size=draw(PAGE_SIZES),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        cache_dtype=cache_dtype,
        scales=draw(st.sampled_from(["one", "per_head"])) if cache_dtype else None,
        layout=draw(st.sampled_from(["combined", "split"])),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 100), st.sampled_from([10**6, 2**31, 2**40]))),
        soft_cap=draw(st.one_of(st.none(), st.floats(0.5, 100, width=32))),
        scale=draw(st.one_of(st.none(), st.floats(-1, 1, width=32))),
        sinks=draw(st.booleans()),
        tree=draw(st.sampled_from([0, 0, 0, 1, 2])),
        # A float8_e4m3fn cache would overflow to NaN at 4.
        spread=draw(st.sampled_from([1.0, 1.0, 0.1] if cache_dtype == "float8_e4m3fn" else [1.0, 1.0, 0.1, 4.0])),
        spare_seqs=draw(st.integers(0, 4)),
        spare_columns=draw(st.integers(0, 4)),
        padding_tokens=draw(st.integers(0, 12)),
        shared_prefix=draw(st.sampled_from([0, 0, 1, 3])),
    )


@st.composite
def attentions(draw, max_batches: int = 4) -> Attention:
    program = draw(programs())
    longest = draw(st.sampled_from([100, 300, 1500]))
    batch = batches(longest)
    if program.tree:  # no sequence has more new tokens than its rows of tree_mask have bits
        most = 32 * program.tree
        batch = batch.map(lambda sequences: tuple((min(rows, most), context) for rows, context in sequences))
    return Attention(
        program,
        tuple(draw(st.lists(batch, min_size=1, max_size=max_batches))),
        seed=draw(SEEDS),
        with_lse=draw(st.booleans()),
    )


@st.composite
def large_batches(draw, most_scores: int):
    """Sizes at which the CUDA kernels choose other work tiles and plans: more than 32 sequences, hundreds of rows."""
    kind = draw(st.sampled_from(["decode", "several", "prompts", "chunks", "chunk-and-decode"]))
    count = draw(st.one_of(st.integers(1, 32), st.integers(33, 90)))
    context = draw(st.sampled_from([60, 400, 3000]))
    decode = [(1, draw(st.integers(1, context))) for _ in range(count)]
    match kind:
        case "decode":
            batch = decode
        case "several":
            alike = draw(st.booleans())
            rows = draw(st.integers(2, 32))
            batch = [(rows if alike else draw(st.integers(1, rows)), rows + length) for _, length in decode]
        case "prompts":
            batch = [(length, length) for _, length in decode]
        case _:
            chunks = [
                (draw(st.integers(33, 500)), draw(st.integers(500, 3000))) for _ in range(draw(st.integers(1, 3)))
            ]
            batch = [*chunks, *decode] if kind == "chunk-and-decode" else chunks
    # The reference takes time for all scores, and for all keys.
    kept, scores, keys = [], 0, 0
    for rows, length in batch:
        if scores + rows * length <= most_scores and keys + length <= 60_000:
            kept.append((rows, length))
            scores += rows * length
            keys += length
    return tuple(draw(st.permutations(kept)) if draw(st.booleans()) else kept)


@st.composite
def large_attentions(draw) -> Attention:
    num_kv_heads = draw(st.integers(1, 2))
    program = draw(programs()).but(
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 4, 8, 5])),
        head_dim=draw(st.sampled_from([128, 64, 256, 80])),
        tree=0,
        shared_prefix=0,
    )
    if draw(st.sampled_from([False, False, True])):  # room for long contexts: CUDA has instances for that
        page_size = draw(st.sampled_from([16, program.page_size]))
        columns, tokens = 32768 // page_size + 1, draw(st.integers(0, 600))
        program = program.but(page_size=page_size, spare_columns=columns, padding_tokens=tokens, sliding_window=None)
    most_scores = min(400_000, 300_000_000 // (program.num_heads * program.head_dim))
    return Attention(program, (draw(large_batches(most_scores)),), seed=draw(SEEDS), with_lse=draw(st.booleans()))


@st.composite
def updates(draw) -> Update:
    cache_dtype = draw(st.sampled_from([None, *cases.FLOAT8S]))
    num_pages, page_size = draw(st.integers(1, 20)), draw(PAGE_SIZES)
    num_tokens = draw(st.integers(0, min(60, num_pages * page_size)))
    num_slots = draw(st.one_of(st.none(), st.integers(0, num_tokens)))
    slots = num_tokens if num_slots is None else num_slots
    case = CacheCase(
        "fuzz",
        num_tokens=num_tokens,
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=draw(HEAD_DIMS),
        page_size=page_size,
        num_pages=num_pages,
        dtype=draw(st.sampled_from(cases.FLOATS)),
        cache_dtype=cache_dtype,
        layout=draw(st.sampled_from(["combined", "split"])),
        scales=draw(st.sampled_from(["one", "per_head"])) if cache_dtype else None,
        slot_dtype=draw(st.sampled_from(["int32", "int64"])),
        num_slots=num_slots,
        skipped=draw(st.integers(0, slots)),
        spread=draw(st.sampled_from([1.0, 0.01, 300.0, 1e5])),
    )
    return Update(
        case, seed=draw(SEEDS), duplicates=draw(st.integers(0, 20)), specials=draw(st.booleans()) and num_tokens > 0
    )


merges = st.builds(
    Merge,
    num_tokens=st.integers(0, 40),
    num_heads=st.integers(1, 9),
    head_dim=st.one_of(HEAD_DIMS, st.integers(1, 40)),
    dtype=st.sampled_from(cases.FLOATS),
    spread=st.sampled_from([0.0, 1.0, 10.0, 3000.0]),
    empty=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=SEEDS,
)
adds = st.builds(
    Add,
    shape=st.lists(st.integers(0, 20), max_size=4).map(tuple),
    dtype=st.sampled_from(cases.FLOATS),
    seed=SEEDS,
)

norms = st.builds(
    layer.RmsNorm,
    shape=st.lists(st.integers(0, 9), max_size=2).flatmap(
        lambda rows: st.one_of(HEAD_DIMS, st.integers(1, 700)).map(lambda size: (*rows, size))
    ),
    dtype=st.sampled_from(cases.FLOATS),
    with_residual=st.booleans(),
    weight_offset=st.sampled_from([0.0, 1.0, -0.25]),
    round_once=st.booleans(),
    specials=st.booleans(),
    seed=SEEDS,
)


all_reduces = st.builds(
    layer.AllReduce,
    ranks=st.integers(1, 9),
    rows=st.integers(0, 9),
    hidden=st.one_of(HEAD_DIMS, st.integers(1, 700), st.sampled_from([4096, 4099])),
    dtype=st.sampled_from(cases.FLOATS),
    norm=st.booleans(),
    specials=st.booleans(),
    seed=SEEDS,
)


gated = st.builds(
    layer.Gated,
    operator=st.sampled_from(["silu_and_mul", "gelu_and_mul"]),
    shape=st.tuples(st.integers(0, 9), st.integers(0, 300).map(lambda n: 2 * n)),
    dtype=st.sampled_from(cases.FLOATS),
    seed=SEEDS,
)


samples = st.builds(
    layer.Sample,
    rows=st.integers(0, 9),
    vocab=st.one_of(st.integers(1, 70), st.integers(1, 6000)),
    dtype=st.sampled_from(cases.FLOATS),
    spread=st.sampled_from([1.0, 1e-4, 0.1, 8.0]),
    coarse=st.booleans(),
    hidden=st.sampled_from([0.0, 0.5, 1.0]),
    seed=SEEDS,
)


rotaries = st.one_of(
    st.builds(
        layer.RotaryEmbedding,
        num_tokens=st.integers(0, 20),
        num_heads=st.integers(1, 9),
        num_kv_heads=st.integers(1, 4),
        head_dim=st.one_of(HEAD_DIMS, st.integers(1, 40)),
        rotary_dim=st.integers(0, 64).map(lambda n: 2 * n),
        dtype=st.sampled_from(cases.FLOATS),
        interleaved=st.booleans(),
        seed=SEEDS,
    ),
    st.builds(
        layer.RotaryAndCache,
        case=updates().map(lambda x: x.case).filter(lambda case: case.spread < 10),
        num_heads=st.integers(1, 9),
        rotary_dim=st.sampled_from([512, 0, 2, 32, 64]),
        norms=st.booleans(),
        bias=st.booleans(),
        interleaved=st.booleans(),
        duplicates=st.integers(0, 5),
        seed=SEEDS,
    ),
)


@st.composite
def damages(draw, attention: Attention) -> tuple[tuple[str, int, int], ...]:
    """Numbers to write over entries of the metadata: edges, about the largest sound ones, and any."""
    (_, inputs), *_ = attention.built()
    pages = inputs.kv_cache.shape[1 if attention.program.layout == "split" else 0]
    capacity = inputs.block_tables.shape[1] * attention.program.page_size
    edge = st.sampled_from([-1, 0, 1, 2**31 - 1, -(2**31)])
    numbers = {
        "block_tables": st.one_of(edge, st.integers(-2, pages + 2), INT32),
        "context_lens": st.one_of(edge, st.integers(-2, capacity + 2), INT32),
        "query_start_loc": st.one_of(edge, st.integers(-2, inputs.query.shape[0] + 2), INT32),
        "num_seqs": st.one_of(edge, st.integers(-1, inputs.context_lens.shape[0] + 1)),
    }
    damage = []
    for argument in draw(st.lists(st.sampled_from(sorted(numbers)), min_size=1, max_size=3)):
        damage.append((argument, draw(st.integers(0, 40)), draw(numbers[argument])))
    return tuple(damage)


@st.composite
def hostiles(draw) -> Hostile:
    attention = draw(attentions(max_batches=1))
    return Hostile(attention, draw(damages(attention)))
