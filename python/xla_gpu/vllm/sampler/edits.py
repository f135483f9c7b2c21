"""Changes to single logits: logit_bias, min_tokens and bad_words, as a list of (row, token, condition, value).

A bad word of several tokens is ruled out where the tokens before its last one were sampled. Of those the very last may
not be on the host yet; it is compared on the device, which is what the condition is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..requests import Request

# Edits that one call of a program applies.
MAX_EDITS = 1024

NO_CONDITION = -1

_LARGEST = np.iinfo(np.int32).max

Edit = tuple[int, int, int, float]


def of_request(row: int, request: Request, num_outputs: int, drafts: Sequence[int] | None = None) -> list[Edit]:
    """The edits of a request's row in the step that samples its next token, after ``num_outputs`` others.

    drafts: the last of these, where the step verifies drafts; then the host knows the others.
    """
    params, edits = request.params, []
    if num_outputs < params.min_tokens:
        # vLLM takes any integer. Negative ones would count from the end, and larger ones do not fit into int32.
        stops = sorted(token for token in params.all_stop_token_ids if 0 <= token <= _LARGEST)
        edits += [(row, token, NO_CONDITION, float("-inf")) for token in stops]
    for token, bias in (params.logit_bias or {}).items():
        edits.append((row, token, NO_CONDITION, bias))
    for word in params.bad_words_token_ids or ():
        *before, last = word
        if len(before) > num_outputs:
            continue
        if not before:
            edits.append((row, last, NO_CONDITION, float("-inf")))
            continue
        if drafts is not None:
            sampled = [*request.outputs[-len(before) :], *drafts]
            if sampled[-len(before) :] == before:
                edits.append((row, last, NO_CONDITION, float("-inf")))
            continue
        # Sampled tokens up to the last one, which only the device is sure to have.
        end = num_outputs - 1
        if before[:-1] == request.outputs[end - len(before) + 1 : end]:
            edits.append((row, last, before[-1], float("-inf")))
    return edits


def pack(edits: list[Edit], unused_row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Pairs of int32[3 * MAX_EDITS], rows, tokens and conditions, and float32[MAX_EDITS], values; at least one pair."""
    pairs = []
    for begin in range(0, max(len(edits), 1), MAX_EDITS):
        part = edits[begin : begin + MAX_EDITS]
        places, values = np.zeros((3, MAX_EDITS), np.int32), np.zeros(MAX_EDITS, np.float32)
        places[0], places[2] = unused_row, NO_CONDITION
        if part:
            rows, tokens, conditions, biases = zip(*part, strict=True)
            places[0, : len(part)], places[1, : len(part)], places[2, : len(part)] = rows, tokens, conditions
            values[: len(part)] = biases
        pairs.append((places.reshape(-1), values))
    return pairs


def apply(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """The logits as float32 with the edits of ``pack`` added.

    Args:
      logits: T[rows, vocab_size].
      places: of ``pack``.
      values: of ``pack``.
      last_tokens: int32[rows], each request's last sampled token.
    """
    rows, tokens, conditions = (places[part * MAX_EDITS : (part + 1) * MAX_EDITS] for part in range(3))
    applies = (conditions < 0) | (last_tokens.index_select(0, rows) == conditions)
    values = torch.where(applies, values, torch.zeros_like(values))
    return logits.float().index_put((rows, tokens), values, accumulate=True)
