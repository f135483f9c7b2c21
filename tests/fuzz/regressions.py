"""Inputs that once failed, each with the fault that it found; every run of the fuzzer begins with them. A failure
prints the expression to put here."""

from __future__ import annotations

from tests.common.bidirectional_cases import Case
from tests.common.cache_cases import CacheCase
from tests.common.cases import AttentionCase
from tests.fuzz.composites import Bidirectional, ExpertsMlp, HostileBidirectional
from tests.fuzz.inputs import Add, Attention, Hostile, Merge, Update
from tests.fuzz.layer import Linear, RotaryAndCache

# fmt: off
CASES: dict[
    str, Add | Attention | ExpertsMlp | Hostile | HostileBidirectional | Linear | Merge | RotaryAndCache | Update
] = {
    # The lse of a batch without rows is a null pointer, by which the check took the call for one without lse.
    "the-error-names-the-operator-without-rows": Hostile(
        Attention(
            AttentionCase("fuzz", (), num_heads=1, num_kv_heads=1, spare_seqs=0, spare_columns=0, padding_tokens=0),
            batches=(((0, 0),),),
        ),
        damage=(("context_lens", 0, -1),),
    ),
    # No fault but the tolerance's: two logits of hundreds whose difference float32 rounds, where PyTorch was lucky.
    "logits-of-hundreds": Attention(
        AttentionCase(
            "fuzz", (), num_heads=30, num_kv_heads=3, head_dim=8, page_size=26, cache_dtype="float8_e4m3fn",
            sliding_window=9, scales="one", spread=4.0, spare_seqs=0, spare_columns=3, padding_tokens=8,
        ),
        batches=(((36, 40), (36, 245), (1, 1), (1, 1)), ((1, 1),) * 6 + ((1, 313),)),
        seed=3532135,
        with_lse=False,
    ),
    # No fault but the tolerance's: the rounding of logits before a soft cap, seen in the lse of a row of one key.
    "logits-before-a-soft-cap": Attention(
        AttentionCase(
            "fuzz", (), num_heads=1, num_kv_heads=1, head_dim=216, page_size=32, cache_dtype="float8_e5m2",
            soft_cap=9.0, scale=1.0, scales="one", spread=4.0, spare_seqs=0, spare_columns=0, padding_tokens=0,
        ),
        batches=(((1, 1), (1, 1), (1, 1), (1, 1), (2, 2), (1, 33)),),
    ),
    # Two query rows over a context of one key, whose page is wrong: on CUDA the row that sees no key was 0, not NaN.
    "a-wrong-page-and-a-row-that-sees-no-key": Hostile(
        Attention(
            AttentionCase("fuzz", (), num_heads=1, num_kv_heads=1, spare_seqs=0, spare_columns=0, padding_tokens=0),
            batches=(((2, 1),),),
            with_lse=False,
        ),
        damage=(("block_tables", 0, -1),),
    ),
    # A tree has 32 nodes for each word of a mask row at most: a longer sequence is an error, or NaN without the check.
    "a-sequence-of-more-tokens-than-a-tree-has": Hostile(
        Attention(
            AttentionCase("fuzz", (), num_heads=1, num_kv_heads=1, tree=1, spare_seqs=0, spare_columns=0),
            batches=(((1, 1),) * 4 + ((26, 26),),),
            with_lse=False,
        ),
        damage=(("query_start_loc", 1, 33),),
    ),
    "more-tokens-than-a-tree-has-behind-an-empty-sequence": Hostile(
        Attention(
            AttentionCase(
                "fuzz", (), num_heads=1, num_kv_heads=1, tree=1, spare_seqs=0, spare_columns=0, padding_tokens=0
            ),
            batches=(((1, 1), (32, 32)),),
            with_lse=False,
        ),
        damage=(("query_start_loc", 1, 0),),
    ),
    # float32 prefill on CUDA corrected the sums by a rounding error with each tile of keys.
    "large-scores-in-float32": Attention(
        AttentionCase(
            "fuzz", (), num_heads=1, num_kv_heads=1, spread=4.0, spare_seqs=0, spare_columns=0, padding_tokens=0
        ),
        batches=(((1, 1), (9, 801)),),
    ),
    "large-scores-in-float32-and-the-output": Attention(
        AttentionCase(
            "fuzz", (), num_heads=1, num_kv_heads=1, spread=4.0, spare_seqs=0, spare_columns=0, padding_tokens=0
        ),
        batches=(((13, 1537),),),
        with_lse=False,
    ),
    "scores-without-scale-in-float32": Attention(
        AttentionCase(
            "fuzz", (), num_heads=1, num_kv_heads=1, scale=1.0, spare_seqs=0, spare_columns=0, padding_tokens=0
        ),
        batches=(((9, 977),),),
    ),
    # No fault but the tolerance's: products of hundreds, which float32 rounds before the cap makes them small.
    "products-of-hundreds-under-a-cap": Attention(
        AttentionCase(
            "fuzz", (), num_heads=24, num_kv_heads=3, head_dim=256, page_size=32, soft_cap=1.0, scale=1.0, spread=4.0,
            spare_seqs=0, spare_columns=1, padding_tokens=0,
        ),
        batches=(((6, 9), (1, 1), (1, 1), (1, 1), (1, 193)),),
        seed=634043,
        with_lse=False,
    ),
    # No fault: above 64 rows each framework has its own product, whose bits are its own.
    "a-product-of-the-framework": Linear("plain", rows=65, n=64, k=96, dtype="float16"),
    # No fault but the tolerance's: a norm rounded to the other side, of one element of a pair that is then rotated.
    "a-norm-that-is-rounded-and-rotated": RotaryAndCache(
        case=CacheCase("fuzz", num_tokens=52, num_kv_heads=1, head_dim=80, page_size=64, num_pages=1, dtype="float16",
                       skipped=0),
        num_heads=2,
        rotary_dim=512,
        norms=True,
        seed=1,
    ),
    # An expert's result that is infinite, times the lower part of a weight, which is 0: NaN.
    "an-infinite-result-and-a-weight-of-few-bits": ExpertsMlp(
        "plain", rows=2, num_experts=1, top_k=5, hidden=16, intermediate=16, bias=True, infinities=True
    ),
    # XLA leaves out the addition to 0 that made a 0 of a weight of 0 times a negative number.
    "a-weight-of-0-times-a-negative-number": ExpertsMlp(
        "plain", rows=4, num_experts=2, top_k=1, hidden=16, intermediate=16, infinities=True
    ),
    # torch_xla, whose operations do not take operands of nothing, returned NaN where a CPU raises an error.
    "sequences-where-there-is-room-for-none": HostileBidirectional(
        Bidirectional(Case("fuzz", (), spare_seqs=0, padding=(0, 1)), batches=((),)), damage=(("num_seqs", 0, 1),)
    ),
}
