"""One step's ragged batch, packed into a single int32 array: one transfer to the device.

The program of a layout splits it at fixed offsets. Rows, sequences and block-table updates that a step does not use
are padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """The static shape of a step.

    Attributes:
      num_tokens: rows of the batch.
      max_seqs: sequences in it.
      num_groups: KV-cache groups, each with block tables of its own.
      max_updates: new entries of block tables.
      max_draft_rows: rows of which logits are computed; 0: of each sequence the last one.
      has_adapters: rows may have LoRA adapters.
      has_token_types: the model is told which rows are of a pair's second text.
      has_images: rows may be images'.
      image_tokens: rows, at most, of which each attends to all others, as parts of one image; 0: to those before alone.
      position_axes: rotary positions of a row.
    """

    num_tokens: int
    max_seqs: int
    num_groups: int
    max_updates: int
    max_draft_rows: int = 0
    has_adapters: bool = False
    has_token_types: bool = False
    has_images: bool = False
    image_tokens: int = 0
    position_axes: int = 1

    @property
    def logits_rows(self) -> int:
        """Rows of which logits are computed."""
        return self.max_draft_rows or self.max_seqs

    @functools.cached_property
    def fields(self) -> dict[str, int]:
        """Lengths of the parts, in the order in which they stand in the array."""
        return {
            # Of each row:
            "tokens": self.num_tokens,  # token id, where the host knows it
            "sources": self.num_tokens,  # else the slot of the request whose last sampled token it is; or -1
            "positions": self.position_axes * self.num_tokens,
            "slot_mapping": self.num_groups * self.num_tokens,  # of each group; -1: padding
            # Of each sequence:
            "context_lens": self.max_seqs,
            "query_start_loc": self.max_seqs + 1,
            "request_slots": self.max_seqs,  # past the live ones: the slot that nobody has
            "num_seqs": 1,
            # New entries of the block tables, which stay on the device:
            "update_indices": self.max_updates,
            "update_pages": self.max_updates,
            # Where steps verify drafts, the rows of which logits are computed:
            **({"draft_rows": self.max_draft_rows} if self.max_draft_rows else {}),
            # Of each row, the slot of its request's LoRA adapter; -1: none.
            **({"adapters": self.num_tokens} if self.has_adapters else {}),
            # Of each row, 1 in a pair's second text, else 0.
            **({"token_types": self.num_tokens} if self.has_token_types else {}),
            # Of each row, its row among the images'; -1: it is a token.
            **({"image_rows": self.num_tokens} if self.has_images else {}),
            # Equal for the rows of which each attends to all others; -1: a row of text.
            **({"image_runs": self.num_tokens} if self.image_tokens else {}),
        }

    @functools.cached_property
    def size(self) -> int:
        """Elements of the array."""
        return sum(self.fields.values())

    def unpack(self, packed: Any) -> dict[str, Any]:
        """Cuts an array or tensor of ``size`` elements into its parts, by name; they are views."""
        parts = unpack(packed, self.fields)
        parts["slot_mapping"] = parts["slot_mapping"].reshape(self.num_groups, self.num_tokens)
        if self.position_axes > 1:
            parts["positions"] = parts["positions"].reshape(self.position_axes, self.num_tokens)
        return parts

    def empty(self, unused_slot: int, unused_entry: int) -> tuple[Int32Array, dict[str, Int32Array]]:
        """A packed step of padding alone, and its parts.

        Args:
          unused_slot: the request slot that nobody has.
          unused_entry: an index into the block tables of that slot.
        """
        packed = _padding(self, unused_slot, unused_entry).copy()
        return packed, self.unpack(packed)


def unpack(packed: Any, fields: Mapping[str, int]) -> dict[str, Any]:
    """Cuts an array or tensor into parts of these lengths, by name; they are views.

    Slices, not split: torch_xla aborts where the index of an index_select comes out of a split.
    """
    parts, at = {}, 0
    for name, length in fields.items():
        parts[name] = packed[at : at + length]
        at += length
    return parts


@functools.lru_cache(maxsize=64)
def _padding(layout: StepLayout, unused_slot: int, unused_entry: int) -> Int32Array:
    packed = np.zeros(layout.size, np.int32)
    parts = layout.unpack(packed)
    parts["sources"][:] = -1
    parts["slot_mapping"][:] = -1
    parts["request_slots"][:] = unused_slot
    parts["update_indices"][:] = unused_entry
    if layout.has_adapters:
        parts["adapters"][:] = -1
    if layout.has_images:
        parts["image_rows"][:] = -1
    if layout.image_tokens:
        parts["image_runs"][:] = -1
    return packed
