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
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from . import images
from .block_tables import BlockTables
from .images import Image
from .mrope import RotaryPositions
from .sampler.request import SamplingState

NO_SLOT = -1

# Of requests whose prompts are pooled.
NOT_SAMPLED = SamplingState(seed=0, greedy=True, penalised=False, edited=False)

Int32Array = npt.NDArray[np.int32]


@dataclasses.dataclass
class Request:
    """A request of the engine.

    Attributes:
      num_prompt: tokens of the prompt.
      slot: its row in the arrays of RequestTable and in what the device keeps, or NO_SLOT.
      outputs: sampled tokens, appended when they arrive on the host: in asynchronous scheduling a step late.
      prompt_logprobs: of the prompt's chunks that were read, until the last one.
      prompt_is_scored: the last of them were launched.
      adapter: its LoRARequest, or None.
      images: of the prompt, in its order.
    """

    req_id: str
    params: SamplingParams | PoolingParams
    sampling: SamplingState
    num_prompt: int
    slot: int = NO_SLOT
    outputs: list[int] = dataclasses.field(default_factory=list)
    prompt_token_ids: npt.NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    prompt_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    prompt_is_scored: bool = False
    adapter: Any = None
    images: tuple[Image, ...] = ()

    @property
    def is_pooled(self) -> bool:
        """Whether the prompt is pooled, and nothing is sampled."""
        return isinstance(self.params, PoolingParams)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The requests of a step, in its order.

    Attributes:
      slots: int32[len(requests)].
      ones: int32[len(requests)]: the tokens of each in a step that decodes.
    """

    requests: list[Request]
    slots: Int32Array
    ones: Int32Array


class RequestTable:
    """All requests that the engine has told the runner of and not ended.

    Attributes:
      token_ids: int32[max_seqs + 1, max_model_len], by slot.
      num_prompt: int32[max_seqs + 1], by slot like the following: tokens of the prompt.
      num_tokens: prompt and sampled tokens, those included that the host does not know yet.
      num_computed: tokens whose keys and values are stored before the next step.
      known: how many of the tokens stand in ``token_ids``, and drafts behind them while a step verifies them. The other
        tokens were sampled since the request got its slot; only the last of them is ever an input, and that one is on
        the device.
      adapters: int32[max_seqs + 1], by slot too: the slot of the request's LoRA adapter in this step; -1: none.
      second_text: by slot: where the second one of a pair of texts begins, if a prompt is one; else behind every token.
      image_ends: int32[max_seqs + 1], by slot too: the position behind the last row of an image; 0: none.
      rotary: where the model's rotary positions are others than a token's number.
    """

    def __init__(
        self,
        max_seqs: int,
        max_model_len: int,
        tables: BlockTables,
        seed: int,
        rotary: RotaryPositions | None = None,
    ) -> None:
        self.rotary = rotary
        self.tables = tables
        self.token_ids = np.zeros((max_seqs + 1, max_model_len), np.int32)
        self.num_prompt, self.num_tokens, self.num_computed, self.known = np.zeros((4, max_seqs + 1), np.int32)
        self.adapters = np.full(max_seqs + 1, -1, np.int32)
        self.second_text = np.full(max_seqs + 1, max_model_len, np.int32)
        self.image_ends = np.zeros(max_seqs + 1, np.int32)
        self._requests: dict[str, Request] = {}
        self._free = list(range(max_seqs - 1, -1, -1))
        # For requests without a seed.
        self._seeds = np.random.default_rng(seed)
        # Most steps have the requests of the step before.
        self._last_ids: list[str] | None = None
        self._last_batch = Batch([], *np.empty((2, 0), np.int32))

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
        for req_id, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if pages is None:  # as in most steps
                continue
            request = self._requests[req_id]
            if req_id in cached.resumed_req_ids:
                self._give_back(request)
                self._admit(request, cached.all_token_ids[req_id], pages)
                admitted.append(request)
            else:
                self.tables.append(request.slot, pages)
        if cached.req_ids == self._last_ids:
            slots: Sequence[int] | Int32Array = self._last_batch.slots
        else:
            slots = [self._requests[req_id].slot for req_id in cached.req_ids]
        self.num_computed[slots] = cached.num_computed_tokens
        return admitted

    def batch(self, scheduled: Any) -> Batch:
        """The requests of a step."""
        ids = list(scheduled.num_scheduled_tokens)
        if ids != self._last_ids:
            requests = [self._requests[req_id] for req_id in ids]
            slots = np.fromiter((request.slot for request in requests), np.int32, len(requests))
            self._last_ids, self._last_batch = ids, Batch(requests, slots, np.ones_like(slots))
        return self._last_batch

    def tokens(self, slot: int) -> Int32Array:
        """The tokens of the request that has ``slot``, where all are known."""
        tokens: Int32Array = self.token_ids[slot, : self.num_tokens[slot]]
        return tokens

    def put(self, slot: int, token_ids: Sequence[int]) -> None:
        """Makes known what stands behind the tokens: new ones, or drafts."""
        begin = int(self.num_tokens[slot])
        end = begin + len(token_ids)
        self.token_ids[slot, begin:end] = token_ids
        self.known[slot] = end

    def _add(self, new: Any) -> Request:
        sampling = None if new.sampling_params is None else SamplingState.of(new.sampling_params, self._seeds)
        request = Request(
            new.req_id,
            new.sampling_params or new.pooling_params,
            sampling or NOT_SAMPLED,
            num_prompt=len(new.prompt_token_ids),
            prompt_token_ids=np.asarray(new.prompt_token_ids, np.int32),
            adapter=new.lora_request,
            images=images.of_request(new.mm_features),
        )
        self._requests[new.req_id] = request
        self._admit(request, new.prompt_token_ids, new.block_ids)
        self.num_computed[request.slot] = new.num_computed_tokens
        return request

    def _admit(self, request: Request, token_ids: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        slot = request.slot = self._free.pop()
        self._last_ids = None
        self.num_prompt[slot] = request.num_prompt
        # vLLM's name, of a pair that its tokenizer gave types.
        begin = (request.params.extra_kwargs or {}).get("compressed_token_type_ids") if request.is_pooled else None
        self.second_text[slot] = self.token_ids.shape[1] if begin is None else begin
        self.image_ends[slot] = request.images[-1].end if request.images else 0
        if self.rotary is not None:
            self.rotary.admit(slot, request.images)
        self.num_tokens[slot] = self.known[slot] = len(token_ids)
        request.outputs = list(token_ids[request.num_prompt :])
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.tables.clear(slot)
        self.tables.append(slot, pages)

    def _give_back(self, request: Request) -> None:
        if request.slot != NO_SLOT:
            self._free.append(request.slot)
            request.slot = NO_SLOT
            self._last_ids = None
