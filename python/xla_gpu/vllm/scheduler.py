"""vLLM's schedulers, with what this back end needs of them.

Requests that a step cannot take end with an error, and the engine goes on. Images that are to be read whole are.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

Told = dict[int, EngineCoreOutputs]  # what is told to each client

# vLLM 0.12 has no status of errors.
_STATUS = getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)


class _EndsFailed:
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Told:
        """What clients are told of a step. ``failed`` of its output: ids of requests that it has no tokens for."""
        failed = getattr(model_runner_output, "failed", ())
        for req_id in failed:  # whose drafts are neither accepted nor rejected
            scheduler_output.scheduled_spec_decode_tokens.pop(req_id, None)
        told: Told = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for req_id in failed:
            _end(self, req_id, told)
        return told


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


class EndsFailed(_EndsFailed, Scheduler):  # type: ignore[misc]
    """Where vLLM waits for each step."""


class AsyncEndsFailed(_EndsFailed, AsyncScheduler):  # type: ignore[misc]
    """Where it does not."""


class _ReadsImagesWhole:
    def _try_schedule_encoder_inputs(self, request: Any, computed: int, count: int, *others: Any, **named: Any) -> Any:
        """Which images a step is to encode, and how many tokens it reads of a request; vLLM's own arguments.

        A step never ends in an image: vLLM sees to that (--disable-chunked-mm-input) where it begins before the image
        alone.
        """
        found = super()._try_schedule_encoder_inputs(  # type: ignore[misc]
            request, computed, count, *others, **named
        )
        end = computed + found[1]
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset < end < place.offset + place.length:
                before = max(place.offset - computed, 0)
                return super()._try_schedule_encoder_inputs(  # type: ignore[misc]
                    request, computed, before, *others, **named
                )
        return found


class ReadsImagesWhole(_ReadsImagesWhole, Scheduler):  # type: ignore[misc]
    """Where vLLM waits for each step."""


class AsyncReadsImagesWhole(_ReadsImagesWhole, AsyncScheduler):  # type: ignore[misc]
    """Where it does not."""


class ReadsImagesWholeAndEndsFailed(_ReadsImagesWhole, _EndsFailed, Scheduler):  # type: ignore[misc]
    """Both, where vLLM waits for each step."""


class AsyncReadsImagesWholeAndEndsFailed(_ReadsImagesWhole, _EndsFailed, AsyncScheduler):  # type: ignore[misc]
    """Both, where it does not."""


def choose(config: Any, images_whole: bool) -> None:
    """Has an engine use these where it needs one.

    With adapters it does, whose files may be gone when a request's turn comes. ``images_whole``: and where each image
    is to be read in one step.
    """
    scheduler = config.scheduler_config
    wanted = ["ReadsImagesWhole"] if images_whole else []
    if config.lora_config is not None and (images_whole or scheduler.scheduler_cls is None):
        wanted.append("EndsFailed")
    if images_whole:
        scheduler.disable_chunked_mm_input = True  # then vLLM wants steps that are large enough
    if wanted:
        name = "And".join(wanted)
        scheduler.scheduler_cls = f"{__name__}.{'Async' if scheduler.async_scheduling else ''}{name}"
