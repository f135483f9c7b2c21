"""One run of the fuzzer: a kind of input, a seed, a number of inputs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity

from tests.common.frontends import Frontend
from tests.fuzz import checks, composite_strategies, latent_strategies, product_strategies, strategies

KINDS = {
    "attention": strategies.attentions(),
    "large_attention": strategies.large_attentions(),
    "update": strategies.updates(),
    "merge": strategies.merges,
    "add": strategies.adds,
    "hostile": strategies.hostiles(),
    "linear": product_strategies.linears(),
    "large_linear": product_strategies.large_linears(),
    "grouped_linear": product_strategies.grouped_linears(),
    "gated_mlp": product_strategies.gated_mlps(),
    "large_gated_mlp": product_strategies.large_gated_mlps(),
    "attention_block": product_strategies.attention_blocks(),
    "rms_norm": strategies.norms,
    "gated": strategies.gated,
    "all_reduce": strategies.all_reduces,
    "sample": strategies.samples,
    "rotary": strategies.rotaries,
    "bidirectional": composite_strategies.bidirectionals(),
    "hostile_bidirectional": composite_strategies.hostile_bidirectionals(),
    "latents": latent_strategies.latents(),
    "large_latents": latent_strategies.large_latents(),
    "hostile_latents": latent_strategies.hostile_latents(),
    "latent_update": latent_strategies.latent_updates(),
    "experts": composite_strategies.experts(),
    "hostile_experts": composite_strategies.hostile_experts(),
}
# Of the time; attention has the most to get wrong.
WEIGHTS = {
    "attention": 10,
    "large_attention": 4,
    "hostile": 5,
    "update": 4,
    "merge": 2,
    "add": 1,
    "linear": 2,
    "large_linear": 1,
    "grouped_linear": 2,
    "gated_mlp": 1,
    "large_gated_mlp": 1,
    "attention_block": 2,
    "rms_norm": 1,
    "gated": 1,
    "all_reduce": 1,
    "sample": 2,
    "rotary": 3,
    "bidirectional": 3,
    "hostile_bidirectional": 2,
    "latents": 3,
    "large_latents": 2,
    "hostile_latents": 2,
    "latent_update": 1,
    "experts": 2,
    "hostile_experts": 1,
}


# What fails in the run that goes on, as long as hypothesis looks for a smaller input: for a run that is ended then.
found: Failure | None = None


class Failure(AssertionError):
    """What was wrong, with the smallest input that hypothesis found for it."""

    def __init__(self, kind: str, seed: int, x, error: BaseException) -> None:
        super().__init__(f"{kind}, seed {seed}: {error}\nthe smallest input that fails:\n    {x!r}")
        self.input = x


def _settings(examples: int, *phases: Phase) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )


def draw(kind: str, seed: int, examples: int) -> list:
    """`examples` inputs of a kind, or fewer where there are no more: the same for the same seed."""
    drawn = []

    @hypothesis.seed(seed)
    @_settings(examples, Phase.generate)
    @hypothesis.given(KINDS[kind])
    def keep(x):
        drawn.append(x)

    keep()
    return drawn


def run(kind: str, seed: int, examples: int, frontends: Sequence[Frontend]) -> None:
    """Checks `examples` inputs of a kind, the same for the same seed. Raises Failure."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)  # the baseline's tensors are small, and its threads would fight with the front ends'
    global found
    last = None

    @hypothesis.seed(seed)
    @_settings(examples, Phase.generate, Phase.shrink)
    @hypothesis.given(KINDS[kind])
    def test(x):
        nonlocal last
        global found
        last = x
        try:
            checks.check(x, frontends)
        except Exception as e:
            found = Failure(kind, seed, x, e)
            raise

    try:
        test()
    except Exception as e:  # hypothesis runs the smallest input last
        raise Failure(kind, seed, last, e) from e
    finally:
        found = None
