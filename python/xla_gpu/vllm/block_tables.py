"""The block tables: on the device, with a mirror on the host, of which a step sends only what is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .program import Program


class BlockTables:
    """int32[num_groups, max_seqs + 1, pages_per_seq], one row for each request slot; the last one is nobody's.

    The device's copy is one flat tensor, ``device_tables``, which programs update in place.
    """

    # Entries that one call of the separate program stores, where a step has more than its own program takes.
    MAX_SPILL = 4096

    def __init__(self, max_seqs: int, max_model_len: int, block_sizes: Sequence[int], device: torch.device) -> None:
        """block_sizes: tokens of a page, for each group."""
        pages_per_seq = -(-max_model_len // min(block_sizes)) if block_sizes else 0
        self.shape = (len(block_sizes), max_seqs + 1, pages_per_seq)
        self.unused_entry = max_seqs * pages_per_seq
        self._block_sizes = tuple(block_sizes)
        # Without a group one entry, which nobody reads.
        self.device_tables = torch.zeros(max(int(np.prod(self.shape)), 1), dtype=torch.int32).to(device)
        self._device = device
        self._tables = np.zeros(self.shape, np.int32)
        self._used = np.zeros(self.shape[:2], np.int32)
        self._indices: list[npt.NDArray[np.int32]] = []
        self._pages: list[npt.NDArray[np.int32]] = []
        self._spill: Program | None = None

    def clear(self, slot: int) -> None:
        """Forgets the pages of a slot."""
        self._used[:, slot] = 0

    def append(self, slot: int, pages: Sequence[Sequence[int]]) -> None:
        """Appends pages, a list for each group."""
        _, rows, width = self.shape
        for group, new in enumerate(pages):
            if not new:
                continue
            begin = int(self._used[group, slot])
            end = begin + len(new)
            values = np.asarray(new, np.int32)
            self._tables[group, slot, begin:end] = values
            self._used[group, slot] = end
            first = (group * rows + slot) * width
            self._indices.append(np.arange(first + begin, first + end, dtype=np.int32))
            self._pages.append(values)

    def cache_slots(
        self, group: int, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Where the keys and values of tokens go, int32: page * block_size + offset."""
        block_size = self._block_sizes[group]
        page, offset = np.divmod(positions, block_size)
        cache_slots: npt.NDArray[np.int32] = self._tables[group, slots, page] * block_size + offset
        return cache_slots

    def have_pages(self, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> bool:
        """Whether there are pages for these tokens, in every group."""
        sizes = np.array(self._block_sizes, np.int32)[:, None]
        return bool((positions[None, :] < self._used[:, slots] * sizes).all())

    def ends(self, slots: npt.NDArray[np.int32], groups: Sequence[int]) -> npt.NDArray[np.int32]:
        """The first position of each slot for which one of these groups has no page."""
        of_groups = [self._used[group, slots] * self._block_sizes[group] for group in groups]
        ends: npt.NDArray[np.int32] = np.min(of_groups, 0)
        return ends

    @property
    def changed(self) -> bool:
        """Whether there are new entries since the last ``take_updates``."""
        return bool(self._indices)

    def take_updates(self, room: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The new entries since the last call, at most ``room``: indices into the flat tables, and pages.

        What exceeds ``room``, after a hit in the prefix cache for example, is stored at once by a program of its own.
        """
        if not self._indices:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        indices, pages = np.concatenate(self._indices), np.concatenate(self._pages)
        self._indices, self._pages = [], []
        # A slot may have been given to another request since: of entries for one place the last counts.
        if len(indices) > 1:
            last = len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1]
            indices, pages = indices[last], pages[last]
        for begin in range(room, len(indices), self.MAX_SPILL):
            self._store(indices[begin : begin + self.MAX_SPILL], pages[begin : begin + self.MAX_SPILL])
        return indices[:room], pages[:room]

    def compile(self) -> None:
        """Compiles the separate program."""

        def store(packed: torch.Tensor, tables: torch.Tensor) -> list[torch.Tensor]:
            tables.index_put_((packed[: self.MAX_SPILL],), packed[self.MAX_SPILL :])
            return []

        packed = torch.zeros(2 * self.MAX_SPILL, dtype=torch.int32).to(self._device)
        self._spill = Program("block tables", store, [packed], [self.device_tables])

    def _store(self, indices: npt.NDArray[np.int32], pages: npt.NDArray[np.int32]) -> None:
        if self._spill is None:
            self.compile()
        assert self._spill is not None
        packed = np.zeros((2, self.MAX_SPILL), np.int32)
        packed[0] = self.unused_entry
        packed[0, : len(indices)] = indices
        packed[1, : len(pages)] = pages
        _, (self.device_tables,) = self._spill([packed.reshape(-1)], [self.device_tables])
