"""Speculative decoding: steps that verify drafts of tokens.

A step computes logits after each draft of a request, and after the token before them: a row for each. Every row draws
its token as a step without drafts would, with the request's seed and the token's number. Tokens are kept up to the
first one that is not the draft. So a draft is accepted with the probability that it has, and what takes the place of a
rejected one is drawn from the others with theirs. That is rejection sampling for drafts that are certain of themselves,
and the tokens are those of an engine without drafts.

Keys and values of drafts that were not accepted stay in the caches until the next step stores others in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.outputs import DraftTokenIds, LogprobsLists

from .ngram import NgramProposer
from .output import StepOutput
from .requests import Batch, Request, RequestTable
from .sampler.masks import Bitmask

Int32Array = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


def proposer(config: Any) -> NgramProposer:
    """Of a VllmConfig whose drafts are n-grams."""
    chosen = config.speculative_config
    lengths = chosen.prompt_lookup_min, chosen.prompt_lookup_max
    return NgramProposer(chosen.num_speculative_tokens, *lengths, config.model_config.max_model_len)


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """The rows of a step that verify drafts, request by request.

    Attributes:
      requests: of the step.
      drafts: of each request; empty lists where there are none.
      first: int32[requests]: the first row of each.
      request: int32[rows]: whose each row is.
      number: int32[rows]: how many drafts of its request stand before it.
      batch: the requests row by row, as the sampler takes them.
    """

    requests: list[Request]
    drafts: list[list[int]]
    first: Int32Array
    request: Int32Array
    number: Int32Array
    batch: Batch

    @classmethod
    def of(cls, batch: Batch, scheduled: Mapping[str, Sequence[int]]) -> DraftRows:
        """The rows of a step; scheduled: drafts by request id."""
        if not scheduled:  # as where nothing repeats
            each = np.arange(len(batch.slots), dtype=np.int32)
            return cls(batch.requests, [[] for _ in batch.requests], each, each, np.zeros_like(each), batch)
        drafts = [list(scheduled.get(request.req_id, ())) for request in batch.requests]
        counts = _lengths(drafts) + 1
        first = np.cumsum(counts, dtype=np.int32) - counts
        request = np.repeat(np.arange(len(drafts), dtype=np.int32), counts)
        number = np.arange(len(request), dtype=np.int32) - first[request]
        by_row = [batch.requests[index] for index in request.tolist()]
        rows = Batch(by_row, batch.slots[request], np.ones_like(request))
        return cls(batch.requests, drafts, first, request, number, rows)

    @property
    def num_drafts(self) -> Int32Array:
        """int32[requests]."""
        return _lengths(self.drafts)

    def step_rows(self, counts: Int32Array) -> Int32Array:
        """Where they stand in the step that has ``counts`` tokens of each request."""
        begin = np.cumsum(counts, dtype=np.int32) - 1 - self.num_drafts
        step_rows: Int32Array = begin[self.request] + self.number
        return step_rows

    def before(self) -> list[list[int]]:
        """Of each row the drafts before it."""
        pairs = zip(self.request.tolist(), self.number.tolist(), strict=True)
        return [self.drafts[request][:number] for request, number in pairs]

    def by_row(
        self, flags: dict[str, Bools], sampled: Bools, numbers: Int32Array
    ) -> tuple[Batch, dict[str, Bools], Bools, Int32Array]:
        """Batch, flags, which rows' tokens count and how many tokens their requests have sampled before, row by row."""
        request = self.request
        expanded = {name: flag[request] for name, flag in flags.items()}
        row_numbers: Int32Array = numbers[request] + self.number
        return self.batch, expanded, sampled[request], row_numbers

    def grammar(self, req_ids: Sequence[str], bitmask: Bitmask, sampled: Bools) -> dict[int, Bitmask]:
        """By row, the tokens that structured output allows.

        Args:
          req_ids: of vLLM's GrammarOutput.
          bitmask: its, with a row for each row of these requests.
          sampled: of each request, whether the step ends at its last token.
        """
        index_of = {request.req_id: index for index, request in enumerate(self.requests)}
        found, at = {}, 0
        for req_id in req_ids:
            if (index := index_of.get(req_id)) is None:  # one that the step has not: it has no drafts either
                at += 1
                continue
            for row in range(self.first[index], self.first[index] + len(self.drafts[index]) + 1):
                if sampled[index]:
                    found[row] = bitmask[at]
                at += 1
        return found

    def accept(self, tokens: Sequence[int], sampled: Bools) -> list[list[int]]:
        """Each request's new tokens: the drafts that its rows drew, and the next one.

        Args:
          tokens: of each row.
          sampled: of each request, whether the step ends at its last token; otherwise it has none.
        """
        accepted = []
        for draft, first, counts in zip(self.drafts, self.first.tolist(), sampled.tolist(), strict=True):
            drawn = list(tokens[first : first + len(draft) + 1])
            equal = next((i for i, token in enumerate(draft) if token != drawn[i]), len(draft))
            accepted.append(drawn[: equal + 1] if counts else [])
        return accepted


def _lengths(lists: Sequence[Sequence[int]]) -> Int32Array:
    return np.fromiter(map(len, lists), np.int32, len(lists))


class DraftOutput(StepOutput):
    """The output of a step that verified drafts.

    Attributes:
      accepted: tokens of each request, once ``get_output`` was called.
    """

    def __init__(self, rows: DraftRows, sampled: Bools, *arguments: Any) -> None:
        super().__init__(rows.requests, [], *arguments)
        self._rows, self._sampled = rows, sampled
        self.accepted: list[list[int]] = []

    def _choose(self, tokens: list[int]) -> list[list[int]]:
        self.accepted = self._rows.accept(tokens, self._sampled)
        for row in self._failed_rows:
            self.accepted[row] = []
        return [list(tokens) for tokens in self.accepted]  # vLLM cuts those that it returns at a stop

    def _fetch_logprobs(self) -> LogprobsLists | None:
        if self._logprobs is None:
            return None
        counts = _lengths(self.accepted)
        kept = np.flatnonzero(self._rows.number < counts[self._rows.request])
        parts = (part.cpu().numpy()[kept] for part in self._logprobs)
        return LogprobsLists(*parts, cu_num_generated_tokens=[0, *np.cumsum(counts).tolist()])


class Drafter:
    """Drafts for the next step, and what the request table knows of those of this one.

    Attributes:
      quiet_steps: how many steps in a row no draft was found after.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.quiet_steps = 0

    def begin(self, batch: Batch, scheduled: Mapping[str, Sequence[int]]) -> DraftRows:
        """The rows of a step. Its drafts are known tokens from now on."""
        rows = DraftRows.of(batch, scheduled)
        for request, draft in zip(rows.requests, rows.drafts, strict=True) if scheduled else ():
            if draft:
                self._table.put(request.slot, draft)
        return rows

    def finish(self, output: DraftOutput) -> None:
        """Notes the tokens of a step, all of which are known then, and drafts those of the next one."""
        for request, tokens in zip(output.requests, output.accepted, strict=True):
            if tokens:
                self._table.put(request.slot, tokens)
                self._table.num_tokens[request.slot] += len(tokens)
        self._draft(output)

    def _draft(self, output: DraftOutput) -> None:
        """Drafts the tokens after a step."""
        raise NotImplementedError

    def take(self) -> DraftTokenIds | None:
        """The drafts of the last step, once."""
        raise NotImplementedError


class NgramDrafter(Drafter):
    """Of n-grams that a request had before."""

    def __init__(self, propose: NgramProposer, table: RequestTable) -> None:
        super().__init__(table)
        self._propose = propose
        self._drafts: DraftTokenIds | None = None

    def _draft(self, output: DraftOutput) -> None:
        drafts = []
        for request, tokens in zip(output.requests, output.accepted, strict=True):
            # Penalties count the tokens of steps before; vLLM too has no drafts for requests that have them.
            if tokens and not request.sampling.penalised:
                drafts.append(self._propose.propose(self._table.tokens(request.slot)))
            else:
                drafts.append([])
        self.quiet_steps = 0 if any(drafts) else self.quiet_steps + 1
        self._drafts = DraftTokenIds([request.req_id for request in output.requests], drafts)

    def take(self) -> DraftTokenIds | None:
        """The drafts of the last step, once."""
        drafts, self._drafts = self._drafts, None
        return drafts


def take_drafts(llm: Any) -> None:
    """Has an engine of the caller's process (VLLM_ENABLE_V1_MULTIPROCESSING=0) take drafts after each step.

    vLLM's processes of engines do so themselves. To be called once, with vLLM's LLM.
    """
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def step_and_take_drafts() -> Any:
        outputs, executed = step()
        core.post_step(executed)
        return outputs, executed

    core.step_fn = step_and_take_drafts
