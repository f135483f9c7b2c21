"""The sampling parameters of one request, as the sampler's programs take them."""

from __future__ import annotations

import dataclasses

import numpy as np
from vllm.sampling_params import SamplingParams

# vLLM's: below this temperature a request is greedy.
GREEDY_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What of a request's parameters does not change while it runs.

    Attributes:
      seed: 64 bits, of the request or drawn for it.
      greedy: takes the most likely token.
      penalised: a repetition, frequency or presence penalty is on.
      edited: some step may need logits masked or biased by token.
    """

    seed: int
    greedy: bool
    penalised: bool
    edited: bool

    @classmethod
    def of(cls, params: SamplingParams, seeds: np.random.Generator) -> SamplingState:
        """The state of ``params``; ``seeds`` gives the seed of a request that has none."""
        drawn = int(seeds.integers(1 << 63)) if params.seed is None else params.seed
        return cls(
            seed=drawn & 0xFFFF_FFFF_FFFF_FFFF,
            greedy=params.temperature < GREEDY_TEMPERATURE,
            penalised=(
                params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
            ),
            edited=bool(
                params.logit_bias or params.min_tokens or params.bad_words_token_ids or params.allowed_token_ids
            ),
        )
