"""Packs a step's batch into the array of its layout."""

from __future__ import annotations

import numpy as np

from .block_tables import BlockTables
from .images import StepImages
from .requests import Batch, RequestTable
from .step_layout import Int32Array, StepLayout


class StepPacker:
    """Writes tokens, positions, cache slots and lengths of a batch, and the new entries of the block tables."""

    def __init__(self, requests: RequestTable, tables: BlockTables, unused_slot: int) -> None:
        """unused_slot: the request slot that nobody has."""
        self._requests = requests
        self._tables = tables
        self._unused_slot = unused_slot
        # The packed decode step of this layout and batch. Steps that decode differ in positions and new pages alone.
        self._template: tuple[StepLayout | None, Batch | None, Int32Array] = None, None, np.empty(0, np.int32)

    def pack(
        self,
        layout: StepLayout,
        batch: Batch,
        counts: Int32Array,
        draft_rows: Int32Array | None = None,
        images: StepImages | None = None,
    ) -> Int32Array:
        """The array of a step with ``counts[i]`` tokens of the i-th request.

        draft_rows: of a layout that has them, the rows of which logits are computed. images: of a layout that has
        images.
        """
        packed, parts = layout.empty(self._unused_slot, self._tables.unused_entry)
        requests, slots = self._requests, batch.slots
        n, total = len(slots), int(counts.sum())
        computed = requests.num_computed[slots]
        ends = np.cumsum(counts, dtype=np.int32)
        rows = np.repeat(np.arange(n), counts)
        positions = np.arange(total, dtype=np.int32) - np.repeat(ends - counts - computed, counts)
        row_slots = slots[rows]
        if requests.rotary is None:
            parts["positions"][:total] = positions
        else:
            of_rows = requests.rotary.of_rows(slots, computed, counts)
            parts["positions"][..., :total] = of_rows if layout.position_axes > 1 else of_rows[0]
        parts["tokens"][:total] = requests.token_ids[row_slots, positions]
        parts["sources"][:total] = np.where(positions < requests.known[row_slots], -1, row_slots)
        for group, slot_mapping in enumerate(parts["slot_mapping"]):
            slot_mapping[:total] = self._tables.cache_slots(group, row_slots, positions)
        parts["context_lens"][:n] = computed + counts
        parts["query_start_loc"][1 : n + 1] = ends
        parts["query_start_loc"][n + 1 :] = total
        parts["request_slots"][:n] = slots
        parts["num_seqs"][0] = n
        if draft_rows is not None:
            parts["draft_rows"][: len(draft_rows)] = draft_rows
        if layout.has_adapters:
            parts["adapters"][:total] = requests.adapters[row_slots]
        if layout.has_token_types:
            parts["token_types"][:total] = positions >= requests.second_text[row_slots]
        if images is not None:
            parts["image_rows"][:total] = images.rows
            if layout.image_tokens:
                parts["image_runs"][:total] = images.runs
        self._store_updates(layout, parts)
        return packed

    def decode(self, layout: StepLayout, batch: Batch) -> Int32Array:
        """The array of a step with one token of each request, as ``pack`` makes it; no row verifies a draft."""
        return self._decode(layout, batch, self._requests.num_computed[batch.slots])

    def can_decode_next(self, layout: StepLayout, batch: Batch) -> bool:
        """Whether a step of this layout and batch was packed last."""
        known_layout, known_batch, _ = self._template
        return known_batch is batch and known_layout is layout

    def decode_next(self, layout: StepLayout, batch: Batch) -> Int32Array:
        """The array of the step after that: its tokens are those that the device will have sampled last."""
        packed = self._decode(layout, batch, self._requests.num_computed[batch.slots] + 1)
        parts = layout.unpack(packed)
        parts["sources"][: len(batch.slots)] = batch.slots
        return packed

    def _decode(self, layout: StepLayout, batch: Batch, computed: Int32Array) -> Int32Array:
        known_layout, known_batch, template = self._template
        slots = batch.slots
        drafts = layout.max_draft_rows > 0  # then the host knows every token, and each request has a row of logits
        if known_batch is not batch or known_layout is not layout:
            packed = self.pack(layout, batch, batch.ones, np.arange(len(slots), dtype=np.int32) if drafts else None)
            # And stays so: each token is the last one sampled.
            if drafts or (computed >= self._requests.known[slots]).all():
                template = packed.copy()
                updates = layout.unpack(template)
                updates["update_indices"][:] = self._tables.unused_entry
                updates["update_pages"][:] = 0
                self._template = layout, batch, template
            return packed
        n, packed = len(slots), template.copy()
        parts = layout.unpack(packed)
        rotary = self._requests.rotary
        parts["positions"][:n] = computed if rotary is None else rotary.of_next(slots, computed)
        if drafts:
            parts["tokens"][:n] = self._requests.token_ids[slots, computed]
        if layout.has_adapters:  # an adapter may have been read again
            parts["adapters"][:n] = self._requests.adapters[slots]
        np.add(computed, 1, out=parts["context_lens"][:n])
        for group, slot_mapping in enumerate(parts["slot_mapping"]):
            slot_mapping[:n] = self._tables.cache_slots(group, slots, computed)
        self._store_updates(layout, parts)
        return packed

    def _store_updates(self, layout: StepLayout, parts: dict[str, Int32Array]) -> None:
        if not self._tables.changed:
            return
        indices, pages = self._tables.take_updates(layout.max_updates)
        parts["update_indices"][: len(indices)] = indices
        parts["update_pages"][: len(pages)] = pages
