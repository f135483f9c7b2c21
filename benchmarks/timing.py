"""Times of GPU work: events around replays of a CUDA graph, over input sets that together exceed the L2 cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 200e6  # several times any GPU's L2, so that a set is gone before its turn comes again


def sets_needed(bytes_of_one: float) -> int:
    """Input sets to rotate over."""
    return max(1, min(8, math.ceil(L2_BYTES / bytes_of_one)))


class Replays:
    """Calls that do the same work on different arrays, captured in turn, to be timed as often as wanted."""

    def __init__(self, calls: Sequence[Callable[[], object]], minimum_calls: int = 20) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.synchronize()
        rounds = max(1, minimum_calls // len(calls))
        self._calls = calls  # they hold the arrays that the graph reads
        self._captured = rounds * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(rounds):
                for call in calls:
                    call()

    def microseconds(self, repeats: int = 30) -> float:
        """Median microseconds of one call."""
        self._graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / self._captured)
        return statistics.median(times)


class WallTimes:
    """The same on a CPU, without a graph."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls
        for call in calls:
            call()

    def microseconds(self, repeats: int = 30) -> float:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            for call in self._calls:
                call()
            times.append((time.perf_counter() - begin) * 1e6 / len(self._calls))
        return statistics.median(times)


def prepare(calls: Sequence[Callable[[], object]], minimum_calls: int = 20) -> Replays | WallTimes:
    """What times them: on a GPU, at least so many calls in a graph; without one, by wall time."""
    return Replays(calls, minimum_calls) if torch.cuda.is_available() else WallTimes(calls)


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 30, minimum_calls: int = 20) -> float:
    """Median microseconds of one call; `calls` do the same work on different arrays and are captured in turn. Without a
    GPU, wall time."""
    return prepare(calls, minimum_calls).microseconds(repeats)
