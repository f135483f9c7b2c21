"""Runs a scheduler's steps in JAX: one jitted program per layout with donated caches, one step always in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .batch import StepLayout
from .config import LlamaConfig
from .figures import Figures, serve
from .jax_model import Parameters, forward
from .scheduler import Scheduler, Step

_compiled = 0


def _count(event: str, seconds: float, **_: Any) -> None:
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """How many programs XLA has compiled in this process since this module was imported."""
    return _compiled


class Engine:
    """Holds the parameters, the caches and the compiled steps."""

    def __init__(self, config: LlamaConfig, parameters: Parameters, scheduler: Scheduler):
        shape = (scheduler.allocator.num_pages, scheduler.page_size, 2 * config.num_kv_heads, config.head_dim)
        dtype = parameters["embed.weight"].dtype
        self.scheduler = scheduler
        self._parameters = parameters
        self._caches = [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]
        self._previous = jnp.zeros(scheduler.mixed.max_seqs, jnp.int32)
        # Donated: a step's caches are the memory of the step before, updated in place.
        self._steps = {
            layout: jax.jit(functools.partial(forward, config, layout), donate_argnames="caches")
            for layout in scheduler.layouts
        }

    def warm_up(self) -> None:
        """Compiles the program of each layout by running it on padding, which leaves the cache as it is."""
        for layout in self.scheduler.layouts:
            self._launch(layout, layout.empty())
        self._previous.block_until_ready()

    def run(self, on_tokens: Callable[[int, int], None] = lambda prompt, new: None) -> Figures:
        """Serves until all requests of the scheduler are finished; see figures.serve."""
        return serve(self.scheduler, self._launch_step, lambda chosen: chosen.tolist(), compilations, on_tokens)

    def _launch_step(self, step: Step) -> jax.Array:
        return self._launch(step.layout, step.packed)

    def _launch(self, layout: StepLayout, packed: np.ndarray) -> jax.Array:
        step = self._steps[layout]
        self._previous, self._caches = step(self._parameters, self._caches, packed, self._previous)
        return self._previous
