"""Runs the engine's steps: packs a step's batch, launches its programs, hands over what they chose."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch_xla.core.xla_model as xm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

import xla_gpu.torch as xg

from . import buckets, images, mrope, weights
from .ahead import QUIET_STEPS, LaunchedAhead
from .block_tables import BlockTables
from .draft_programs import DraftPrograms
from .head_drafter import HeadDrafter, StepOfHead
from .image_encoder import TileEncoder
from .image_rows import ImageRows
from .kv_cache import KVCaches
from .model_program import ModelPrograms, PromptPrograms
from .options import Options
from .output import PromptLogprobs, StepOutput
from .patch_encoder import PatchEncoder
from .program import compilations, compiled_together
from .requests import Batch, RequestTable
from .sampler.sampler import Sampled, Sampler, SamplerOptions
from .speculation import Drafter, DraftOutput, DraftRows, NgramDrafter, proposer
from .step_layout import StepLayout
from .step_packer import StepPacker

if TYPE_CHECKING:
    from .lora import Adapters

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name


@dataclasses.dataclass
class Launched:
    """A step whose model was launched and whose tokens sample_tokens chooses; see ModelPrograms.launch.

    Attributes:
      counts: tokens of each request in the step.
      previous_tokens: int32[max_seqs + 1], each request's last token before the step, by slot.
      states: of the step's rows.
      drafts: the rows that verify drafts; None: steps have none.
      failed: ids of requests that get no token, since their adapter could not be read.
      for_head: what a head that drafts reads, or None.
    """

    batch: Batch
    counts: npt.NDArray[np.int32]
    previous_tokens: torch.Tensor
    greedy: Sampled
    logits: torch.Tensor
    states: list[torch.Tensor]
    for_head: StepOfHead | None = None
    drafts: DraftRows | None = None
    failed: frozenset[str] = frozenset()


class ModelRunner:
    """The model, its caches and its programs on one device."""

    _programs_of: type[ModelPrograms] = ModelPrograms

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._max_seqs = config.scheduler_config.max_num_seqs
        self._max_tokens = config.scheduler_config.max_num_batched_tokens
        self._asynchronous = config.scheduler_config.async_scheduling
        self._most_rows = buckets.most_rows(config)
        self.token_buckets = buckets.of_steps(config)
        self.image_buckets = buckets.of_images(self.token_buckets) if images.are_served(config.model_config) else []
        self._launched: Launched | None = None
        self._layouts: dict[tuple[int, bool], StepLayout] = {}
        # What the requests of the last batch need besides the most likely token; most steps have the same batch.
        self._flagged: tuple[Batch | None, dict[str, npt.NDArray[np.bool_]]] = None, {}
        self._sampler: Sampler | None = None
        self.adapters: Adapters | None = None
        self.images: ImageRows | None = None
        # Whether rows of images have rotary positions of their own.
        self._mrope = images.has_mrope(config.model_config)
        # Of which batch, after which of their changes, and which of its requests have none that could be read.
        self._with_adapters: tuple[Batch | None, int, frozenset[str]] = None, 0, frozenset()

    # ---- Start -------------------------------------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_model(self) -> None:
        """Loads the weights."""
        start = time.perf_counter()
        self.model, self.head, tower = weights.load_model(self.config, self.device)
        if tower is not None:
            encoder = PatchEncoder if images.takes_patches(self.config.model_config) else TileEncoder
            self.images = encoder(self.config, tower, self.device)
        if self.config.lora_config is not None:
            from .lora import Adapters

            self.adapters = Adapters(self.model, self.config, self.device, tower)
        xm.wait_device_ops()
        logger.info("Loading the model took %.1f s", time.perf_counter() - start)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def initialize(self, cache_config: KVCacheConfig) -> None:
        """Makes the caches and all that is kept on the device between steps."""
        model = self.config.model_config
        self.caches = KVCaches(self.config, cache_config, self.device)
        self.tables = BlockTables(self._max_seqs, model.max_model_len, self.caches.block_sizes, self.device)
        rotary = None
        if self._mrope:
            per_second = getattr(model.hf_config.vision_config, "tokens_per_second", 1.0)
            rotary = mrope.RotaryPositions(self._max_seqs, per_second)
        self.requests = RequestTable(self._max_seqs, model.max_model_len, self.tables, model.seed, rotary)
        self._packer = StepPacker(self.requests, self.tables, self._max_seqs)
        self._drafter = self._make_drafter()
        self.ahead = LaunchedAhead(self.requests, self.tables, model.max_model_len)
        self._last_tokens = torch.zeros(self._max_seqs + 1, dtype=torch.int32).to(self.device)
        layers = None if self.adapters is None else self.adapters.layers
        self._programs = self._programs_of(
            self.config, self.model, self.caches, self.tables, self.device, layers, self.images
        )

    def _make_drafter(self) -> Drafter | None:
        if self.config.speculative_config is None:
            return None
        if self.head is None:
            return NgramDrafter(proposer(self.config), self.requests)
        programs = DraftPrograms(self.config, self.head, self.caches, self.tables, self.device)
        return HeadDrafter(programs, self.requests, self.tables, self.config.model_config.max_model_len)

    def layout(self, num_tokens: int, has_images: bool = False) -> StepLayout:
        """The layout of steps of up to ``num_tokens`` tokens, which is one of the buckets."""
        key = num_tokens, has_images
        if key not in self._layouts:
            max_seqs = min(num_tokens, self._max_seqs)
            groups = len(self.caches.block_sizes)
            pages = max(1, sum(max_seqs + num_tokens // size for size in self.caches.block_sizes))
            draft_rows = 0 if self._drafter is None else min(num_tokens, self._most_rows)
            adapters = self.adapters is not None
            types = self._programs.takes_token_types
            block = images.tokens_of_block(self.config.model_config) if has_images else 0
            axes = mrope.AXES if has_images and self._mrope else 1
            self._layouts[key] = StepLayout(
                num_tokens, max_seqs, groups, pages, draft_rows, adapters, types, has_images, block, axes
            )
        return self._layouts[key]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def warm_up(self) -> None:
        """Compiles every program that a step may need, and runs each once on padding, which stores nothing."""
        start, compiled = time.perf_counter(), compilations()
        with compiled_together(Options.of(self.config).compile_threads):
            self.tables.compile()
            if self.adapters is not None:
                self.adapters.layers.compile()
            if self.images is not None:
                self.images.compile()
            for num_tokens in buckets.compile_order(self.token_buckets, self._most_rows):
                began = time.perf_counter()
                self._compile(self.layout(num_tokens))
                if num_tokens in self.image_buckets:
                    self._compile(self.layout(num_tokens, has_images=True))
                logger.info("Steps of %d tokens: captured in %.1f s", num_tokens, time.perf_counter() - began)
        if self.adapters is not None:
            self.adapters.layers.start()
        if self.images is not None:
            self.images.start()
        sizes = [(size, has) for has, of in ((True, self.image_buckets), (False, self.token_buckets)) for size in of]
        for num_tokens, has_images in reversed(sizes):
            layout = self.layout(num_tokens, has_images)
            self._wait_for(layout, layout.empty(self._max_seqs, self.tables.unused_entry)[0])
        self.compiled = compilations()
        logger.info(
            "Warm-up took %.1f s: %d programs, %d of them from the cache, for steps of %s tokens",
            time.perf_counter() - start,
            self.compiled - compiled,
            xg.executable_cache_info().loaded,
            ", ".join(map(str, self.token_buckets)),
        )

    def _wait_for(self, layout: StepLayout, packed: npt.NDArray[np.int32]) -> None:
        """Runs the model's program of ``layout``, and waits for its end."""
        greedy, _, _, for_head = self._launch(layout, packed)
        greedy.tokens.cpu()
        if for_head is not None and isinstance(self._drafter, HeadDrafter):
            self._drafter.warm_up(for_head, greedy.tokens)

    def _compile(self, layout: StepLayout) -> None:
        """Compiles what steps of one layout need, where no layout before needed it too."""
        model = self.config.model_config
        _, _, ((rows, vocab_size), logits_dtype), *states = self._programs.compile(layout, self._last_tokens)
        if self._sampler is None:
            options = SamplerOptions(
                max_seqs=self._max_seqs,
                vocab_size=vocab_size,
                logits_dtype=logits_dtype,
                max_logprobs=vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size),
                logprobs_mode=model.logprobs_mode,
            )
            self._sampler = Sampler(options, self.device)
            self._sampler.compile_load()
            raw_logits = model.logprobs_mode.endswith("logits")
            self._prompts = PromptPrograms(
                self._programs, self._max_tokens, options.max_logprobs, raw_logits, self.device
            )
        self._prompts.compile(states)
        if not self._sampler.has_programs(rows):
            self._sampler.compile(rows)
        if isinstance(self._drafter, HeadDrafter):
            self._drafter.compile(layout, rows)

    def supported_tasks(self) -> tuple[str, ...]:
        """Of vLLM's tasks."""
        return ("generate",)

    # ---- Steps -------------------------------------------------------------------------------------------------------

    # These two run without torch.no_grad, which costs 10 us each time: the worker has turned gradients off.

    def execute_model(self, scheduled: Any) -> Any:
        """Launches the model for a SchedulerOutput. Returns None: sample_tokens is to follow."""
        assert self._sampler is not None
        for request in self.requests.update(scheduled):
            known = self.requests.known[request.slot]
            self._sampler.admit(request, self.requests.token_ids[request.slot, :known])
        if self.images is not None:
            self.images.update(scheduled, self.requests)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = self.requests.batch(scheduled)
        total = scheduled.total_num_scheduled_tokens
        drafts, drafted = None, scheduled.scheduled_spec_decode_tokens
        decodes = total == len(batch.slots) and not drafted  # one token of each request
        counts = batch.ones if decodes else self._counts(scheduled)
        of_images = None if self.images is None else self.images.of_step(batch, counts, self.requests)
        failed = frozenset() if self.adapters is None else self._give_adapters(self.adapters, batch)
        sizes = self.token_buckets if of_images is None else self.image_buckets
        layout = self.layout(buckets.next_bucket(sizes, total), of_images is not None)
        previous = self._last_tokens
        if self._drafter is not None:
            drafts = self._drafter.begin(batch, drafted)
        if decodes and of_images is None:
            if (ahead := self.ahead.take(batch)) is not None:
                self._launched = dataclasses.replace(ahead, drafts=drafts, failed=failed)
                return None
            packed = self._packer.decode(layout, batch)
        else:
            self.ahead.drop()
            draft_rows = None if drafts is None else drafts.step_rows(counts)
            packed = self._packer.pack(layout, batch, counts, draft_rows, of_images)
        launched = self._launch(layout, packed)
        self._launched = Launched(batch, counts, previous, *launched, drafts, failed)
        return None

    def _counts(self, scheduled: Any) -> npt.NDArray[np.int32]:
        return np.fromiter(scheduled.num_scheduled_tokens.values(), np.int32, len(scheduled.num_scheduled_tokens))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Chooses the tokens of the step launched last; grammar_output: a GrammarOutput of vLLM, or None."""
        if self._launched is None or self._sampler is None:
            return None
        step, self._launched = self._launched, None
        batch, counts, table, drafts = step.batch, step.counts, self.requests, step.drafts
        slots = batch.slots
        lengths = table.num_tokens[slots]
        drafted = 0 if drafts is None else drafts.num_drafts
        sampled = table.num_computed[slots] + counts == lengths + drafted
        grammar = {}
        if grammar_output is not None:
            req_ids, bitmask = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            if drafts is not None:
                grammar = drafts.grammar(req_ids, bitmask, sampled)
            else:
                row_of = {request.req_id: row for row, request in enumerate(batch.requests)}
                rows = ((row_of.get(req_id), words) for req_id, words in zip(req_ids, bitmask, strict=False))
                grammar = {row: words for row, words in rows if row is not None and sampled[row]}
        if batch is not self._flagged[0]:
            self._flagged = batch, self._sampler.parameters.flagged(slots)
        flags, chosen = self._flagged[1], step.greedy
        if flags or grammar:
            by_row = batch, flags, sampled, lengths - table.num_prompt[slots]
            before = None
            if drafts is not None:
                by_row = drafts.by_row(*by_row[1:])
                before = drafts.before() if "edited" in flags else None
            chosen = self._sampler.sample(
                *by_row, step.greedy, step.previous_tokens, step.logits, grammar=grammar, drafts=before
            )
            self._last_tokens = chosen.last_tokens
        prompts = []
        if "prompt_logprobs" in flags:
            prompts = self._prompt_logprobs(batch, np.flatnonzero(flags["prompt_logprobs"]), counts, step.states)
        if drafts is not None and self._drafter is not None:
            if step.for_head is not None and isinstance(self._drafter, HeadDrafter):
                self._drafter.launch(step.for_head, batch, counts, drafts, sampled, chosen.tokens)
            verified = DraftOutput(drafts, sampled, chosen.tokens, chosen.logprobs, prompts, step.failed)
            # Where a prompt is read further, the next token is the prompt's.
            decodes = counts is batch.ones and bool(sampled.all())
            if grammar_output is None and decodes and self._drafter.quiet_steps >= QUIET_STEPS:
                self._launch_ahead(batch)
            result = verified.get_output()
            self._drafter.finish(verified)
            return result
        table.num_tokens[slots[sampled]] += 1
        with_token = np.flatnonzero(sampled).tolist()
        output = StepOutput(batch.requests, with_token, chosen.tokens, chosen.logprobs, prompts, step.failed)
        return output if self._asynchronous else output.get_output()

    def take_draft_token_ids(self) -> Any:
        """The drafts of the next step's tokens, vLLM's DraftTokenIds, or None."""
        return None if self._drafter is None else self._drafter.take()

    def _launch_ahead(self, batch: Batch) -> None:
        """Launches the step after the one whose tokens are computed now, if it can follow."""
        layout = self.layout(buckets.next_bucket(self.token_buckets, len(batch.slots)))
        if self.ahead.can_follow(batch) and self._packer.can_decode_next(layout, batch):
            previous = self._last_tokens
            launched = self._launch(layout, self._packer.decode_next(layout, batch))
            self.ahead.keep(batch, Launched(batch, batch.ones, previous, *launched))

    def _give_adapters(self, adapters: Adapters, batch: Batch) -> frozenset[str]:
        """Notes which slots the adapters of a step's requests have; returns the requests whose adapter failed."""
        from . import lora

        known, changes, failed = self._with_adapters
        if known is not batch or changes != adapters.changes:
            slots = np.asarray(adapters.slots([request.adapter for request in batch.requests]), np.int32)
            failed = frozenset(batch.requests[row].req_id for row in np.flatnonzero(slots == lora.FAILED))
            self.requests.adapters[batch.slots] = np.maximum(slots, lora.NO_ADAPTER)
            self._with_adapters = batch, adapters.changes, failed
        return failed

    def _launch(
        self, layout: StepLayout, packed: npt.NDArray[np.int32]
    ) -> tuple[Sampled, torch.Tensor, list[torch.Tensor], StepOfHead | None]:
        tokens, last_tokens, logits, states, for_head = self._programs.launch(layout, packed, self._last_tokens)
        self._last_tokens = last_tokens
        read = None if for_head is None else StepOfHead(layout, packed, for_head)
        return Sampled(tokens, last_tokens, None), logits, states, read

    def _prompt_logprobs(
        self, batch: Batch, rows: npt.NDArray[np.int_], counts: npt.NDArray[np.int32], states: list[torch.Tensor]
    ) -> list[PromptLogprobs]:
        found = []
        ends = np.cumsum(counts)
        for index in rows.tolist():
            request, count = batch.requests[index], int(counts[index])
            first, start = int(ends[index]) - count, int(self.requests.num_computed[request.slot])
            # The last token of the prompt predicts a token that is not the prompt's: a step may end just before it.
            num_rows = max(0, min(start + count, request.num_prompt - 1) - start)
            # VLLM takes them with a sampled token alone, and once; a request that was preempted reads its prompt again.
            complete = start + count >= request.num_prompt
            if request.prompt_is_scored or request.num_prompt == 1:
                continue
            request.prompt_is_scored = complete
            parts = []
            for begin in range(0, num_rows, self._prompts.rows):
                size = min(self._prompts.rows, num_rows - begin)
                packed = np.zeros((2, self._prompts.rows), np.int32)
                packed[0, :size] = np.arange(first + begin, first + begin + size)
                packed[1, :size] = request.prompt_token_ids[start + begin + 1 : start + begin + 1 + size]
                parts.append(self._prompts.launch(states, packed.reshape(-1)))
            found.append(PromptLogprobs(request, start, parts, num_rows, complete))
        return found
