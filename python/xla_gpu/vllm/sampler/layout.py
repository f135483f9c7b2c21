"""The sampling parameters of a step's rows, packed into two arrays: torch_xla has no reinterpreting view."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..requests import Request

_FLOATS = ("temperature", "min_p", "top_p", "repetition", "frequency", "presence")
_INTEGERS = ("top_k", "seed_low", "seed_high", "number", "slot", "counted_slot")

Packed = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]


def pack(
    requests: list[Request], sampled: npt.NDArray[np.bool_], rows: int, vocab_size: int, unused_slot: int
) -> Packed:
    """float32 and int32 arrays: a row for each of ``requests``, then neutral, greedy ones.

    Args:
      requests: of the step's batch.
      rows: of the logits, at least as many.
      vocab_size: the top-k that keeps everything.
      unused_slot: the request slot that nobody has.
      sampled: of each request, whether the step ends at its last token, so that its row's token counts.
    """
    floats = {name: np.zeros(rows, np.float32) for name in _FLOATS}
    integers = {name: np.zeros(rows, np.int32) for name in _INTEGERS}
    floats["top_p"][:] = floats["repetition"][:] = 1.0
    integers["top_k"][:] = vocab_size
    integers["slot"][:] = integers["counted_slot"][:] = unused_slot
    for row, request in enumerate(requests):
        params, state = request.params, request.sampling
        if sampled[row]:
            integers["slot"][row] = request.slot
            if state.penalised:
                integers["counted_slot"][row] = request.slot
                floats["repetition"][row] = params.repetition_penalty
                floats["frequency"][row] = params.frequency_penalty
                floats["presence"][row] = params.presence_penalty
        if state.greedy:
            continue
        floats["temperature"][row] = params.temperature
        floats["min_p"][row] = params.min_p
        floats["top_p"][row] = params.top_p
        if params.top_k > 0:
            integers["top_k"][row] = min(params.top_k, vocab_size)
        integers["seed_low"][row] = np.uint32(state.seed & 0xFFFF_FFFF).view(np.int32)
        integers["seed_high"][row] = np.uint32(state.seed >> 32).view(np.int32)
        integers["number"][row] = request.num_outputs
    return np.concatenate(list(floats.values())), np.concatenate(list(integers.values()))


def empty(rows: int) -> Packed:
    """Arrays of the form of ``pack``."""
    return pack([], np.empty(0, np.bool_), rows, vocab_size=1, unused_slot=0)


def unpack(floats: torch.Tensor, integers: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
    """The parameters by name, float32[rows] or int32[rows] each."""
    fields = {name: floats[at * rows : (at + 1) * rows] for at, name in enumerate(_FLOATS)}
    return fields | {name: integers[at * rows : (at + 1) * rows] for at, name in enumerate(_INTEGERS)}
