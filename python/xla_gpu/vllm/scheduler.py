"""vLLM's schedulers, with what this back end needs of them.

Requests that a step cannot take end with an error, and the engine goes on. Images that are to be read whole are. Videos
have no more room than the device keeps rows for.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from . import images

Told = dict[int, EngineCoreOutputs]  # what is told to each client

# vLLM 0.12 has no status of errors.
_STATUS = getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)


class _Own:
    def __init__(self, vllm_config: Any, *given: Any, **named: Any) -> None:
        super().__init__(vllm_config, *given, **named)  # type: ignore[call-arg]
        model = vllm_config.model_config
        self._images_whole = images.tokens_of_block(model) > 0
        if images.takes_videos(model):
            room = images.most_rows(vllm_config)
            computed = int(self.max_num_encoder_input_tokens)  # type: ignore[has-type]
            self.max_num_encoder_input_tokens = min(computed, room)
            self.encoder_cache_manager = EncoderCacheManager(cache_size=room)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Told:
        """What clients are told of a step. ``failed`` of its output: ids of requests that it has no tokens for."""
        failed = getattr(model_runner_output, "failed", ())
        for req_id in failed:  # whose drafts are neither accepted nor rejected
            scheduler_output.scheduled_spec_decode_tokens.pop(req_id, None)
        told: Told = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for req_id in failed:
            _end(self, req_id, told)
        return told

    def _try_schedule_encoder_inputs(self, request: Any, computed: int, count: int, *others: Any, **named: Any) -> Any:
        """Which images a step is to encode, and how many tokens it reads of a request; vLLM's own arguments.

        A step never ends in an image that is to be read whole: vLLM sees to that (--disable-chunked-mm-input) where it
        begins before the image alone.
        """
        schedule = super()._try_schedule_encoder_inputs  # type: ignore[misc]
        found = schedule(request, computed, count, *others, **named)
        end = computed + found[1]
        for feature in request.mm_features if self._images_whole else ():
            place = feature.mm_position
            if place.offset < end < place.offset + place.length:
                return schedule(request, computed, max(place.offset - computed, 0), *others, **named)
        return found


class OwnScheduler(_Own, Scheduler):  # type: ignore[misc]
    """Where vLLM waits for each step."""


class OwnAsyncScheduler(_Own, AsyncScheduler):  # type: ignore[misc]
    """Where it does not."""


def _end(scheduler: Any, req_id: str, told: Told) -> None:
    request = scheduler.requests.get(req_id)
    if request is None:  # ended by the step before, or aborted since
        return
    # What the step stored for it has no meaning, and other requests are to find none of it.
    manager = scheduler.kv_cache_manager
    for blocks in manager.get_blocks(req_id).blocks:
        for block in blocks:
            manager.block_pool._maybe_evict_cached_block(block)
    scheduler.finish_requests(req_id, _STATUS)
    output = EngineCoreOutput(
        request_id=req_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    told.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


def choose(config: Any) -> None:
    """Has an engine use these where it needs one.

    With adapters it does: an adapter's files may be gone when a request's turn comes.
    """
    scheduler, model = config.scheduler_config, config.model_config
    images_whole = images.tokens_of_block(model) > 0
    if images_whole:
        scheduler.disable_chunked_mm_input = True  # then vLLM wants steps that are large enough
    adapters = config.lora_config is not None and scheduler.scheduler_cls is None
    if adapters or images_whole or images.takes_videos(model):
        scheduler.scheduler_cls = f"{__name__}.{'OwnAsyncScheduler' if scheduler.async_scheduling else 'OwnScheduler'}"
