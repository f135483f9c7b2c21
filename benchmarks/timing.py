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


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 30, minimum_calls: int = 20) -> float:
    """Median microseconds of one call; `calls` do the same work on different arrays and are captured in turn. Without a
    GPU, wall time."""
    for call in calls:
        call()
    if not torch.cuda.is_available():
        return wall_microseconds(calls, repeats)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    rounds = max(1, minimum_calls // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def wall_microseconds(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - begin) * 1e6 / len(calls))
    return statistics.median(times)
