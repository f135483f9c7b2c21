"""What a request must not ask for, beyond what vLLM checks: the step that it joined would end the engine.

A server's JSON may hold NaN and Infinity, and numbers that float32 does not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_FLOAT32 = np.finfo(np.float32)
_SMALLEST, _LARGEST = float(_FLOAT32.tiny), float(_FLOAT32.max)


def check(params: Any, prompt_token_ids: list[int]) -> None:
    """Raises ValueError for a request that cannot be served, which the server answers with 400.

    Args:
      params: vLLM's SamplingParams, which have been checked by vLLM.
      prompt_token_ids: of the prompt; empty where there are none.
    """
    _expect("temperature", 0.0, params.temperature, _LARGEST)
    _expect("top_p", _SMALLEST, params.top_p, 1.0)
    _expect("min_p", 0.0, params.min_p, 1.0)
    _expect("repetition_penalty", _SMALLEST, params.repetition_penalty, _LARGEST)
    for token, bias in (params.logit_bias or {}).items():
        if math.isnan(bias) or bias > _LARGEST:
            raise ValueError(f"logit_bias[{token}]: expected a number up to {_LARGEST:.3g}, got {bias}")
    if prompt_token_ids and (least := min(prompt_token_ids)) < 0:
        raise ValueError(f"prompt: expected token ids of 0 or more, got {least}")


def _expect(name: str, least: float, got: float, most: float) -> None:
    if not least <= got <= most:  # nor is NaN
        raise ValueError(f"{name}: expected a number from {least:.3g} to {most:.3g}, got {got}")
