"""The sampling parameters of requests, by slot, and those of a step's rows, packed into two arrays.

Two, since torch_xla has no reinterpreting view. By slot, so that a step gathers them without a loop over its requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams

from .request import SamplingState

# Fields and what they are in rows of padding and in greedy rows.
_FLOATS = {"temperature": 0.0, "min_p": 0.0, "top_p": 1.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0}
_PENALTIES = slice(3, 6)
_INTEGERS = ("top_k", "seed_low", "seed_high", "number", "slot", "counted_slot")
_NEUTRAL = np.array(list(_FLOATS.values()), np.float32)[:, None]

# What a request may need besides the most likely token.
FLAGS = ("random", "penalised", "edited", "logprobs", "prompt_logprobs")

Packed = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]
Bools = npt.NDArray[np.bool_]


class SlotParameters:
    """The parameters of the requests that have a slot.

    Attributes:
      flags: bool[len(FLAGS), max_seqs + 1], in the order of FLAGS.
    """

    def __init__(self, max_seqs: int, vocab_size: int) -> None:
        """vocab_size: the top-k that keeps everything."""
        self._unused_slot, self._vocab_size = max_seqs, vocab_size
        self._floats = np.tile(_NEUTRAL, max_seqs + 1)
        self._integers = np.zeros((3, max_seqs + 1), np.int32)  # top_k and the seed's halves
        self._integers[0] = vocab_size
        self.flags: Bools = np.zeros((len(FLAGS), max_seqs + 1), np.bool_)

    def store(self, slot: int, params: SamplingParams, state: SamplingState) -> None:
        """Sets the parameters of the request that got ``slot``."""
        self._floats[:, slot] = _NEUTRAL[:, 0]
        self._integers[:, slot] = self._vocab_size, 0, 0
        if not state.greedy:
            self._floats[:3, slot] = params.temperature, params.min_p, params.top_p
            top_k = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
            halves = np.array([state.seed & 0xFFFF_FFFF, state.seed >> 32], np.uint32).view(np.int32)
            self._integers[:, slot] = top_k, *halves
        self._floats[_PENALTIES, slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.flags[:, slot] = (
            not state.greedy,
            state.penalised,
            state.edited,
            params.logprobs is not None,
            params.prompt_logprobs is not None,
        )

    def flagged(self, slots: npt.NDArray[np.int32]) -> dict[str, Bools]:
        """bool[n] by name for the flags that any of ``slots`` has; most steps have none."""
        flags = self.flags[:, slots]
        return {FLAGS[index]: flags[index] for index in np.flatnonzero(flags.any(1)).tolist()}

    def pack(self, slots: npt.NDArray[np.int32], sampled: Bools, numbers: npt.NDArray[np.int32], rows: int) -> Packed:
        """float32 and int32 arrays: a row for each of ``slots``, then neutral, greedy ones.

        Args:
          slots: int32[n], of the step's requests.
          sampled: bool[n], whether the step ends at the request's last token, so that its row's token counts.
          numbers: int32[n], how many tokens each request has sampled before.
          rows: of the logits, at least n.
        """
        n = len(slots)
        floats = np.empty((len(_FLOATS), rows), np.float32)
        floats[:, :n], floats[:, n:] = self._floats[:, slots], _NEUTRAL
        counted = sampled & self.flags[FLAGS.index("penalised"), slots]
        if not counted.all():
            floats[_PENALTIES, :n][:, ~counted] = _NEUTRAL[_PENALTIES]
        integers = np.empty((len(_INTEGERS), rows), np.int32)
        integers[:, n:] = np.array([self._vocab_size, 0, 0, 0, self._unused_slot, self._unused_slot], np.int32)[:, None]
        integers[:3, :n], integers[3, :n] = self._integers[:, slots], numbers
        integers[4, :n] = np.where(sampled, slots, self._unused_slot)
        integers[5, :n] = np.where(counted, slots, self._unused_slot)
        return floats.reshape(-1), integers.reshape(-1)


def empty(rows: int) -> Packed:
    """Arrays of the form of ``SlotParameters.pack``."""
    none = np.empty(0, np.int32)
    return SlotParameters(0, 1).pack(none, none.astype(np.bool_), none, rows)


def unpack(floats: torch.Tensor, integers: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
    """The parameters by name, float32[rows] or int32[rows] each."""
    fields = {name: floats[at * rows : (at + 1) * rows] for at, name in enumerate(_FLOATS)}
    return fields | {name: integers[at * rows : (at + 1) * rows] for at, name in enumerate(_INTEGERS)}
