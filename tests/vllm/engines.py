"""Engines for tests, and what is asked of them."""

from __future__ import annotations

import collections
import weakref
from typing import Any

from vllm.v1.metrics.stats import IterationStats

from vllm import LLM, PoolingParams, SamplingParams, TokensPrompt
from xla_gpu.vllm import versions
from xla_gpu.vllm.program import compilations
from xla_gpu.vllm.speculation import take_drafts


def make(folder: str, **options: Any) -> LLM:
    """An engine whose steps have 8 or 64 tokens, so that prompts are read in chunks and little is compiled."""
    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        # So that a process can have several engines on a GPU: without a size the first one's caches fill it.
        "kv_cache_memory_bytes": 1 << 26,
        "disable_log_stats": False,
        "additional_config": {"token_buckets": [8, 64]},
        **options,
    }
    llm = count(LLM(model=folder, **settings))
    if "speculative_config" in options:
        take_drafts(llm)
    return llm


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def compiled_since_start(llm: LLM) -> int:
    return compilations() - runner_of(llm).compiled


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """Requests' outputs, in order."""
    wrapped = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return llm.generate(wrapped, params, use_tqdm=False)


def tokens(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in run(llm, prompts, params)]


def greedy(new: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **others)


def random(new: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True, **{"temperature": 1.0, **others})


# vLLM's name of whether embeddings are normalised.
NORMALIZE = "use_activation" if versions.vllm_version() >= "0.16" else "normalize"


def pooling(llm: LLM, task: str, **options: Any) -> PoolingParams:
    """Parameters of a request, checked as vLLM's LLM and server do."""
    model = llm.llm_engine.vllm_config.model_config
    if versions.vllm_version() >= "0.16":
        params = PoolingParams(task=task, **options)
        params.verify(model)
    else:
        params = PoolingParams(**options)
        params.verify(task, model)
    return params


METRICS = {
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_draft_tokens",
}
# By engine: vLLM's own metrics are of a process, and begin anew with each engine that is made.
_counts: weakref.WeakKeyDictionary[LLM, collections.Counter[str]] = weakref.WeakKeyDictionary()


def count(llm: LLM) -> LLM:
    """Counts what this engine's steps report from now on, for ``metric``."""
    counts = _counts[llm] = collections.Counter()
    manager, scheduler = llm.llm_engine.logger_manager, llm.llm_engine.engine_core.engine_core.scheduler
    record, make_stats = manager.record, scheduler.make_stats

    def counting_record(*args: Any, **kwargs: Any) -> Any:
        for stats in (*args, *kwargs.values()):
            if isinstance(stats, IterationStats):
                counts["vllm:num_preemptions"] += stats.num_preempted_reqs
        return record(*args, **kwargs)

    def counting_make_stats(*args: Any, **kwargs: Any) -> Any:
        if stats := make_stats(*args, **kwargs):
            counts["vllm:prefix_cache_hits"] += stats.prefix_cache_stats.hits
            if drafts := stats.spec_decoding_stats:
                counts["vllm:spec_decode_num_draft_tokens"] += drafts.num_draft_tokens
                counts["vllm:spec_decode_num_accepted_tokens"] += drafts.num_accepted_tokens
        return stats

    # Since vLLM 0.17 steps without a new token are not recorded.
    manager.record, scheduler.make_stats = counting_record, counting_make_stats
    return llm


def metric(llm: LLM, name: str) -> int:
    """What vLLM counts by this name, of one engine."""
    assert name in METRICS
    return _counts[llm][name]


def state_is_released(llm: LLM) -> None:
    """Requests leave one step after they end; an empty step tells the runner of the last ones."""
    runner = runner_of(llm)
    tokens(llm, [[3]], greedy(1))
    tokens(llm, [[3]], greedy(1))
    assert len(runner.requests) <= 1 and runner.requests.free_slots >= runner._max_seqs - 1


def abort_one_of_three(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Aborts the second request after five steps; returns the others' tokens."""
    engine = llm.llm_engine
    for index, prompt in enumerate(prompts):
        engine.add_request(f"abort-{index}", {"prompt_token_ids": prompt}, params)
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        if steps == 5:
            engine.abort_request(["abort-1"])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return [finished["abort-0"], finished["abort-2"]]
