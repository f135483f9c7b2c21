"""Pooling models: steps that read prompts, whose rows the host makes embeddings, classes and scores of.

The model's programs return the first and the last row of each sequence, and all rows. vLLM's poolers get what they read
on the host, request by request: a result's bits follow from its rows, not from what else is in the step. They are small
beside the model, and take rows of any number and options, each of which would be a program of its own on the device.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.tasks import POOLING_TASKS
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.pool import metadata as pool

from . import buckets
from .model_program import ModelPrograms
from .model_runner import ModelRunner
from .requests import Batch, Request
from .step_layout import StepLayout

# What build_pooling_cursor is told, which each version of vLLM says otherwise.
_OF_CURSOR = frozenset(inspect.signature(pool.PoolingMetadata.build_pooling_cursor).parameters) - {"self"}

# What vLLM's poolings of one row read.
_ROWS = {"CLSPool": "first", "LastPool": "last"}

# Made by a plug-in for a model, from what it likes.
_OF_PLUGINS = "plugin"


class PoolingPrograms(ModelPrograms):
    """Programs that end with the model's states."""

    def states(
        self, layout: StepLayout, packed: Any, unused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs a step; T[max_seqs, n], each sequence's first and last row, and T[num_tokens, n].

        unused: no sampled tokens.
        """
        first, last, every = self._run(layout, packed, unused)
        return first, last, every

    def _step(
        self,
        layout: StepLayout,
        packed: torch.Tensor,
        last_tokens: torch.Tensor,
        tables: torch.Tensor,
        image_rows: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        parts = layout.unpack(packed)
        hidden = self._hidden(layout, parts, last_tokens, tables, image_rows)
        starts = parts["query_start_loc"]
        ends = (starts[1:] - 1).clamp(min=0)
        return [
            hidden.index_select(0, starts[:-1].clamp(max=layout.num_tokens - 1)),
            hidden.index_select(0, ends),
            hidden,
        ]


class PoolingRunner(ModelRunner):
    """The runner of a pooling model."""

    _programs: PoolingPrograms
    _programs_of = PoolingPrograms

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_model(self) -> None:
        """Loads the weights; the pooler's own stay on the host."""
        super().load_model()
        self._pooler = Pooler(self.model.pooler)
        # Of requests that are pooled of all their rows, the rows of the steps before.
        self._rows: dict[str, torch.Tensor] = {}

    def supported_tasks(self) -> tuple[str, ...]:
        """Of vLLM's tasks."""
        tasks = set(self._pooler.tasks) & set(POOLING_TASKS) - {_OF_PLUGINS}
        if getattr(self.config.model_config.hf_config, "num_labels", 0) != 1:
            tasks -= {"score"}  # vLLM's condition
        return tuple(sorted(tasks))

    def _wait_for(self, layout: StepLayout, packed: npt.NDArray[np.int32]) -> None:
        self._programs.states(layout, packed, self._last_tokens)[0].cpu()

    def _compile(self, layout: StepLayout) -> None:
        self._programs.compile(layout, self._last_tokens)

    def execute_model(self, scheduled: Any) -> Any:
        """Runs the model for a SchedulerOutput and pools the prompts that end in it."""
        self.requests.update(scheduled)
        for req_id in scheduled.finished_req_ids:
            self._rows.pop(req_id, None)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = self.requests.batch(scheduled)
        counts = np.fromiter(scheduled.num_scheduled_tokens.values(), np.int32, len(batch.slots))
        layout = self.layout(buckets.next_bucket(self.token_buckets, int(counts.sum())))
        packed = self._packer.pack(layout, batch, counts)
        first, last, every = self._programs.states(layout, packed, self._last_tokens)
        req_ids = [request.req_id for request in batch.requests]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[[] for _ in req_ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=self._pool(batch, counts, {"first": first, "last": last, "all": every}),
        )

    def _pool(
        self, batch: Batch, counts: npt.NDArray[np.int32], states: dict[str, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Of each request its result, or None while its prompt is not read to the end; states: of the step, by rows."""
        computed = self.requests.num_computed[batch.slots]
        ended = computed + counts == self.requests.num_prompt[batch.slots]
        # The first row of a prompt is one of the step's in which all of it is read.
        whole = ended & (computed == 0)
        reads = [self._pooler.rows_read(request.params.task) for request in batch.requests]
        reads = ["all" if rows == "first" and not known else rows for rows, known in zip(reads, whole, strict=True)]
        # Of prompts that go on those of all rows are kept.
        needed = {rows for rows, end in zip(reads, ended, strict=True) if end or rows == "all"}
        on_host = {rows: states[rows].cpu() for rows in needed}
        ends = np.cumsum(counts)
        results: list[torch.Tensor | None] = []
        for index, request in enumerate(batch.requests):
            rows = None
            if reads[index] == "all":
                new = on_host["all"][int(ends[index] - counts[index]) : int(ends[index])]
                rows = self._joined(request, int(computed[index]), new, bool(ended[index]))
            elif ended[index]:
                rows = on_host[reads[index]][index : index + 1]
            results.append(self._pooler(rows, request) if rows is not None and ended[index] else None)
        return results

    def _joined(self, request: Request, start: int, new: torch.Tensor, complete: bool) -> torch.Tensor:
        """The rows of a prompt up to those of this step; kept where more follow.

        A request that was preempted begins anew.
        """
        before = self._rows.pop(request.req_id, None)
        rows = new.clone() if before is None or not start else torch.cat([before[:start], new])
        if not complete:
            self._rows[request.req_id] = rows
        return rows


class Pooler:
    """vLLM's pooler of a model, on the host."""

    def __init__(self, pooler: Any) -> None:
        self._pooler = pooler
        self.tasks = frozenset(pooler.get_supported_tasks())
        # vLLM keeps those of the tasks in a dict, which nn.Module does not look into.
        self._by_task: dict[str, Any] = dict(getattr(pooler, "poolers_by_task", {}))
        for part in (pooler, *self._by_task.values()):
            _bring_to_host(part)

    def rows_read(self, task: str) -> str:
        """Which rows of its prompt a result of this task needs: "first", "last" or "all"."""
        pooling = self._by_task.get(task, self._pooler)
        while hasattr(pooling, "pooling"):  # those of BERT's classifiers stand behind a layer of their own
            pooling = pooling.pooling
        return _ROWS.get(type(pooling).__name__, "all")

    def __call__(self, rows: torch.Tensor, request: Request) -> torch.Tensor:
        """The result of one request, of its last row or of all."""
        self._pooler.get_pooling_updates(request.params.task).apply(request.params)
        count = len(rows)
        named: dict[str, Any] = {
            "prompt_lens": torch.tensor([count]),
            "prompt_token_ids": torch.from_numpy(request.prompt_token_ids[-count:])[None],
            "pooling_params": [request.params],
        }
        if hasattr(pool, "PoolingStates"):  # since vLLM 0.14
            named["pooling_states"] = [pool.PoolingStates()]
        metadata = pool.PoolingMetadata(**named)
        counts: dict[str, Any] = {
            "num_scheduled_tokens": [count],
            "num_scheduled_tokens_np": np.array([count]),
            "seq_lens_cpu": torch.tensor([count]),
            "device": torch.device("cpu"),
        }
        metadata.build_pooling_cursor(**{name: counts[name] for name in _OF_CURSOR})
        result: torch.Tensor = self._pooler(hidden_states=rows, pooling_metadata=metadata)[0]
        return result


def _bring_to_host(part: nn.Module) -> None:
    for module in part.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.data.cpu(), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.cpu()
