"""vLLM's schedulers, but for requests that a step cannot take: these end with an error, and the engine goes on."""

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


def choose(config: Any) -> None:
    """Has an engine with adapters use these: an adapter's files may be gone when a request's turn comes."""
    scheduler = config.scheduler_config
    if config.lora_config is not None and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = f"{__name__}.{'AsyncEndsFailed' if scheduler.async_scheduling else 'EndsFailed'}"
