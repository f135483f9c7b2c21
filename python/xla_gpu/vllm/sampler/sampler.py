"""Chooses the next tokens from logits: programs per number of rows, of which a step runs those that its requests need.

| program | runs for | takes |
|---|---|---|
| random | temperature, top-k, top-p, min-p, seeds: this library's `sample` | logits |
| edit | any of the next; again where there are more edits than one call takes | logits, edits |
| full | penalties, token masks and biases, structured output, and all of the above | edited logits |
| logprobs | requests that ask for log-probabilities | logits, chosen tokens |

A step of greedy requests alone runs none: the model's own program takes the most likely tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

import xla_gpu.torch as xg

from .. import tensor_parallel
from ..program import Program
from ..requests import Batch, Request
from . import edits, logprobs, masks, parameters, penalties, truncation

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """Sizes that are fixed at start.

    Attributes:
      logprobs_mode: vLLM's: raw_logprobs, raw_logits, processed_logprobs or processed_logits.
    """

    max_seqs: int
    vocab_size: int
    logits_dtype: torch.dtype
    max_logprobs: int
    logprobs_mode: str


@dataclasses.dataclass
class Sampled:
    """What a step chose, on the device: tokens int32[rows] and each request's last token by slot."""

    tokens: torch.Tensor
    last_tokens: torch.Tensor
    logprobs: Logprobs | None


class Sampler:
    """The programs of one engine, and the penalties' counts."""

    def __init__(self, options: SamplerOptions, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._programs: dict[tuple[str, int], Program] = {}
        self._all_allowed: dict[int, torch.Tensor] = {}
        self.counts = torch.zeros((options.max_seqs + 1, options.vocab_size), dtype=torch.int32, device=device)
        self._load: Program | None = None
        self.parameters = parameters.SlotParameters(options.max_seqs, options.vocab_size)

    # ---- Programs ----------------------------------------------------------------------------------------------------

    def has_programs(self, rows: int) -> bool:
        """Whether the programs for ``rows`` rows of logits are compiled."""
        return ("full", rows) in self._programs

    def compile(self, rows: int) -> None:
        """Compiles the programs for ``rows`` rows of logits."""
        options, device = self._options, self._device
        shape = (rows, options.vocab_size)
        # Copied: to be filled on the device they would need programs of their own.
        logits = torch.zeros(shape, dtype=options.logits_dtype).to(device)
        devices = tensor_parallel.active()
        if devices is not None:
            devices.mark(logits, devices.logits_dim)
        wide = torch.zeros(shape, dtype=torch.float32).to(device)
        params = [torch.from_numpy(array).to(device) for array in parameters.empty(rows)]
        edit = [torch.from_numpy(array).to(device) for array in edits.pack([], 0)[0]]
        last = torch.zeros(options.max_seqs + 1, dtype=torch.int32).to(device)
        tokens = torch.zeros(rows, dtype=torch.int32).to(device)
        mask = torch.zeros((rows, masks.words(options.vocab_size)), dtype=torch.int32).to(device)
        self._all_allowed[rows] = torch.from_numpy(masks.all_allowed(rows, options.vocab_size)).to(device)
        functions = self._functions(rows, devices)

        def add(name: str, inputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor] = ()) -> None:
            self._programs[name, rows] = Program(f"sampler: {name}, {rows} rows", functions[name], inputs, state)

        add("random", [logits, *params, last])
        add("edit", [logits, *edit, *params, last])
        if options.logits_dtype == torch.float32 and devices is None:
            self._programs["edit again", rows] = self._programs["edit", rows]
        else:
            add("edit again", [wide, *edit, *params, last])
        add("full", [wide, mask, *params, last], [self.counts])
        add("logprobs", [wide, tokens] if self._returns_processed else [logits, mask, tokens])

    def _functions(
        self, rows: int, devices: tensor_parallel.TensorParallel | None
    ) -> dict[str, Callable[..., list[torch.Tensor]]]:
        """What the programs for ``rows`` rows of logits compute, by their names."""
        options = self._options

        def whole(logits: torch.Tensor) -> torch.Tensor:
            return logits if devices is None else devices.gather(logits)

        def random(logits: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
            floats, integers, last = rest
            return self._draw(whole(logits), parameters.unpack(floats, integers, rows), last)

        def full(logits: torch.Tensor, mask: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
            floats, integers, last, counts = rest
            fields = parameters.unpack(floats, integers, rows)
            logits = masks.apply(logits, mask)
            sampled = counts.index_select(0, fields["counted_slot"])
            logits = penalties.apply(logits, sampled, fields["repetition"], fields["frequency"], fields["presence"])
            results = self._draw(logits, fields, last)
            penalties.count(counts, fields["counted_slot"], results[0])
            return results

        def edited(logits: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
            return edited_again(whole(logits), *rest)

        def edited_again(logits: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
            places, values, floats, integers, last = rest
            last_tokens = last.index_select(0, parameters.unpack(floats, integers, rows)["slot"])
            return [edits.apply(logits, places, values, last_tokens)]

        def scores(logits: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
            return list(
                logprobs.gather(self._raw(masks.apply(whole(logits).float(), mask)), tokens, options.max_logprobs)
            )

        def processed(values: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
            return list(logprobs.gather(values, tokens, options.max_logprobs))

        chosen = processed if self._returns_processed else scores
        return {"random": random, "edit": edited, "edit again": edited_again, "full": full, "logprobs": chosen}

    def compile_load(self) -> None:
        """Compiles the program that makes a request's row of counts."""
        packed = torch.zeros(2 + 2 * penalties.MAX_ENTRIES, dtype=torch.int32, device=self._device)
        self._load = Program("sampler: penalties' counts", penalties.load, [packed], [self.counts])

    @property
    def _returns_processed(self) -> bool:
        return self._options.logprobs_mode.startswith("processed")

    def _raw(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1) if self._options.logprobs_mode.endswith("logprobs") else logits

    def _draw(self, logits: torch.Tensor, fields: dict[str, torch.Tensor], last: torch.Tensor) -> list[torch.Tensor]:
        """Tokens and last tokens, and the processed scores where requested."""
        temperature, top_k, top_p, min_p = (fields[name] for name in ("temperature", "top_k", "top_p", "min_p"))
        # Not <<, so that the halves, of which the lower one has no sign, add up in 64 bits.
        seed = fields["seed_high"].to(torch.int64) * 2**32 + (fields["seed_low"].to(torch.int64) & 0xFFFFFFFF)
        tokens, _ = xg.sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            step=fields["number"],
        )
        # A row without a likely token, of NaN for example, has -1, with which no tokenizer can do anything.
        tokens = tokens.clamp(min=0)
        results = [tokens, store_last_tokens(last, fields["slot"], tokens)]
        if not self._returns_processed:
            return results
        divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
        kept = truncation.truncate(logits.float() / divisor[:, None], min_p, top_k, top_p)
        return [*results, self._raw(kept)]

    # ---- Steps -------------------------------------------------------------------------------------------------------

    def admit(self, request: Request, token_ids: npt.NDArray[np.int32]) -> None:
        """Notes the parameters of a request that got its slot, and makes its row of counts where it has penalties."""
        self.parameters.store(request.slot, request.params, request.sampling)
        if not request.sampling.penalised:
            return
        if self._load is None:
            self.compile_load()
        assert self._load is not None
        tokens, values = penalties.history(token_ids, request.num_prompt)
        for begin in range(0, len(tokens), penalties.MAX_ENTRIES):
            part = slice(begin, begin + penalties.MAX_ENTRIES)
            packed = np.empty(2 + 2 * penalties.MAX_ENTRIES, np.int32)
            packed[0], packed[1] = request.slot, begin == 0
            for at, entries in ((0, tokens[part]), (penalties.MAX_ENTRIES, values[part])):
                packed[2 + at : 2 + at + penalties.MAX_ENTRIES] = entries[0]
                packed[2 + at : 2 + at + len(entries)] = entries
            _, (self.counts,) = self._load([packed], [self.counts])

    def sample(
        self,
        batch: Batch,
        flags: dict[str, npt.NDArray[np.bool_]],
        sampled: npt.NDArray[np.bool_],
        numbers: npt.NDArray[np.int32],
        greedy: Sampled,
        previous_tokens: torch.Tensor,
        logits: torch.Tensor,
        grammar: dict[int, masks.Bitmask],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Sampled:
        """The tokens of a step.

        Args:
          batch: of the step; where it verifies drafts, row by row, as all that is of each request.
          flags: of its requests, as SlotParameters.flagged found them.
          sampled: of each request, whether the step ends at its last token.
          numbers: of each request, how many tokens it has sampled before.
          greedy: the most likely tokens, as the model's program took them.
          previous_tokens: int32[max_seqs + 1], each request's last token before this step, by slot.
          logits: T[rows, vocab_size]; rows past the requests have no meaning.
          grammar: by row, the tokens that structured output allows.
          drafts: of each row the tokens before it that the step verifies; None: the step has none, and each request
            one row.
        """
        if not flags and not grammar:
            return greedy
        rows = logits.shape[0]
        none = np.zeros_like(sampled)
        edited, penalised, random, scored = (
            flags.get(name, none) & sampled for name in ("edited", "penalised", "random", "logprobs")
        )
        edit_list, allowed = [], {}
        for row in np.flatnonzero(edited).tolist():
            request = batch.requests[row]
            edit_list += edits.of_request(row, request, int(numbers[row]), None if drafts is None else drafts[row])
            if request.params.allowed_token_ids:
                allowed[row] = request.params.allowed_token_ids
        full = bool(edit_list or allowed or grammar or penalised.any())
        want_logprobs = bool(scored.any())
        result, scores = greedy, None
        if full or random.any() or (want_logprobs and self._returns_processed):
            packed = self.parameters.pack(batch.slots, sampled, numbers, rows)
            params = list(packed)
            if full:
                outputs = self._full(logits, params, greedy.last_tokens, previous_tokens, edit_list, grammar, allowed)
            else:
                outputs, _ = self._programs["random", rows]([logits, *params, greedy.last_tokens])
            result = Sampled(outputs[0], outputs[1], None)
            scores = outputs[2] if self._returns_processed else None
        if want_logprobs:
            inputs = [logits, self._mask(rows, grammar), result.tokens] if scores is None else [scores, result.tokens]
            ids, values, ranks = self._programs["logprobs", rows](inputs)[0]
            result = dataclasses.replace(result, logprobs=(ids, values, ranks))
        return result

    def _full(
        self,
        logits: torch.Tensor,
        params: list[torch.Tensor],
        last_tokens: torch.Tensor,
        previous_tokens: torch.Tensor,
        edit_list: list[edits.Edit],
        grammar: dict[int, masks.Bitmask],
        allowed: dict[int, list[int]],
    ) -> list[torch.Tensor]:
        rows = logits.shape[0]
        for index, packed in enumerate(edits.pack(edit_list, unused_row=rows - 1)):
            program = self._programs["edit" if index == 0 else "edit again", rows]
            (logits,), _ = program([logits, *packed, *params, previous_tokens])
        combined = dict(grammar)
        for row, token_ids in allowed.items():
            only = masks.only(token_ids, self._options.vocab_size)
            combined[row] = combined[row] & only if row in combined else only
        inputs = [logits, self._mask(rows, combined), *params, last_tokens]
        outputs, (self.counts,) = self._programs["full", rows](inputs, [self.counts])
        return outputs

    def _mask(self, rows: int, allowed: dict[int, masks.Bitmask]) -> torch.Tensor | npt.NDArray[np.int32]:
        if not allowed:
            return self._all_allowed[rows]
        bitmask = masks.all_allowed(rows, self._options.vocab_size)
        for row, words in allowed.items():
            bitmask[row] = words[: bitmask.shape[1]]
        return bitmask


def store_last_tokens(last_tokens: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``last_tokens`` int32[max_seqs + 1] with ``tokens`` int32[rows] at ``slots`` int32[rows]."""
    everyone = torch.arange(last_tokens.shape[0], dtype=torch.int32, device=tokens.device)
    here = slots[:, None] == everyone[None, :]
    # Padding rows share the slot that nobody has; the sum over them means nothing there.
    new = torch.where(here, tokens[:, None], torch.zeros_like(tokens)[:, None]).sum(0, dtype=torch.int32)
    return torch.where(here.any(0), new, last_tokens)
