"""The front ends, each as an object that takes and returns NumPy arrays, so that one test body serves all of them.

A front end that this process cannot use says why (`unavailable`); tests then skip with that text.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import traceback
from collections.abc import Callable

import numpy as np

from tests.common import machine


class Frontend:
    name: str
    platform: str  # "host" or "cuda"
    framework: str  # "torch" or "jax"

    def unavailable(self) -> str | None:
        """Why this process cannot use the front end; None where it can."""
        raise NotImplementedError

    def run(self, body: Callable, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """The results of `body(ops, **tensors)`, traced into one program; ops is the front end's module of operators.
        Waits for the results, so an error of a handler is raised here."""
        raise NotImplementedError

    def call(self, operator: str, arrays: dict[str, np.ndarray], **options) -> tuple[np.ndarray, ...]:
        """One operator's results, from arrays and plain Python values by argument name."""
        return self.run(lambda ops, **tensors: getattr(ops, operator)(**tensors, **options), arrays)

    def __repr__(self) -> str:
        return self.name


def _missing(*modules: str) -> str | None:
    absent = [m for m in modules if importlib.util.find_spec(m) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _as_tuple(results) -> tuple:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


class TorchFrontend(Frontend):
    framework = "torch"

    def device(self):
        raise NotImplementedError

    def module(self):
        import xla_gpu.torch

        return xla_gpu.torch

    def tensors(self, arrays: dict[str, np.ndarray]) -> dict:
        from tests.common.arrays import to_torch

        return {name: to_torch(x, self.device()) for name, x in arrays.items()}

    def run(self, body, arrays):
        from tests.common.arrays import to_numpy

        results = _as_tuple(body(self.module(), **self.tensors(arrays)))
        return tuple(to_numpy(r) for r in results)


class Eager(TorchFrontend):
    name, platform = "eager", "host"

    def device(self):
        return "cpu"

    def unavailable(self):
        return _missing("torch")


class EagerCuda(TorchFrontend):
    name, platform = "eager-cuda", "cuda"

    def device(self):
        return "cuda"

    @functools.cache  # noqa: B019 - front ends live as long as the process
    def unavailable(self):
        if reason := _missing("torch") or machine.no_gpu():
            return reason
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device"
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as e:  # a torch whose CUDA libraries are absent may see devices yet
            return f"torch {torch.__version__} does not reach the GPU: {str(e)[:200]}"
        return None


@contextlib.contextmanager
def _reported_once():
    """torch_xla raises the error of an execution where its result is waited for, and once more when the next program
    starts. Takes the second report away, so that it does not hit the next test. (test_bad_values.py shows both.)"""
    try:
        yield
    except Exception as e:
        import torch_xla

        traceback.clear_frames(e.__traceback__)  # they hold lazy tensors, which a sync would compute again
        with contextlib.suppress(Exception):
            torch_xla.sync(wait=True)
        raise


class TorchXla(TorchFrontend):
    """Lazy tensors. torch_xla has one platform per process, that of PJRT_DEVICE."""

    def __init__(self, platform: str):
        self.platform = platform
        self.name = "torch_xla" if platform == "host" else "torch_xla-cuda"

    @functools.cache  # noqa: B019
    def unavailable(self):
        if reason := _missing("torch", "torch_xla", "jaxlib"):
            return reason
        if self.platform == "cuda" and (reason := machine.no_gpu()):
            return reason
        wanted = "CPU" if self.platform == "host" else "GPU"
        if os.environ["PJRT_DEVICE"] != wanted:
            return f"needs PJRT_DEVICE={wanted}; this process runs with {os.environ['PJRT_DEVICE']}"
        return None

    def device(self):
        import torch_xla

        return torch_xla.device()

    @_reported_once()
    def run(self, body, arrays):
        return super().run(body, arrays)


class TorchXlaCompiled(TorchXla):
    """torch.compile(backend="openxla", fullgraph=True)."""

    def __init__(self, platform: str):
        super().__init__(platform)
        self.name += "-compiled"

    @_reported_once()
    def run(self, body, arrays):
        import torch

        from tests.common.arrays import to_numpy

        ops, tensors = self.module(), self.tensors(arrays)
        names = tuple(tensors)

        def step(*values):
            return body(ops, **dict(zip(names, values, strict=True)))

        # One code object serves every call of this method; without a reset the recompilation limit is soon reached.
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="openxla", fullgraph=True)
        return tuple(to_numpy(r) for r in _as_tuple(compiled(*tensors.values())))


def enable_x64(on: bool = True):
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(on)
    from jax.experimental import enable_x64  # before jax 0.8

    return enable_x64(on)


class Jax(Frontend):
    """jax.jit."""

    framework = "jax"

    def __init__(self, platform: str):
        self.platform = platform
        self.name = "jax" if platform == "host" else "jax-cuda"

    @functools.cache  # noqa: B019
    def unavailable(self):
        if reason := _missing("jax", "jaxlib"):
            return reason
        if self.platform == "host":
            return None
        if reason := machine.no_gpu():
            return reason
        import jax

        try:
            jax.devices("cuda")
        except RuntimeError as e:
            return f"jax {jax.__version__} has no CUDA platform: {e}"
        return None

    def device(self):
        import jax

        return jax.devices("cpu" if self.platform == "host" else "cuda")[0]

    def run(self, body, arrays):
        import jax

        import xla_gpu.jax

        # Only with this switch does JAX know 64-bit types.
        wide = any(x.dtype in (np.int64, np.float64) for x in arrays.values())
        with contextlib.ExitStack() as stack:
            # JAX's strictest settings, which some projects have: nothing is broadcast or converted by itself.
            stack.enter_context(jax.numpy_rank_promotion("raise"))
            stack.enter_context(jax.numpy_dtype_promotion("strict"))
            if wide:
                stack.enter_context(enable_x64())
            placed = jax.device_put(arrays, self.device())
            results = jax.jit(lambda arrays: body(xla_gpu.jax, **arrays))(placed)
            return tuple(np.asarray(r) for r in _as_tuple(results))


class Torchax(Frontend):
    """torchax tensors, eagerly: PyTorch's operators as JAX's."""

    framework = "torchax"

    def __init__(self, platform: str):
        self.jax = Jax(platform)
        self.platform = platform
        self.name = "torchax" if platform == "host" else "torchax-cuda"

    def unavailable(self):
        # torch_xla 2.9's wheel holds files of torchax, and not what they import.
        if not any(importlib.metadata.distributions(name="torchax")):
            return "not installed: torchax"
        return _missing("torch", "torchax") or self.jax.unavailable()

    def device(self):
        return self.jax.device()

    def module(self):
        import xla_gpu.torch
        import xla_gpu.torchax

        return xla_gpu.torch

    def program(self, body):
        return body

    def run(self, body, arrays):
        import jax
        import torchax.interop

        ops = self.module()
        wide = any(x.dtype in (np.int64, np.float64) for x in arrays.values())
        with enable_x64() if wide else contextlib.nullcontext(), torchax.default_env():
            tensors = torchax.interop.torch_view(jax.device_put(arrays, self.device()))
            results = self.program(lambda tensors: _as_tuple(body(ops, **tensors)))(tensors)
            return tuple(np.asarray(r.jax()) for r in results)


class TorchaxJit(Torchax):
    """torchax.interop.jax_jit."""

    def __init__(self, platform: str):
        super().__init__(platform)
        self.name += "-jit"

    def program(self, body):
        import torchax.interop

        return torchax.interop.jax_jit(body)


ALL: dict[str, Frontend] = {
    frontend.name: frontend
    for frontend in (
        Eager(),
        Jax("host"),
        TorchXla("host"),
        TorchXlaCompiled("host"),
        Torchax("host"),
        TorchaxJit("host"),
        EagerCuda(),
        Jax("cuda"),
        TorchXla("cuda"),
        TorchXlaCompiled("cuda"),
        Torchax("cuda"),
        TorchaxJit("cuda"),
    )
}


def beside(frontend: Frontend) -> Frontend | None:
    """Another usable front end of the same platform, to compare with. Prefers the eager one, which compiles
    nothing; None if there is no other."""
    others = [other for other in ALL.values() if other is not frontend and other.platform == frontend.platform]
    others.sort(key=lambda other: not other.name.startswith("eager"))
    return next((other for other in others if not other.unavailable()), None)
