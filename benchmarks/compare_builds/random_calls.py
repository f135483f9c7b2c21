"""Random calls of every operator: the fuzzer's inputs (tests/fuzz), and for attention on a GPU loads of the sizes that
benchmarks have, which the fuzzer's reference would take too long for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from benchmarks import sweep
from tests.common.cases import AttentionCase
from tests.fuzz import composites, inputs, latents, layer, run

# The fuzzer's kinds of input, by what a kernel's author names. Layer operators of one file have one kind.
KINDS = {
    "paged_attention": ("large_attention", "attention", "hostile"),
    "linear": ("large_linear", "linear"),
    "grouped_linear": ("grouped_linear",),
    "gated_mlp": ("large_gated_mlp", "gated_mlp"),
    "attention_block": ("attention_block",),
    "experts_mlp": ("experts", "hostile_experts"),
    "bidirectional_attention": ("bidirectional", "hostile_bidirectional"),
    "mla_attention": ("latents", "large_latents", "hostile_latents"),
    "concat_and_cache_mla": ("latent_update",),
    "rms_norm": ("rms_norm",),
    "silu_and_mul": ("gated",),
    "rotary_and_cache": ("rotary",),
    "reshape_and_cache": ("update",),
    "merge_attention_states": ("merge",),
    "sample": ("sample",),
    "all_reduce": ("all_reduce",),
    "simple_add": ("add",),
}


@dataclasses.dataclass(frozen=True)
class Random:
    """One input: the fuzzer's, or a load whose arrays are made on the GPU by a seed."""

    what: Any
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.what.name}, seed {self.seed}" if isinstance(self.what, AttentionCase) else repr(self.what)


def draw(operator: str, count: int, seed: int, device: str) -> list[Random]:
    """`count` inputs, the same for the same seed, in an order that has all kinds early."""
    with_loads = operator == "paged_attention" and device == "cuda"
    share = -(-count // (len(KINDS[operator]) + with_loads))
    drawn = [Random(x) for kind in KINDS[operator] for x in run.draw(kind, seed, share)]
    if with_loads:
        drawn += [Random(case, seed + i) for i, case in enumerate(sweep.members(share, seed))]
    random.Random(seed).shuffle(drawn)
    return drawn[:count]


def calls(x: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The operator's name, arrays and options of each call that an input of the fuzzer stands for."""
    match x:
        case inputs.Attention():
            name = "paged_attention_with_lse" if x.with_lse else "paged_attention"
            for case, made in x.built():
                yield name, made.arrays(), case.options()
        case inputs.Hostile():
            case, made = x.built()
            yield "paged_attention_with_lse", made.arrays(), case.options()
        case inputs.Update():
            yield "reshape_and_cache", x.arrays(), {}
        case inputs.Merge():
            yield "merge_attention_states", x.arrays(), {}
        case inputs.Add():
            yield "simple_add", x.arrays(), {}
        case composites.Bidirectional() | latents.Latents():
            for arrays in x.built():
                yield x.operator, arrays, x.options()
        case _:
            yield x.operator, x.arrays(), x.options()


def of_gathered_parts(x: Any) -> bool:
    """Whether its operator stands below the public functions."""
    return isinstance(x, layer.AllReduce)
