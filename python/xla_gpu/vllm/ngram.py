"""Drafts of the next tokens from a request's own: what followed the last n-gram where it stood first.

The same drafts as vLLM's proposer, which needs numba.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

METHOD = "ngram"  # vLLM's name


@dataclasses.dataclass(frozen=True)
class NgramProposer:
    """Looks for the longest n-gram at the end of the tokens that they have before, too.

    Attributes:
      most_drafts: tokens of a draft.
      shortest: tokens of the n-gram, at least.
      longest: at most.
      max_model_len: tokens of a sequence; drafts end there.
    """

    most_drafts: int
    shortest: int
    longest: int
    max_model_len: int

    def propose(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """The draft after ``tokens`` int32[n]; empty where no n-gram is found."""
        n = len(tokens)
        most = min(self.most_drafts, self.max_model_len - n)
        if most <= 0:
            return []
        # The search of bytes is the fastest one that Python has.
        searched = tokens.tobytes()
        for length in range(min(self.longest, n - 1), self.shortest - 1, -1):
            start = _first(searched, tokens[n - length :].tobytes(), tokens.itemsize)
            if start < n - length:
                after = start + length
                drafted: list[int] = tokens[after : after + most].tolist()
                return drafted
        return []


def _first(searched: bytes, ngram: bytes, itemsize: int) -> int:
    """Where ``ngram`` stands first, in items; it is the end of ``searched``."""
    at = searched.find(ngram)
    while at % itemsize:  # of the bytes of two tokens
        at = searched.find(ngram, at + 1)
    return at // itemsize
