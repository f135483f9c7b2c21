"""Inputs that once failed, each with the fault that it found; every run of the fuzzer begins with them. A failure
prints the expression to put here."""

from __future__ import annotations

from tests.cases import AttentionCase, CacheCase  # noqa: F401 - for the expressions
from tests.fuzz.inputs import Add, Attention, Hostile, Merge, Update

CASES: dict[str, Add | Attention | Hostile | Merge | Update] = {
    # The lse of a batch without rows is a null pointer, by which the check took the call for one without lse.
    "the-error-names-the-operator-without-rows": Hostile(
        Attention(
            AttentionCase("fuzz", (), num_heads=1, num_kv_heads=1, spare_seqs=0, spare_columns=0, padding_tokens=0),
            batches=(((0, 0),),),
        ),
        damage=(("context_lens", 0, -1),),
    ),
}
