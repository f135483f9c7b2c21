"""What the runner remembers of each request between steps.

A request that runs has a slot from its first step to its last: the row of everything that is kept for it on the device,
its block table, its last sampled token and its penalties. The order of requests in a step's batch is the scheduler's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams

from .block_tables import BlockTables
from .sampler.request import SamplingState

NO_SLOT = -1


@dataclasses.dataclass
class Request:
    """A request of the engine.

    Attributes:
      num_prompt: tokens of the prompt.
      num_tokens: prompt and sampled tokens, those included that the host does not know yet.
      num_computed: tokens whose keys and values are stored before the next step.
      known: how many of the tokens stand in RequestTable.token_ids. The others were sampled since the request got its
        slot; only the last of them is ever an input, and that one is on the device.
      outputs: sampled tokens, appended when they arrive on the host: in asynchronous scheduling a step late.
    """

    req_id: str
    params: SamplingParams
    sampling: SamplingState
    num_prompt: int
    num_tokens: int = 0
    num_computed: int = 0
    known: int = 0
    slot: int = NO_SLOT
    outputs: list[int] = dataclasses.field(default_factory=list)
    prompt_token_ids: npt.NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    prompt_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def num_outputs(self) -> int:
        """Sampled tokens, those included that the host does not know yet."""
        return self.num_tokens - self.num_prompt


class RequestTable:
    """All requests that the engine has told the runner of and not ended."""

    def __init__(self, max_seqs: int, max_model_len: int, tables: BlockTables, seed: int) -> None:
        self.tables = tables
        self.token_ids = np.zeros((max_seqs + 1, max_model_len), np.int32)
        self._requests: dict[str, Request] = {}
        self._free = list(range(max_seqs - 1, -1, -1))
        # For requests without a seed.
        self._seeds = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, req_id: str) -> Request:
        return self._requests[req_id]

    @property
    def free_slots(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    def update(self, scheduled: Any) -> list[Request]:
        """Follows a SchedulerOutput; returns the requests that got a slot, whose state on the device is to be made."""
        for req_id in scheduled.finished_req_ids:
            if (ended := self._requests.pop(req_id, None)) is not None:
                self._give_back(ended)
        for req_id in scheduled.preempted_req_ids or ():
            if (preempted := self._requests.get(req_id)) is not None:
                self._give_back(preempted)
        admitted = [self._add(new) for new in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        for req_id, pages, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self._requests[req_id]
            request.num_computed = computed
            if req_id in cached.resumed_req_ids:
                self._give_back(request)
                self._admit(request, cached.all_token_ids[req_id], pages)
                admitted.append(request)
            elif pages is not None:
                self.tables.append(request.slot, pages)
        return admitted

    def batch(self, scheduled: Any) -> list[Request]:
        """The requests of a step, in the order of its batch."""
        return [self._requests[req_id] for req_id in scheduled.num_scheduled_tokens]

    def _add(self, new: Any) -> Request:
        request = Request(
            new.req_id,
            new.sampling_params,
            SamplingState.of(new.sampling_params, self._seeds),
            num_prompt=len(new.prompt_token_ids),
            num_computed=new.num_computed_tokens,
            prompt_token_ids=np.asarray(new.prompt_token_ids, np.int32),
        )
        self._requests[new.req_id] = request
        self._admit(request, new.prompt_token_ids, new.block_ids)
        return request

    def _admit(self, request: Request, token_ids: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        slot = request.slot = self._free.pop()
        request.num_tokens = request.known = len(token_ids)
        request.outputs = list(token_ids[request.num_prompt :])
        self.token_ids[slot, : request.known] = token_ids
        self.tables.clear(slot)
        self.tables.append(slot, pages)

    def _give_back(self, request: Request) -> None:
        if request.slot != NO_SLOT:
            self._free.append(request.slot)
            request.slot = NO_SLOT
