"""One step's ragged batch, packed into a single int32 array.

One array is one transfer to the device; a compiled step splits it again at fixed offsets. Everything has a static
shape, so that a layout is compiled once: rows and sequences that a step does not use are padding.

xla_gpu/vllm/step_layout.py does so for vLLM's requests. The two are separate: an example is read whole, and uses public
functions alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """The static shape of a step.

    num_tokens: rows of the batch; max_seqs: sequences in it; pages_per_seq: width of the block table.
    """

    num_tokens: int
    max_seqs: int
    pages_per_seq: int

    def fields(self) -> dict[str, int]:
        """Lengths of the parts, in their order in the array."""
        return {
            # Of each row:
            "tokens": self.num_tokens,  # token id, where the host knows it
            "sources": self.num_tokens,  # else the sequence of the step before whose sampled token it is; or -1
            "positions": self.num_tokens,
            "slots": self.num_tokens,  # where its K and V go: page * page_size + offset; -1: padding
            # Of each sequence, the arguments of paged_attention:
            "context_lens": self.max_seqs,
            "query_start_loc": self.max_seqs + 1,
            "num_seqs": 1,
            "block_tables": self.max_seqs * self.pages_per_seq,
            # Of each sequence, its last row: the one whose logits choose the next token.
            "last_rows": self.max_seqs,
            # Of each sequence, the random numbers for that choice: which request it is, and its how manieth token.
            "requests": self.max_seqs,
            "choices": self.max_seqs,
        }

    @property
    def size(self) -> int:
        return sum(self.fields().values())

    def unpack(self, packed: Any) -> dict[str, Any]:
        """Cuts an array or tensor of `size` elements into its parts, by name; they are views."""
        parts, at = {}, 0
        for name, length in self.fields().items():
            parts[name] = packed[at : at + length]
            at += length
        parts["block_tables"] = parts["block_tables"].reshape(self.max_seqs, self.pages_per_seq)
        return parts

    def empty(self) -> np.ndarray:
        """A packed step of padding alone: it computes nothing of use and stores nothing."""
        packed = np.zeros(self.size, np.int32)
        parts = self.unpack(packed)
        parts["sources"][:] = -1
        parts["slots"][:] = -1
        return packed
