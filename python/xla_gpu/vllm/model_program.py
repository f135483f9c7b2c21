"""The model's programs: one per number of tokens of a step, from the packed batch to tokens and logits."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from . import tensor_parallel
from .attention import StepMetadata
from .block_tables import BlockTables
from .buckets import logits_rows
from .kv_cache import KVCaches
from .norms import NormWeights
from .program import Program
from .sampler.sampler import store_last_tokens
from .step_layout import StepLayout

# From this many tokens on, matrix products are bound by arithmetic, and XLA takes cuBLASLt's kernels for all of them.
# Its Triton kernels are dozens for each product; compiling and timing them takes most of a compilation.
PROMPT_TOKENS = 256
PROMPT_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class ModelPrograms:
    """``launch(layout, packed, last_tokens)`` returns tokens, last tokens, logits and hidden states of a step."""

    def __init__(
        self, config: VllmConfig, model: nn.Module, caches: KVCaches, tables: BlockTables, device: Any
    ) -> None:
        self._config = config
        self._model = model
        self._caches = caches
        self._tables = tables
        self._device = device
        # A program over several devices takes its parameters as they are.
        self._norms = None if tensor_parallel.active() is not None else NormWeights(model)
        self._programs: dict[StepLayout, Program] = {}

    def compile(self, layout: StepLayout, last_tokens: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Compiles the program of ``layout``; returns shape and dtype of its results by name, see ``launch``."""
        self._caches.bind()
        packed = torch.zeros(layout.size, dtype=torch.int32).to(self._device)

        def step(
            packed: torch.Tensor, last: torch.Tensor, tables: torch.Tensor, *_: torch.Tensor
        ) -> list[torch.Tensor]:
            with contextlib.nullcontext() if self._norms is None else self._norms.sliced():
                return self._step(layout, packed, last, tables)

        program = self._programs[layout] = Program(
            f"model, {layout.num_tokens} tokens",
            step,
            [packed, last_tokens],
            [self._tables.device_tables, *self._caches.tensors],
            PROMPT_OPTIONS if layout.num_tokens >= max(PROMPT_TOKENS, layout.max_seqs + 1) else {},
        )
        return dict(zip(("tokens", "last_tokens", "logits", "hidden"), program.outputs, strict=True))

    def launch(
        self, layout: StepLayout, packed: torch.Tensor, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs a step.

        Returns:
          tokens int32[logits_rows], the most likely ones; last_tokens int32[max_seqs + 1] with them; logits
          T[logits_rows, vocab_size] of each sequence's last row; hidden states T[num_tokens, hidden_size].
        """
        state = [self._tables.device_tables, *self._caches.tensors]
        outputs, (tables, *caches) = self._programs[layout]([packed, last_tokens], state)
        self._tables.device_tables, self._caches.tensors = tables, caches
        tokens, last_tokens, logits, hidden = outputs
        return tokens, last_tokens, logits, hidden

    def _step(
        self, layout: StepLayout, packed: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor
    ) -> list[torch.Tensor]:
        parts = layout.unpack(packed)
        sources, slots = parts["sources"], parts["request_slots"]
        ids = torch.where(sources < 0, parts["tokens"], last_tokens.index_select(0, sources.clamp(min=0)))
        tables.index_put_((parts["update_indices"],), parts["update_pages"])
        by_group = tables.view(self._tables.shape)
        starts = parts["query_start_loc"]
        groups = [
            StepMetadata(
                slot_mapping=parts["slot_mapping"][group],
                context_lens=parts["context_lens"],
                block_tables=by_group[group].index_select(0, slots),
                query_start_loc=starts,
                num_seqs=parts["num_seqs"],
            )
            for group in range(layout.num_groups)
        ]
        metadata = self._caches.metadata(groups)
        # vLLM would ask the other data-parallel engines for their numbers. The models share nothing.
        engines = self._config.parallel_config.data_parallel_size
        tokens_of_engines = torch.full((engines,), layout.num_tokens, dtype=torch.int32, device="cpu")
        with set_forward_context(
            metadata, self._config, num_tokens=layout.num_tokens, num_tokens_across_dp=tokens_of_engines
        ):
            hidden = self._model(input_ids=ids, positions=parts["positions"])
        last_rows = (starts[1:] - 1).clamp(min=0)
        logits = self._model.compute_logits(hidden.index_select(0, last_rows))
        tokens = logits.argmax(-1).to(torch.int32)
        last_tokens = store_last_tokens(last_tokens, slots, tokens)
        rows = logits_rows(layout.max_seqs, self._config.scheduler_config.max_num_seqs)
        if (padding := rows - layout.max_seqs) > 0:
            tokens = torch.cat([tokens, tokens.new_zeros(padding)])
            logits = torch.cat([logits, logits.new_zeros(padding, logits.shape[1])])
        return [tokens, last_tokens, logits, hidden]


class PromptPrograms:
    """Log-probabilities of a prompt's tokens: the hidden states' rows are chosen first, then scored, some at a time."""

    MAX_ROWS = 128

    def __init__(
        self, model: nn.Module, hidden_size: int, max_tokens: int, max_logprobs: int, raw_logits: bool, device: Any
    ):
        self.rows = min(self.MAX_ROWS, max_tokens)
        self._model = model
        self._hidden_size = hidden_size
        self._max_logprobs = max_logprobs
        self._raw_logits = raw_logits
        self._device = device
        self._choose: dict[int, Program] = {}
        self._score: Program | None = None

    def compile(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Compiles what steps of ``num_tokens`` tokens need; ``dtype``: of the model's hidden states."""
        from .sampler import logprobs

        packed = torch.zeros(2 * self.rows, dtype=torch.int32).to(self._device)
        hidden = torch.zeros((num_tokens, self._hidden_size), dtype=dtype).to(self._device)

        def choose(hidden: torch.Tensor, packed: torch.Tensor) -> list[torch.Tensor]:
            return [hidden.index_select(0, packed[: self.rows])]

        def score(hidden: torch.Tensor, packed: torch.Tensor) -> list[torch.Tensor]:
            logits = self._model.compute_logits(hidden).float()
            scores = logits if self._raw_logits else logits.log_softmax(-1)
            return list(logprobs.gather(scores, packed[self.rows :], self._max_logprobs))

        self._choose[num_tokens] = Program(f"prompt rows, {num_tokens} tokens", choose, [hidden, packed])
        if self._score is None:
            chosen = torch.zeros((self.rows, self._hidden_size), dtype=dtype).to(self._device)
            self._score = Program("prompt logprobs", score, [chosen, packed])

    def launch(self, hidden: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(token ids, scores, ranks) of rows; packed: int32[2 * rows], rows of ``hidden`` and the tokens after them."""
        assert self._score is not None
        (chosen,), _ = self._choose[hidden.shape[0]]([hidden, packed])
        ids, scores, ranks = self._score([chosen, packed])[0]
        return ids, scores, ranks
