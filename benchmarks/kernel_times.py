"""Where the time of a JAX program goes on the first GPU: what each kernel adds to it, from a profile."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax


def kernel_times(run: Callable[[], object], steps: int, most: int = 24) -> list[tuple[float, float, float, str]]:
    """Of each kernel by name: microseconds of a step that it adds, its own duration, calls of a step, and the name.

    What a kernel adds is the time from the end of the kernels before it to its own: gaps count to the kernel that ends
    them, and of a kernel that begins while the one before it runs only the rest counts. So the numbers add up to the
    step. ``run`` does ``steps`` steps and waits for them.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        run()
        jax.profiler.stop_trace()
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    # A kernel stands on the line of its stream; other lines hold what XLA derives from those.
    events = []
    for plane in data.planes:
        if plane.name == "/device:GPU:0":
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [
                        (event.start_ns, event.start_ns + event.duration_ns, event.name) for event in line.events
                    ]
    added: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    end = 0.0
    for start, stop, name in sorted(events):
        short = name.replace("xla_gpu::", "").replace("(anonymous namespace)::", "").removeprefix("void ")[:60]
        count[short] += 1
        total[short] += stop - start
        if end and start - end < 1e6:  # longer gaps are not the step's
            added[short] += max(0.0, stop - max(end, 0.0))
        end = max(end, stop)
    scale = 1e3 * steps
    rows = [(added[n] / scale, total[n] / scale, count[n] / steps, n) for n, _ in added.most_common(most)]
    return [*rows, (sum(added.values()) / scale, sum(total.values()) / scale, sum(count.values()) / steps, "all")]


def report(run: Callable[[], object], steps: int) -> None:
    for added, total, count, name in kernel_times(run, steps):
        print(f"{added:9.1f} us added {total:9.1f} us long {count:7.1f} calls  {name}", flush=True)
