"""Steps launched before vLLM asks for them, where it waits for each step's tokens.

With drafts it does, since these are made from the tokens. But where no draft is found, the next step is known: each
request's next token, which is on the device. So while none are found, that step is launched beside the one before. If
vLLM then asks for it, the device did not wait for the host; if not, for a draft was found, or a request came or ended,
its results are dropped. The keys and values that it stored lie behind all that its requests have computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .block_tables import BlockTables
from .requests import Batch, RequestTable
from .step_layout import Int32Array

# Steps in a row that no draft was found after. A step that is dropped costs what two or three that are used gain.
QUIET_STEPS = 4


class LaunchedAhead:
    """The step that was launched ahead, if any.

    Attributes:
      launched: how many were.
      used: of them.
    """

    def __init__(self, table: RequestTable, tables: BlockTables, max_model_len: int) -> None:
        self._table, self._tables, self._max_model_len = table, tables, max_model_len
        self._kept: tuple[Batch, Int32Array, Any] | None = None
        self.launched = self.used = 0

    def can_follow(self, batch: Batch) -> bool:
        """Whether a step with the next token of each request can follow one with one token of each.

        It cannot where a request ends with its token, by its length, or has no page for the next one.
        """
        table, slots = self._table, batch.slots
        positions = table.num_computed[slots] + 1
        outputs = positions + 1 - table.num_prompt[slots]  # with the token that is computed now
        if any(
            most is not None and count >= most
            for count, most in zip(
                outputs.tolist(), [request.params.max_tokens for request in batch.requests], strict=True
            )
        ):
            return False
        return bool((positions + 1 < self._max_model_len).all()) and self._tables.have_pages(slots, positions)

    def keep(self, batch: Batch, step: Any) -> None:
        """Notes what was launched after a step of ``batch``."""
        self._kept = batch, self._table.num_computed[batch.slots] + 1, step
        self.launched += 1

    def take(self, batch: Batch) -> Any:
        """What was launched, if it is the step with the next token of each request of ``batch``; else None."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not batch or not np.array_equal(kept[1], self._table.num_computed[batch.slots]):
            return None
        self.used += 1
        return kept[2]

    def drop(self) -> None:
        """Forgets what was launched: vLLM asks for another step."""
        self._kept = None
