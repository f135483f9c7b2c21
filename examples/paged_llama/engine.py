"""Runs a scheduler's steps on a torch_xla device: one compiled program per layout, one step always in flight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as xs

import xla_gpu.torch

from .batch import StepLayout
from .figures import Figures, serve
from .model import PagedLlama
from .options import CUBLAS, CUBLAS_ROWS
from .scheduler import Scheduler, Step

# At most so many layers' caches are one tensor: a launch costs the host some 5 us for each tensor that is updated.
LAYERS_TOGETHER = 8


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
        page = (scheduler.page_size, 2 * config.num_kv_heads, config.head_dim)
        dtype = model.embed.weight.dtype
        self.scheduler = scheduler
        self._device = device
        self._model = model
        together = 1
        if model.group is None:
            together = -(-config.num_layers // -(-config.num_layers // LAYERS_TOGETHER))
        layers = [min(together, config.num_layers - i) for i in range(0, config.num_layers, together)]
        self._caches = [torch.zeros(n * allocator.num_pages, *page, dtype=dtype, device=device) for n in layers]
        self._previous = self._whole(torch.zeros(scheduler.mixed.max_seqs, dtype=torch.int32, device=device))
        if model.group is not None:
            for cache in self._caches:  # by kv heads
                xs.mark_sharding(cache, model.group.mesh, (None, None, model.group.axis, None))
        torch_xla.sync()
        if model.group is None:
            self._step = xla_gpu.torch.jit(model, donate_argnums=2)
        else:  # dynamic=False: a second layout means a second program, not one with symbolic sizes.
            self._step = torch.compile(model, backend="openxla", fullgraph=True, dynamic=False)
        self._compiled: set[StepLayout] = set()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles the program of each layout by running it on padding, which leaves the cache as it is."""
        for layout in self.scheduler.layouts:
            self.launch(layout, layout.empty())
        self._previous.cpu()

    @torch.no_grad()
    def run(self, on_tokens: Callable[[int, int], None] = lambda prompt, new: None) -> Figures:
        """Serves until all requests of the scheduler are finished; see figures.serve."""
        return serve(self.scheduler, self._launch_step, lambda chosen: chosen.cpu().tolist(), compilations, on_tokens)

    def _launch_step(self, step: Step) -> torch.Tensor:
        return self.launch(step.layout, step.packed)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, on several devices annotated as whole on each. The compiled step annotates its inputs: one that
        comes without would look like another kind of input each time, and be traced anew."""
        if self._model.group is not None:
            xs.mark_sharding(tensor, self._model.group.mesh, (None,))
        return tensor

    def launch(self, layout: StepLayout, packed: np.ndarray) -> torch.Tensor:
        """Starts a step behind the one before; returns the tokens that it will have chosen."""
        if self._model.group is None:
            self._previous, self._caches = self._step(packed, self._previous, self._caches, layout)
            return self._previous
        on_device = self._whole(torch.from_numpy(packed).to(self._device))
        options = CUBLAS if layout not in self._compiled and layout.num_tokens >= CUBLAS_ROWS else {}
        with xla_gpu.torch.compile_options(options):
            self._previous, self._caches = self._step(on_device, self._previous, self._caches, layout)
        self._compiled.add(layout)
        return self._previous
