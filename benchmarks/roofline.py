"""Draws the roofline picture of benchmarks.attention's JSON files.

    python -m benchmarks.roofline decode.json prefill.json

Operations per byte against operations per second: our points and the best paged peer's, under the two measured limits.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib
import numpy as np
from benchmarks.loads import BYTES_PER_SECOND, OPERATIONS_PER_SECOND

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, PEER, LIMIT = "#c2410c", "#475569", "#94a3b8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path, nargs="+", help="what benchmarks.attention wrote with --json")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/roofline.png"), help="the image (default %(default)s)"
    )
    arguments = parser.parse_args()

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    intensity = np.geomspace(1, 20_000, 200)
    limit = np.minimum(intensity * BYTES_PER_SECOND, OPERATIONS_PER_SECOND)
    axes.loglog(intensity, limit / 1e12, color=LIMIT, lw=2, zorder=1)
    machines, dates = set(), set()
    labels = {"xla_gpu": OURS, "best paged peer": PEER}
    for path in arguments.results:
        result = json.loads(path.read_text())
        machines.add(f"{result['machine']['gpu']}, PyTorch {result['machine']['torch']}")
        dates.add(result["date"])
        for row in result["rows"]:
            times = row["microseconds"]
            x = row["operations"] / row["bytes"]
            for name, time in (("best paged peer", times.get(row["best_peer"])), ("xla_gpu", times.get("xla_gpu"))):
                if time is None:
                    continue
                y = row["operations"] / time / 1e6
                marker = "o" if name == "xla_gpu" else "x"
                axes.plot(x, y, marker, color=labels[name], ms=6, zorder=3 if name == "xla_gpu" else 2)
    for name, color in labels.items():
        axes.plot([], [], "o" if name == "xla_gpu" else "x", color=color, label=name)
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s")
    bandwidth, rate = BYTES_PER_SECOND / 1e12, OPERATIONS_PER_SECOND / 1e12
    source = "; ".join([*sorted(machines), *sorted(dates)])
    axes.set_title(f"Paged attention under {bandwidth:.1f} TB/s and {rate:.0f} TFLOP/s\n{source}")
    axes.grid(which="both", alpha=0.2)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    main()
