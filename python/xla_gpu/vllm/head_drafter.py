"""Drafts of a head, launched behind each step and taken when vLLM asks for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from .block_tables import BlockTables
from .draft_programs import DraftPrograms
from .requests import Batch, RequestTable
from .speculation import Bools, Drafter, DraftOutput, DraftRows
from .step_layout import Int32Array, StepLayout


@dataclasses.dataclass(frozen=True)
class StepOfHead:
    """What a head reads of a step of the model: its layout, its array, and states of all its rows."""

    layout: StepLayout
    packed: Int32Array
    states: torch.Tensor


class HeadDrafter(Drafter):
    """Of one engine."""

    def __init__(self, programs: DraftPrograms, table: RequestTable, tables: BlockTables, max_model_len: int) -> None:
        super().__init__(table)
        self._programs, self._tables, self._max_model_len = programs, tables, max_model_len
        self._launched: tuple[torch.Tensor, Int32Array] | None = None
        self._waiting: tuple[list[str], list[int]] = [], []

    def compile(self, layout: StepLayout, rows: int) -> None:
        """Compiles what steps of a layout need, of whose logits there are ``rows`` rows."""
        self._programs.compile(layout, rows)

    def launch(
        self,
        step: StepOfHead,
        batch: Batch,
        counts: Int32Array,
        rows: DraftRows,
        sampled: Bools,
        tokens: torch.Tensor,
    ) -> None:
        """Launches the head behind a step, which need not have ended.

        Args:
          step: of the model.
          batch: its requests.
          counts: how many tokens it has of each.
          rows: which verify drafts.
          sampled: of each request, whether the step ends at its last token.
          tokens: int32[n], what its rows of logits draw.
        """
        slots, n = batch.slots, len(batch.slots)
        more, parts = self._programs.layout(step.layout).empty()
        parts["rows"][: len(rows.request)] = rows.step_rows(counts)
        parts["first"][:n] = rows.first
        for index, draft in enumerate(rows.drafts):
            parts["drafts"][index, : len(draft)] = draft
        if not sampled.all():
            ends = self._table.num_computed[slots] + counts
            reading = np.flatnonzero(~sampled)
            parts["next"][rows.first[reading]] = self._table.token_ids[slots[reading], ends[reading]]
        limits = self._tables.ends(slots, self._programs.groups)
        parts["limits"][:n] = np.minimum(limits, self._programs.length)
        self._launched = self._run(step, more, tokens), parts["limits"][:n]

    def warm_up(self, step: StepOfHead, tokens: torch.Tensor) -> None:
        """Runs the program of a step of padding, and waits for its end."""
        self._run(step, self._programs.layout(step.layout).empty()[0], tokens).cpu()

    def _run(self, step: StepOfHead, more: Int32Array, tokens: torch.Tensor) -> torch.Tensor:
        return self._programs.launch(step.layout, step.packed, more, tokens, step.states)

    def _draft(self, output: DraftOutput) -> None:
        assert self._launched is not None
        most = []
        for request, tokens, limit in zip(output.requests, output.accepted, self._launched[1].tolist(), strict=True):
            # The last token is the head's next input, at the position before its own; it drafts one token from the
            # step's rows, and each other one from a draft that it stores.
            length = int(self._table.num_tokens[request.slot])
            room = min(1 + max(0, limit - (length - 1)), self._max_model_len - length, self._programs.num_drafts)
            drafts = tokens and not request.sampling.penalised and length - 2 < self._programs.length
            most.append(max(0, room) if drafts else 0)
        self._waiting = [request.req_id for request in output.requests], most

    def take(self) -> Any:
        """The drafts of the last step, once; waits for the device."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None
        req_ids, most = self._waiting
        drafts = launched[0].cpu().tolist() if any(most) else [[]] * len(most)
        return DraftTokenIds(req_ids, [list(draft[:count]) for draft, count in zip(drafts, most, strict=False)])
