"""The model's programs: one per number of tokens of a step, from the packed batch to tokens and logits."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from . import draft_heads, eagle, layer_operators, tensor_parallel
from .attention import BatchMetadata, StepMetadata
from .block_tables import BlockTables
from .buckets import logits_rows, most_rows
from .image_attention import ImageBlocks
from .kv_cache import KVCaches
from .last_layer import LastLayer
from .norms import NormWeights
from .program import Program
from .residual_streams import ResidualStreams
from .sampler.sampler import store_last_tokens
from .step_layout import StepLayout

if TYPE_CHECKING:
    from .image_rows import ImageRows
    from .lora_layers import LoraLayers

# Of longer steps XLA takes cuBLASLt's kernels alone for matrix products. Triton's are dozens for each product, which it
# compiles and times, and which make steps of more tokens no faster.
TRITON_TOKENS = 64
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


class ModelPrograms:
    """``launch(layout, packed, last_tokens)`` returns tokens, last tokens, logits and the rows' states of a step."""

    def __init__(
        self,
        config: VllmConfig,
        model: nn.Module,
        caches: KVCaches,
        tables: BlockTables,
        device: Any,
        adapters: LoraLayers | None = None,
        images: ImageRows | None = None,
    ) -> None:
        """adapters: where the model's layers have LoRA adapters. images: where prompts may have images."""
        self._config = config
        self._model = model
        self._caches = caches
        self._tables = tables
        self._device = device
        self._adapters = adapters
        self._images = images
        # A program over several devices takes its parameters as they are.
        divided = tensor_parallel.active() is not None
        self._norms = None if divided else NormWeights(model, layer_operators.own_norms(model))
        # Over several devices the rows of attention, which the program returns, would have to be gathered. With
        # adapters the chosen rows would need their own.
        self._last_layer = None if divided or adapters is not None else LastLayer.of(model)
        layers = eagle.stream_layers(config, model)
        self._streams = ResidualStreams(model, layers) if layers else None
        self._states_are_read = draft_heads.has_head(config)
        if self._states_are_read and self._streams is None:  # by the head, which needs the result of every row
            self._last_layer = None
        # A program takes and returns what it stores in: not the caches that the head's layers alone use.
        self._stored: Sequence[int] = range(len(caches.tensors))
        if self._states_are_read:
            self._stored = caches.indices_of(attention_names(model))
        self._programs: dict[StepLayout, Program] = {}
        parameters = inspect.signature(model.forward).parameters
        # Which text of a pair a token is of.
        self.takes_token_types = "token_type_ids" in parameters
        # Some of vLLM's models have no default for what pipeline stages hand on.
        needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
        self._unused: dict[str, None] = dict.fromkeys(needed & {"intermediate_tensors"})

    def compile(self, layout: StepLayout, last_tokens: torch.Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """Compiles the program of ``layout``; returns shape and dtype of its results, see ``launch``."""
        self._caches.bind()
        unused_slot = self._tables.shape[1] - 1
        packed = torch.from_numpy(layout.empty(unused_slot, self._tables.unused_entry)[0]).to(self._device)

        lasting = self._lasting(layout)
        num, adapters = len(lasting), 0 if self._adapters is None else len(self._adapters.tensors)

        def step(packed: torch.Tensor, last: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
            with self._norm_weights(layout.num_tokens), self._with_adapters(layout, packed, others[:adapters]):
                image_rows = others[adapters] if layout.has_images else None
                return self._step(layout, packed, last, others[num], image_rows)

        program = self._programs[layout] = Program(
            f"model, {layout.num_tokens} tokens{' and images' if layout.has_images else ''}",
            step,
            [packed, last_tokens, *lasting],
            self._state(),
            WITHOUT_TRITON if layout.num_tokens > TRITON_TOKENS else {},
            lasting=range(2, 2 + num),
        )
        return program.outputs[: len(program.outputs) - (self._streams is not None)]

    def launch(
        self, layout: StepLayout, packed: torch.Tensor, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """Runs a step.

        Returns:
          tokens int32[logits_rows], the most likely ones; last_tokens int32[max_seqs + 1] with them; logits
          T[logits_rows, vocab_size] of each sequence's last row, or of draft_rows where the layout has them: then
          last_tokens has a meaning after steps without drafts alone; the states of all rows, from which PromptPrograms
          computes other logits; what a head that drafts reads of all rows, or None.
        """
        tokens, last_tokens, logits, *states = self._run(layout, packed, last_tokens)
        for_head = None
        if self._states_are_read:
            for_head = states[0] if self._streams is None else states.pop()
        return tokens, last_tokens, logits, states, for_head

    def _run(self, layout: StepLayout, packed: torch.Tensor, last_tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        """The results of ``_step``."""
        given = [packed, last_tokens, *self._lasting(layout)]
        outputs, (tables, *caches) = self._programs[layout](given, self._state())
        self._tables.device_tables = tables
        self._caches.replace(self._stored, caches)
        return outputs

    def _lasting(self, layout: StepLayout) -> list[torch.Tensor]:
        """What steps read beside their own arrays: the adapters, and the rows of images."""
        found = [] if self._adapters is None else list(self._adapters.tensors)
        if layout.has_images and self._images is not None:
            found.append(self._images.rows)
        return found

    def _state(self) -> list[torch.Tensor]:
        return [self._tables.device_tables, *(self._caches.tensors[index] for index in self._stored)]

    def _step(
        self,
        layout: StepLayout,
        packed: torch.Tensor,
        last_tokens: torch.Tensor,
        tables: torch.Tensor,
        image_rows: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        parts = layout.unpack(packed)
        slots, starts = parts["request_slots"], parts["query_start_loc"]
        chosen_rows = parts["draft_rows"] if layout.max_draft_rows else (starts[1:] - 1).clamp(min=0)

        def choose(rows: torch.Tensor) -> torch.Tensor:
            return rows.index_select(0, chosen_rows)

        # Where logits are computed of every row, there is nothing to leave out.
        last_layer = self._last_layer if layout.num_tokens > layout.logits_rows else None
        streams = contextlib.nullcontext() if self._streams is None else self._streams.noted()
        rows_of_last = contextlib.nullcontext() if last_layer is None else last_layer.rows(choose, choose)
        with streams as noted, rows_of_last as found:
            hidden = self._hidden(layout, parts, last_tokens, tables, image_rows)
        states = [hidden] if found is None else [found.attended, found.residual]
        if noted is not None:
            states.append(torch.cat(noted, -1))
        logits = self._model.compute_logits(choose(hidden) if found is None else hidden)
        devices = tensor_parallel.active()
        divided = devices is not None and devices.logits_dim is not None
        tokens = devices.most_likely(logits) if devices and divided else logits.argmax(-1).to(torch.int32)
        # Where rows verify drafts, these are not each sequence's last tokens, and the host knows all.
        last_tokens = store_last_tokens(last_tokens, slots, tokens[: layout.max_seqs])
        rows = logits_rows(layout.logits_rows, most_rows(self._config))
        if (padding := rows - layout.logits_rows) > 0:
            tokens = torch.cat([tokens, tokens.new_zeros(padding)])
            logits = torch.cat([logits, logits.new_zeros(padding, logits.shape[1])])
        if devices and divided:  # most steps need no others: programs that do gather them
            devices.mark(logits, devices.logits_dim)
        return [tokens, last_tokens, logits, *states]

    def _hidden(
        self,
        layout: StepLayout,
        parts: dict[str, Any],
        last_tokens: torch.Tensor,
        tables: torch.Tensor,
        image_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The model's result for the rows of a step; the new entries of the block tables are stored before.

        image_rows: of all images, in a layout that has images.
        """
        sources = parts["sources"]
        ids = torch.where(sources < 0, parts["tokens"], last_tokens.index_select(0, sources.clamp(min=0)))
        tables.index_put_((parts["update_indices"],), parts["update_pages"])
        groups = step_metadata(parts, tables.view(self._tables.shape), layout.image_tokens) if layout.num_groups else []
        batch = BatchMetadata(parts["query_start_loc"], parts["num_seqs"])
        others: dict[str, Any] = {"token_type_ids": parts["token_types"]} if layout.has_token_types else {}
        with forward(self._config, layout.num_tokens, self._caches.metadata(groups, batch)):
            model = self._model
            if image_rows is not None:
                others["inputs_embeds"], added = self._embedded(ids, parts["image_rows"], image_rows)
                if added:  # which vLLM hands to the model below its head
                    model = self._model.model
                    others["deepstack_input_embeds"] = {
                        f"deepstack_input_embeds_{layer}": rows for layer, rows in enumerate(added)
                    }
            # RoBERTa's positions are changed in place.
            hidden: torch.Tensor = model(input_ids=ids, positions=parts["positions"].clone(), **others, **self._unused)
        return hidden

    def _embedded(
        self, ids: torch.Tensor, chosen: torch.Tensor, image_rows: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """T[num_tokens, hidden_size]: of each row the embedding of its token, or the row of an image.

        And what the first layers add to it: zeros, or what the encoder made for each.
        """
        embedded: torch.Tensor = self._model.embed_input_ids(ids)
        of_images = image_rows.index_select(0, chosen.clamp(min=0)).to(embedded.dtype)
        is_image, width = (chosen >= 0)[:, None], embedded.shape[1]
        streams = [of_images[:, at : at + width] for at in range(0, of_images.shape[1], width)]
        return torch.where(is_image, streams[0], embedded), [torch.where(is_image, rows, 0.0) for rows in streams[1:]]

    def logits(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits of rows from their states, as a step returns them. For tracing."""
        if len(states) == 1:
            logits = self._model.compute_logits(states[0])
            devices = tensor_parallel.active()
            return logits if devices is None else devices.gather(logits)
        attended, residual = states
        unused = torch.zeros(attended.shape[0], dtype=torch.int32, device=attended.device)
        assert self._last_layer is not None
        # What stands before these states in the model is traced too, without caches, and no result needs it.
        with (
            forward(self._config, attended.shape[0], None),
            self._last_layer.rows(lambda _: attended, lambda _: residual),
            self._norm_weights(attended.shape[0]),
        ):
            return self._model.compute_logits(self._model(input_ids=unused, positions=unused))

    def _norm_weights(self, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Slices of one array for XLA's norms, which read them as they are; this library's would have them copied."""
        if self._norms is None or num_tokens >= layer_operators.MIN_ROWS:
            return contextlib.nullcontext()
        return self._norms.sliced()

    def _with_adapters(
        self, layout: StepLayout, packed: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        if self._adapters is None:
            return contextlib.nullcontext()
        return self._adapters.applied(tensors, layout.unpack(packed)["adapters"])


def attention_names(model: nn.Module) -> list[str]:
    """What vLLM calls the model's attention layers."""
    return [module.layer_name for module in model.modules() if isinstance(module, AttentionLayerBase)]


def step_metadata(parts: dict[str, Any], tables: torch.Tensor, image_tokens: int = 0) -> list[StepMetadata]:
    """What attention needs of a step, for each KV-cache group; tables: of all request slots.

    image_tokens: the layout's.
    """
    blocks = ImageBlocks(parts["image_runs"], image_tokens) if image_tokens else None
    return [
        StepMetadata(
            slot_mapping=slot_mapping,
            context_lens=parts["context_lens"],
            block_tables=tables[group].index_select(0, parts["request_slots"]),
            query_start_loc=parts["query_start_loc"],
            num_seqs=parts["num_seqs"],
            blocks=blocks,
        )
        for group, slot_mapping in enumerate(parts["slot_mapping"])
    ]


@contextlib.contextmanager
def forward(config: VllmConfig, num_tokens: int, metadata: Mapping[str, BatchMetadata] | None) -> Iterator[None]:
    """The context that vLLM's models are called in.

    Parts of some are torch.compile functions, which are traced with the rest: inductor knows no XLA tensors.
    """
    # vLLM would ask the other data-parallel engines for their numbers. The models share nothing.
    engines = config.parallel_config.data_parallel_size
    tokens_of_engines = torch.full((engines,), num_tokens, dtype=torch.int32, device="cpu")
    context = set_forward_context(metadata, config, num_tokens=num_tokens, num_tokens_across_dp=tokens_of_engines)
    with torch.compiler.set_stance("force_eager"), context:
        yield


class PromptPrograms:
    """Log-probabilities of a prompt's tokens: rows of a step's states are chosen first, then scored, some at a time."""

    MAX_ROWS = 128

    def __init__(self, programs: ModelPrograms, max_tokens: int, max_logprobs: int, raw_logits: bool, device: Any):
        self.rows = min(self.MAX_ROWS, max_tokens)
        self._programs = programs
        self._max_logprobs = max_logprobs
        self._raw_logits = raw_logits
        self._device = device
        self._choose: dict[int, Program] = {}
        self._score: dict[int, Program] = {}  # by the number of arrays that hold a row's state

    def compile(self, forms: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        """Compiles what steps need whose states have these shapes and dtypes."""
        from .sampler import logprobs

        packed = torch.zeros(2 * self.rows, dtype=torch.int32).to(self._device)

        def zeros(num_rows: int | None = None) -> list[torch.Tensor]:
            shapes = [shape if num_rows is None else (num_rows, *shape[1:]) for shape, _ in forms]
            pairs = zip(shapes, forms, strict=True)
            return [torch.zeros(shape, dtype=dtype).to(self._device) for shape, (_, dtype) in pairs]

        def choose(packed: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
            return [state.index_select(0, packed[: self.rows]) for state in states]

        def score(packed: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
            logits = self._programs.logits(states).float()
            scores = logits if self._raw_logits else logits.log_softmax(-1)
            return list(logprobs.gather(scores, packed[self.rows :], self._max_logprobs))

        num_tokens = forms[0][0][0]
        if num_tokens in self._choose:  # steps with images have states of the same form
            return
        self._choose[num_tokens] = Program(f"prompt rows, {num_tokens} tokens", choose, [packed, *zeros()])
        if len(forms) not in self._score:
            self._score[len(forms)] = Program("prompt logprobs", score, [packed, *zeros(self.rows)])

    def launch(
        self, states: Sequence[torch.Tensor], packed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(token ids, scores, ranks) of rows; packed: int32[2 * rows], rows of ``states`` and the tokens after them."""
        chosen, _ = self._choose[states[0].shape[0]]([packed, *states])
        ids, scores, ranks = self._score[len(states)]([packed, *chosen])[0]
        return ids, scores, ranks
