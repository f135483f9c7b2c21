"""Programs of a head that drafts tokens: one for each number of tokens of a step, run behind the model's.

A program reads what the model's step was given and what it drew, and finds on the device which drafts were accepted: it
need not wait for the host. The head reads the rows of the step once, each with the token after it, and then its own
drafts, one token of each sequence at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from . import divided_layers, draft_heads, eagle, tensor_parallel
from .attention import StepMetadata
from .block_tables import BlockTables
from .kv_cache import KVCaches
from .last_layer import LastLayer
from .model_program import TRITON_TOKENS, WITHOUT_TRITON, attention_names, forward, step_metadata
from .program import Program
from .step_layout import Int32Array, StepLayout, unpack


@dataclasses.dataclass(frozen=True)
class DraftLayout:
    """What the host adds to a step's array for its drafts.

    Attributes:
      step: the layout of the model's step.
      num_drafts: tokens of a draft.
    """

    step: StepLayout
    num_drafts: int

    @functools.cached_property
    def fields(self) -> dict[str, int]:
        """Lengths of the parts, in the order in which they stand in the array."""
        return {
            # Of each row of logits:
            "rows": self.step.max_draft_rows,  # its row in the step; past the live ones: num_tokens
            "next": self.step.max_draft_rows,  # the token after it where that is the prompt's; -1: the one that it drew
            # Of each sequence:
            "first": self.step.max_seqs,  # its first row of logits
            "drafts": self.step.max_seqs * self.num_drafts,  # those that the step verifies, -1 behind them
            "limits": self.step.max_seqs,  # the first position that has no page, or at which the head does not draft
        }

    def unpack(self, packed: Any) -> dict[str, Any]:
        """Cuts an array or tensor into its parts, by name; they are views."""
        parts = unpack(packed, self.fields)
        parts["drafts"] = parts["drafts"].reshape(self.step.max_seqs, self.num_drafts)
        return parts

    def empty(self) -> tuple[Int32Array, dict[str, Int32Array]]:
        """The array of a step of padding alone, and its parts."""
        packed = np.zeros(sum(self.fields.values()), np.int32)
        parts = self.unpack(packed)
        parts["rows"][:] = self.step.num_tokens
        parts["next"][:] = -1
        parts["drafts"][:] = -1
        return packed, parts


class DraftPrograms:
    """``launch(layout, packed, more, tokens, states)`` returns the drafts of the next step."""

    def __init__(self, config: VllmConfig, head: Any, caches: KVCaches, tables: BlockTables, device: Any) -> None:
        self._config = config
        self._head = head
        self._caches = caches
        self._tables = tables
        self._device = device
        self._last_layer = LastLayer(draft_heads.last_layer(head))
        self.num_drafts: int = config.speculative_config.num_speculative_tokens
        self.length = draft_heads.head_length(config)
        names = attention_names(head)
        self.groups = caches.groups_of(names)
        self._stored = caches.indices_of(names)
        streams = eagle.NUM_STREAMS if config.speculative_config.method == "eagle3" else 1
        self._state_size = config.model_config.get_hidden_size() * streams
        self._programs: dict[StepLayout, Program] = {}
        self._layouts: dict[StepLayout, DraftLayout] = {}

    def layout(self, step: StepLayout) -> DraftLayout:
        """What is added to steps of ``step``."""
        if step not in self._layouts:
            self._layouts[step] = DraftLayout(step, self.num_drafts)
        return self._layouts[step]

    def compile(self, step: StepLayout, rows: int) -> None:
        """Compiles the program of a step, of whose logits there are ``rows`` rows."""
        self._caches.bind()
        layout = self.layout(step)
        arrays = step.empty(self._tables.shape[1] - 1, self._tables.unused_entry)[0], layout.empty()[0]
        packed, more = (torch.from_numpy(array).to(self._device) for array in arrays)
        tokens = torch.zeros(rows, dtype=torch.int32).to(self._device)
        dtype = self._config.model_config.dtype
        states = torch.zeros((step.num_tokens, self._state_size), dtype=dtype).to(self._device)

        def draft(*given: torch.Tensor) -> list[torch.Tensor]:
            return [self._draft(layout, *given[:5])]

        self._programs[step] = Program(
            f"drafts, {step.num_tokens} tokens",
            draft,
            [packed, more, tokens, states, self._tables.device_tables],
            self._state(),
            WITHOUT_TRITON if step.num_tokens > TRITON_TOKENS else {},
            lasting=[4],
        )

    def launch(
        self, step: StepLayout, packed: Int32Array, more: Int32Array, tokens: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Drafts after a step of the model.

        Args:
          step: its layout.
          packed: its array.
          more: as DraftLayout says.
          tokens: int32[rows], what its rows of logits drew.
          states: T[num_tokens, n], of its rows, as ModelPrograms gives them to a head.

        Returns:
          int32[max_seqs, num_drafts].
        """
        inputs = [packed, more, tokens, states, self._tables.device_tables]
        (drafts,), new = self._programs[step](inputs, self._state())
        self._caches.replace(self._stored, new)
        return drafts

    def _state(self) -> list[torch.Tensor]:
        return [self._caches.tensors[index] for index in self._stored]

    def _draft(
        self,
        layout: DraftLayout,
        packed: torch.Tensor,
        more: torch.Tensor,
        tokens: torch.Tensor,
        states: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor:
        step, parts, own = layout.step, layout.step.unpack(packed), layout.unpack(more)
        drawn = tokens[: step.max_draft_rows]
        by_group = tables.view(self._tables.shape)
        # Of each sequence the step's last row that counts: whose token is not a draft, or comes after the last one.
        each = torch.arange(layout.num_drafts, dtype=torch.int32, device=packed.device)
        verified = (own["first"][:, None] + each).clamp(max=step.max_draft_rows - 1)
        drawn_there = drawn.index_select(0, verified.reshape(-1)).view(step.max_seqs, layout.num_drafts)
        accepted = torch.where(drawn_there == own["drafts"], layout.num_drafts, each).amin(1)
        last = own["rows"].index_select(0, (own["first"] + accepted).clamp(max=step.max_draft_rows - 1))
        last = last.clamp(max=step.num_tokens - 1)

        ids = self._tokens_after(parts, own, drawn)
        hidden, carried = self._read_step(layout, parts, ids, states, by_group, last)
        positions, limits = parts["positions"].index_select(0, last), own["limits"]
        drafts = [self._most_likely(hidden)]
        for _ in range(layout.num_drafts - 1):
            positions = positions + 1
            hidden, carried = self._read_draft(parts, drafts[-1], positions, limits, carried, by_group)
            drafts.append(self._most_likely(hidden))
        return torch.stack(drafts, 1)

    @staticmethod
    def _tokens_after(parts: dict[str, Any], own: dict[str, Any], drawn: torch.Tensor) -> torch.Tensor:
        """int32[num_tokens]: the token after each row, as far as its sequence's rows go on."""
        # One more, where rows of padding store theirs.
        ids = torch.cat([parts["tokens"][1:], torch.zeros_like(parts["tokens"][:2])])
        return ids.index_put((own["rows"],), torch.where(own["next"] < 0, drawn, own["next"]))[: len(ids) - 1]

    def _read_step(
        self,
        layout: DraftLayout,
        parts: dict[str, Any],
        ids: torch.Tensor,
        states: torch.Tensor,
        by_group: torch.Tensor,
        last: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values of all rows of the step; what follows is computed of ``last`` rows alone."""
        step, positions, groups = layout.step, parts["positions"], step_metadata(parts, by_group)
        if self.length < self._config.model_config.max_model_len:
            inside = positions < self.length
            positions = torch.where(inside, positions, 0)
            groups = [
                dataclasses.replace(group, slot_mapping=torch.where(inside, group.slot_mapping, -1)) for group in groups
            ]

        def choose(rows: torch.Tensor) -> torch.Tensor:
            return rows.index_select(0, last)

        fewer = step.num_tokens > step.max_seqs
        of_last = self._last_layer.rows(choose, choose) if fewer else contextlib.nullcontext()
        with of_last, forward(self._config, step.num_tokens, self._caches.metadata(groups)):
            if hasattr(self._head, "combine_hidden_states"):
                states = self._head.combine_hidden_states(states)
            hidden, carried = self._head(input_ids=ids, positions=positions, hidden_states=states)
        return (hidden, carried) if fewer else (choose(hidden), choose(carried))

    def _read_draft(
        self,
        parts: dict[str, Any],
        ids: torch.Tensor,
        positions: torch.Tensor,
        limits: torch.Tensor,
        carried: torch.Tensor,
        by_group: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads a draft of each sequence. Past its limit nothing is stored, and what comes out has no meaning."""
        inside = positions < limits
        positions = torch.where(inside, positions, 0)
        tables = by_group.index_select(1, parts["request_slots"])
        starts = torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device)
        groups = []
        for group, block_size in enumerate(self._caches.block_sizes):
            page = tables[group].gather(1, (positions // block_size).to(torch.int64)[:, None])[:, 0]
            groups.append(
                StepMetadata(
                    slot_mapping=torch.where(inside, page * block_size + positions % block_size, -1),
                    context_lens=positions + 1,
                    block_tables=tables[group],
                    query_start_loc=torch.minimum(starts, parts["num_seqs"]),
                    num_seqs=parts["num_seqs"],
                )
            )
        with forward(self._config, len(ids), self._caches.metadata(groups)):
            hidden, carried = self._head(input_ids=ids, positions=positions, hidden_states=carried)
        return hidden, carried

    def _most_likely(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._head
        logits, devices = head.logits_processor(head.lm_head, hidden), tensor_parallel.active()
        if devices is not None and divided_layers.logits_dim(head.lm_head) is not None:
            tokens = devices.most_likely(logits)
        else:
            tokens = logits.argmax(-1).to(torch.int32)
        offsets = getattr(head, "draft_id_to_target_id", None)
        if offsets is None:
            return tokens
        # Of heads with a vocabulary of their own: how far the model's number of a token is from theirs.
        return tokens + offsets.index_select(0, tokens).to(torch.int32)
