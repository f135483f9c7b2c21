"""Runs a scheduler's steps on a torch_xla device: one compiled program per layout, one step always in flight."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as metrics

from .batch import StepLayout
from .model import PagedLlama
from .scheduler import Scheduler, Step, run


@dataclasses.dataclass
class Phase:
    """The steps of one layout. Seconds are the host's, from one step's tokens to the next one's."""

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0  # stored
    new_tokens: int = 0  # generated

    def add(self, step: Step, new: int, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.prompt_tokens += step.prompt_tokens
        self.new_tokens += new


@dataclasses.dataclass
class Figures:
    """What a run measured."""

    seconds: float = 0.0
    mixed: Phase = dataclasses.field(default_factory=Phase)
    decode: Phase = dataclasses.field(default_factory=Phase)

    @property
    def new_tokens(self) -> int:
        return self.mixed.new_tokens + self.decode.new_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.mixed.prompt_tokens + self.decode.prompt_tokens

    def rates(self) -> dict[str, float]:
        """Tokens per second: prompt tokens in the mixed steps, new ones in the steps that only decode, and overall."""
        return {
            "prefill_tokens_per_second": _rate(self.mixed.prompt_tokens, self.mixed.seconds),
            "decode_tokens_per_second": _rate(self.decode.new_tokens, self.decode.seconds),
            "tokens_per_second": _rate(self.new_tokens, self.seconds),
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def compilations() -> int:
    """How many programs XLA has compiled in this process.

    NOTE: the counter UncachedCompile does not do: torch.compile's bridge clears all counters while it traces.
    """
    timed = metrics.metric_data("CompileTime")
    return timed[0] if timed else 0


class Engine:
    """Holds the cache and the compiled steps of a model on `device`."""

    def __init__(self, model: PagedLlama, scheduler: Scheduler, device: torch.device):
        config, allocator = model.config, scheduler.allocator
        shape = (allocator.num_pages, scheduler.page_size, 2 * config.num_kv_heads, config.head_dim)
        dtype = model.embed.weight.dtype
        self.scheduler = scheduler
        self._device = device
        self._model = model
        self._caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._previous = torch.zeros(scheduler.mixed.max_seqs, dtype=torch.int32, device=device)
        torch_xla.sync()
        # dynamic=False: a second layout means a second program, not one with symbolic sizes.
        self._step = torch.compile(model, backend="openxla", fullgraph=True, dynamic=False)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles the program of each layout by running it on padding, which leaves the cache as it is."""
        for layout in self.scheduler.layouts:
            self._launch(layout, layout.empty())
        self._previous.cpu()

    @torch.no_grad()
    def run(self, on_tokens: Callable[[int, int], None] = lambda prompt, new: None) -> Figures:
        """Serves until all requests of the scheduler are finished.

        on_tokens: told after each step how many prompt tokens were stored and how many new tokens came out.
        Raises RuntimeError if anything was compiled in the meantime.
        """
        compiled = compilations()
        figures = Figures()
        start = last = time.perf_counter()
        # Reading waits for that step alone; the one launched after it keeps the device busy meanwhile.
        for step, new in run(self.scheduler, self._launch_step, lambda chosen: chosen.cpu().tolist()):
            now = time.perf_counter()
            (figures.mixed if step.mixed else figures.decode).add(step, new, now - last)
            last = now
            on_tokens(step.prompt_tokens, new)
        figures.seconds = last - start
        if compilations() != compiled:
            raise RuntimeError(f"{compilations() - compiled} programs were compiled after the warm-up")
        return figures

    def _launch_step(self, step: Step) -> torch.Tensor:
        return self._launch(step.layout, step.packed)

    def _launch(self, layout: StepLayout, packed: np.ndarray) -> torch.Tensor:
        packed = torch.from_numpy(packed).to(self._device)
        self._previous = self._step(packed, self._previous, self._caches, layout)
        return self._previous
