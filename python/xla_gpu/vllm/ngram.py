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
        drafted: list[int] = []
        # Where the last token stands too; then those of these places where more tokens before are the same.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        for length in range(1, self.longest + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[tokens[ends - (length - 1)] == tokens[n - length]]
            if not len(ends):
                break
            if length >= self.shortest:
                after = int(ends[0]) + 1
                drafted = tokens[after : after + most].tolist()
        return drafted
