"""What hypothesis draws for mla_attention and concat_and_cache_mla."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.common import cases, mla_cases
from tests.fuzz.latents import HostileLatents, Latents, LatentUpdate
from tests.fuzz.strategies import PAGE_SIZES, SEEDS, batches, damages, large_batches


@st.composite
def programs(draw) -> mla_cases.Case:
    # DeepSeek's, those of a kernel's tiles, and any other.
    head_dim, value_dim = draw(st.sampled_from([(576, 512), (192, 128), (320, 256), (64, 64), (None, None)]))
    if head_dim is None:
        head_dim = 8 * draw(st.integers(1, 72))
        value_dim = 8 * draw(st.integers(1, min(head_dim, 512) // 8))
    return mla_cases.Case(
        "fuzz",
        (),
        num_heads=draw(st.one_of(st.integers(1, 10), st.integers(1, 20), st.sampled_from([16, 32, 64, 128]))),
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=draw(PAGE_SIZES),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        scale=draw(st.one_of(st.none(), st.floats(-0.5, 0.5, width=32))),
        spread=draw(st.sampled_from([1.0, 1.0, 0.1, 4.0])),
        spare_seqs=draw(st.integers(0, 4)),
        spare_columns=draw(st.integers(0, 4)),
        padding_tokens=draw(st.integers(0, 12)),
        shared_prefix=draw(st.sampled_from([0, 0, 1, 3])),
    )


@st.composite
def latents(draw, max_batches: int = 3) -> Latents:
    batch = batches(draw(st.sampled_from([60, 100, 300])))
    drawn = draw(st.lists(batch, min_size=1, max_size=max_batches))
    return Latents(draw(programs()), tuple(drawn), seed=draw(SEEDS), with_lse=draw(st.booleans()))


@st.composite
def large_latents(draw) -> Latents:
    """DeepSeek's sizes and contexts so long that the CUDA kernel for sm_90a divides the keys of a row among CTAs."""
    program = draw(programs()).but(
        num_heads=draw(st.sampled_from([16, 128, 1, 20])),
        head_dim=576,
        value_dim=512,
        page_size=draw(st.sampled_from([64, 16, 24, 128])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        shared_prefix=0,
    )
    batch = draw(large_batches(6_000_000 // (program.num_heads * 8)))
    return Latents(program, (batch,), seed=draw(SEEDS), with_lse=draw(st.booleans()))


@st.composite
def hostile_latents(draw) -> HostileLatents:
    attention = draw(latents(max_batches=1))
    return HostileLatents(attention, draw(damages(attention.paged())))


@st.composite
def latent_updates(draw) -> LatentUpdate:
    num_tokens = draw(st.one_of(st.integers(0, 40), st.integers(0, 700)))
    num_slots = draw(st.one_of(st.none(), st.integers(0, num_tokens)))
    page_size = draw(PAGE_SIZES)
    case = mla_cases.LatentCase(
        "fuzz",
        num_tokens=num_tokens,
        kv_lora_rank=draw(st.one_of(st.sampled_from([512, 256]), st.integers(1, 40).map(lambda n: 8 * n))),
        rope_dim=draw(st.one_of(st.just(64), st.integers(1, 20).map(lambda n: 8 * n))),
        page_size=page_size,
        num_pages=max(1, -(-num_tokens // page_size)) + draw(st.integers(0, 3)),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        slot_dtype=draw(st.sampled_from(["int32", "int64"])),
        num_slots=num_slots,
        skipped=draw(st.integers(0, num_tokens if num_slots is None else num_slots)),
    )
    return LatentUpdate(
        case, seed=draw(SEEDS), duplicates=draw(st.sampled_from([0, 1, 20])), specials=draw(st.booleans())
    )
