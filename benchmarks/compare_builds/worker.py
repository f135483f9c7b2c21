"""What one build's process does: results of random calls as hashes, and times of loads."""

from __future__ import annotations

import hashlib
import os
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

REPEATS = 2  # of each random call, whose results must be the same


def serve(connection: Connection, library: str, device: str) -> None:
    """Answers requests (method, arguments) with (whether it went well, result or the error's text, whether it ends)."""
    os.environ["XLA_GPU_LIBRARY"] = library  # before anything loads one
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about the overflows that inputs ask for
    try:
        worker = Worker(device)
    except Exception as error:
        connection.send((False, str(error), True))
        return
    connection.send((True, worker.build, False))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(worker, name)(*arguments), False)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{text} ({os.path.basename(place.filename)}:{place.lineno})"
            answer = (False, text, is_lost(text))  # every later call would fail as well
        connection.send(answer)
        if answer[2]:
            return


def is_lost(error: str) -> bool:
    """Whether CUDA will fail from now on."""
    return "CUDA error" in error or "CUDA_ERROR" in error


class Worker:
    def __init__(self, device: str) -> None:
        from tests.common import frontends

        from xla_gpu._runtime import library

        self.device = device
        loaded = library.load()
        self.build: dict[str, Any] = loaded.build_info()
        if device == "cuda" and not any(entry.platform == "CUDA" for entry in loaded.handlers()):
            raise ValueError(f"{loaded.path} was built without CUDA; --device cpu compares its other half")
        self._frontend = frontends.ALL["eager-cuda" if device == "cuda" else "eager"]
        if reason := self._frontend.unavailable():
            raise ValueError(reason)
        self._timed: dict[str, Any] = {}

    # ---- Bits

    def outcomes(self, drawn: Any) -> list[str]:
        """What each of REPEATS runs of an input gave: a hash of all results, or the handler's error."""
        import torch

        with torch.no_grad():
            return self._of_load(drawn) if hasattr(drawn.what, "page_size") else self._of_fuzzer(drawn.what)

    def _of_load(self, drawn: Any) -> list[str]:
        from benchmarks import gpu_inputs, implementations
        from tests.common.arrays import to_numpy

        call = implementations.XlaGpu().prepare(gpu_inputs.build(drawn.what, drawn.seed))
        return [digest([to_numpy(call())]) for _ in range(REPEATS)]

    def _of_fuzzer(self, x: Any) -> list[str]:
        from benchmarks.compare_builds import random_calls
        from tests.common import parts

        found = []
        calls = list(random_calls.calls(x))
        for _ in range(REPEATS):
            results = []
            for operator, arrays, options in calls:
                try:
                    if random_calls.of_gathered_parts(x):
                        results += parts.call(self._frontend, operator, arrays, **options)
                    else:
                        results += self._frontend.call(operator, arrays, **options)
                except (ValueError, RuntimeError) as error:
                    if is_lost(str(error)):
                        raise
                    results.append(f"{type(error).__name__}: {error}")
            errors = [text for text in results if isinstance(text, str)]
            found.append(" | ".join(errors) or digest(results))
        return found

    # ---- Times

    def prepare(self, load: Any) -> dict[str, Any]:
        """Captures a load's calls. The names of those that can be timed, and the bytes of one call."""
        import torch
        from benchmarks import timing
        from benchmarks.compare_builds import timed_loads

        self._timed.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        with torch.no_grad():
            prepared = timed_loads.prepare(load, self.device)
            for name, calls in prepared.calls.items():
                on_gpu = self.device == "cuda"
                self._timed[name] = timing.Replays(calls, prepared.minimum_calls) if on_gpu else timing.WallTimes(calls)
        return {"names": list(self._timed), "bytes": prepared.bytes}

    def measure(self, name: str, repeats: int) -> float:
        """Median microseconds of one call."""
        import torch

        with torch.no_grad():
            return self._timed[name].microseconds(repeats)


def digest(results: list[Any]) -> str:
    found = hashlib.sha256()
    for x in results:
        found.update(f"{x.dtype} {x.shape}".encode())
        found.update(x.tobytes())
    return found.hexdigest()[:16]
