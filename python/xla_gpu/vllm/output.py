"""What a step chose, on its way to the host."""

from __future__ import annotations

import dataclasses

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from .requests import Request
from .sampler.sampler import Logprobs


@dataclasses.dataclass
class PromptLogprobs:
    """Log-probabilities of a request's prompt that a step computed.

    Attributes:
      start: position of the first of them; position i scores token i + 1.
      parts: from the device, in order; the last one may end in padding.
      num_rows: how many there are.
      complete: the step read the prompt's last token.
    """

    request: Request
    start: int
    parts: list[Logprobs]
    num_rows: int
    complete: bool


class StepOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """The output of a step. ``get_output`` waits for the device; in asynchronous scheduling vLLM's thread calls it."""

    def __init__(
        self,
        requests: list[Request],
        sampled_rows: list[int],
        tokens: torch.Tensor,
        logprobs: Logprobs | None,
        prompts: list[PromptLogprobs],
        failed: frozenset[str] = frozenset(),
    ) -> None:
        """sampled_rows: of the requests that get a token. failed: requests that end here without one."""
        self.requests = requests
        self._sampled_rows = sampled_rows
        self._tokens = tokens
        self._logprobs = logprobs
        self._prompts = [prompt for prompt in prompts if prompt.request.req_id not in failed]
        self._failed = failed
        self._failed_rows = [row for row, request in enumerate(requests) if request.req_id in failed] if failed else []

    def get_output(self) -> ModelRunnerOutput:
        """Fetches the results. To be called once."""
        tokens = self._tokens.cpu().tolist()
        sampled = self._choose(tokens)
        for row in self._failed_rows:
            sampled[row] = []
        for request, new in zip(self.requests, sampled, strict=True):
            request.outputs += new
        req_ids = [request.req_id for request in self.requests]
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=self._fetch_logprobs(),
            prompt_logprobs_dict=self._fetch_prompts(),
            pooler_output=[],
        )
        output.failed = self._failed  # the scheduler's
        return output

    def _choose(self, tokens: list[int]) -> list[list[int]]:
        """New tokens of each request, of those of each row."""
        sampled: list[list[int]] = [[] for _ in self.requests]
        for row in self._sampled_rows:
            sampled[row] = [tokens[row]]
        return sampled

    def _fetch_logprobs(self) -> LogprobsLists | None:
        if self._logprobs is None:
            return None
        # Arrays, not lists: vLLM serialises these between its processes.
        return LogprobsLists(*(part.cpu().numpy()[: len(self.requests)] for part in self._logprobs))

    def _fetch_prompts(self) -> dict[str, LogprobsTensors | None]:
        found: dict[str, LogprobsTensors | None] = {}
        for prompt in self._prompts:
            request = prompt.request
            wanted = request.params.prompt_logprobs
            # What is known of chunks before; a request that was preempted between two of them begins anew.
            rows = (
                [] if request.prompt_logprobs is None else [tuple(x[: prompt.start] for x in request.prompt_logprobs)]
            )
            left = prompt.num_rows
            for part in prompt.parts:
                ids, values, ranks = (tensor.cpu()[:left] for tensor in part)
                if wanted is not None and wanted >= 0:
                    ids, values = ids[:, : wanted + 1], values[:, : wanted + 1]
                rows.append((ids, values, ranks))
                left -= len(ranks)
            ids, values, ranks = (torch.cat(tensors) for tensors in zip(*rows, strict=True))
            request.prompt_logprobs = (ids, values, ranks)
            if prompt.complete:
                found[request.req_id] = LogprobsTensors(ids, values, ranks)
                request.prompt_logprobs = None
        return found
