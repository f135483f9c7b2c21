"""Runs a scheduler's steps in JAX: one jitted program per layout with donated caches, one step always in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xla_gpu.jax as xg

from .batch import StepLayout
from .config import LlamaConfig
from .figures import Figures, serve
from .jax_model import Parameters, forward, in_halves
from .jax_weights import AXIS, CACHE_SPEC, P, specs
from .options import CUBLAS, CUBLAS_ROWS, OVERLAP, StepOptions
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

    def __init__(
        self,
        config: LlamaConfig,
        parameters: Parameters,
        scheduler: Scheduler,
        options: StepOptions | None = None,
    ):
        """Runs on the devices that hold the parameters, divided over them where they are several."""
        options = options or StepOptions()
        shape = (scheduler.allocator.num_pages, scheduler.page_size, 2 * config.num_kv_heads, config.head_dim)
        dtype = parameters["embed.weight"].dtype
        mesh = parameters["embed.weight"].sharding.mesh
        self.scheduler = scheduler
        self._parameters = parameters
        # What a step takes lies on all devices: an argument on one would be copied to the others by Python each time.
        self._everywhere = jax.sharding.NamedSharding(mesh, P())
        make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=jax.sharding.NamedSharding(mesh, CACHE_SPEC))
        self._caches = [make() for _ in range(config.num_layers)]
        self._previous = jax.device_put(np.zeros(scheduler.mixed.max_seqs, np.int32), self._everywhere)
        group = xg.DeviceGroup(mesh, AXIS) if mesh.size > 1 else None
        self._steps = {}
        for layout in scheduler.layouts:
            step = functools.partial(forward, config, layout, group, options=options)
            if group is not None:
                cache_specs = [CACHE_SPEC] * config.num_layers
                in_specs = (specs(config, mesh.size), cache_specs, P(), P())
                # check_vma=False: the sums are the same on all devices, which jax before 0.8 cannot infer.
                step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P(), cache_specs), check_vma=False)
            options_of_xla = None
            if group is not None and layout.num_tokens >= CUBLAS_ROWS:
                options_of_xla = OVERLAP if in_halves(layout.num_tokens, group, options) else CUBLAS
            # Donated: a step's caches are the memory of the step before, updated in place.
            self._steps[layout] = jax.jit(step, donate_argnums=1, compiler_options=options_of_xla)

    def warm_up(self) -> None:
        """Compiles the program of each layout by running it on padding, which leaves the cache as it is."""
        for layout in self.scheduler.layouts:
            self.launch(layout, layout.empty())
        self._previous.block_until_ready()

    def run(self, on_tokens: Callable[[int, int], None] = lambda prompt, new: None) -> Figures:
        """Serves until all requests of the scheduler are finished; see figures.serve."""
        return serve(self.scheduler, self._launch_step, lambda chosen: chosen.tolist(), compilations, on_tokens)

    def _launch_step(self, step: Step) -> jax.Array:
        return self.launch(step.layout, step.packed)

    def launch(self, layout: StepLayout, packed: np.ndarray) -> jax.Array:
        """Starts a step behind the one before; returns the tokens that it will have chosen."""
        step = self._steps[layout]
        packed = jax.device_put(packed, self._everywhere)
        self._previous, self._caches = step(self._parameters, self._caches, packed, self._previous)
        return self._previous
