"""Both builds side by side: which random calls differ in bits, and how long loads take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.compare_builds.builds import Build, Failed, both

TURNS = 3  # of each build at a load: the least of as many medians counts
# In front of these: a GPU that waited while a load was prepared runs long ones up to 10 % faster than at its power
# limit, which the first build of the first turn would gain by.
UNCOUNTED_TURNS = 1
REPEATS = {"xla_gpu": 25, "FA3": 15}


def bits(before: Build, now: Build, drawn: Sequence[Any]) -> dict[str, Any]:
    """How many calls there were; those whose outcomes differ, or that end otherwise than with results or a handler's
    error; and those of which one build has several outcomes."""
    found: dict[str, Any] = {"calls": 0, "differ": [], "unsteady": []}
    for x in drawn:
        outcomes = both(before, now, "outcomes", x)
        found["calls"] += 1
        texts = [[f"failed: {y}"] if isinstance(y, Failed) else y for y in outcomes]
        row = {"call": str(x), "before": texts[0], "now": texts[1]}
        if any(len(set(text)) > 1 for text in texts):
            found["unsteady"].append(row)
        elif texts[0][0] != texts[1][0] or any(isinstance(y, Failed) for y in outcomes):
            found["differ"].append(row)
    return found


def times(before: Build, now: Build, loads: Sequence[Any], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each load that is begun within the time: microseconds, least of the turns' medians, by name; all
    readings; and the noise, the largest ratio of two readings of one build."""
    began = time.monotonic()
    for load in loads:
        if time.monotonic() - began >= seconds:
            return
        row: dict[str, Any] = {"operator": load.operator, "load": load.name}
        try:
            yield row | _of_load(before, now, load)
        except Failed as error:
            yield row | {"error": str(error)}


def _of_load(before: Build, now: Build, load: Any) -> dict[str, Any]:
    made = both(before, now, "prepare", load)
    for build, answer in zip((before, now), made, strict=True):
        if isinstance(answer, Failed):
            raise Failed(f"{build.name}: {answer}")
    readings: dict[str, list[float]] = {"before": [], "now": []}
    peers = [name for name in made[0]["names"] if name != "xla_gpu"]
    for turn in range(-UNCOUNTED_TURNS, TURNS):
        found = {
            build.name: build.call("measure", "xla_gpu", REPEATS["xla_gpu"])
            for build in ((before, now) if turn % 2 == 0 else (now, before))
        }
        found |= {name: before.call("measure", name, REPEATS[name]) for name in peers}
        if turn >= 0:
            for name, value in found.items():
                readings.setdefault(name, []).append(value)
    least = {name: min(of_name) for name, of_name in readings.items()}
    noise = max(max(readings[name]) / min(readings[name]) for name in ("before", "now"))
    return {
        "bytes": made[0]["bytes"],
        "us": least,
        "ratio": least["now"] / least["before"],
        "noise": noise,
        "readings": readings,
    }


# ---- As text

HEADER = f"{'load':56}{'MB':>8}{'before':>10}{'now':>10}{'now/before':>12}{'noise':>7}"


def text_of_bits(operator: str, found: dict[str, Any], shown: int = 5) -> str:
    differ, unsteady = found["differ"], found["unsteady"]
    lines = [
        f"{operator}: {found['calls']} random calls, {len(differ)} differ or fail, {len(unsteady)} differ in repeats"
    ]
    for row in (differ + unsteady)[:shown]:
        lines.append(f"  {row['call']}")
        lines += [f"    {name:7}{' then '.join(dict.fromkeys(row[name]))[:300]}" for name in ("before", "now")]
    if len(differ) + len(unsteady) > shown:
        lines.append(f"  and {len(differ) + len(unsteady) - shown} more (--json has all)")
    return "\n".join(lines)


def text_of_times(row: dict[str, Any]) -> str:
    name = f"{row['operator']} {row['load']}"
    if "error" in row:
        return f"{name:56} not timed: {row['error']}"
    us = row["us"]
    text = f"{name:56}{row['bytes'] / 1e6:8.1f}{us['before']:10.2f}{us['now']:10.2f}{row['ratio']:12.3f}"
    others = "".join(f"  {peer} {value:.2f}" for peer, value in us.items() if peer not in ("before", "now"))
    return f"{text}{row['noise']:7.2f}{others}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Of the loads that were timed, by operator."""
    lines = []
    for operator in dict.fromkeys(row["operator"] for row in rows):
        ratios = sorted(row["ratio"] for row in rows if row["operator"] == operator and "ratio" in row)
        if ratios:
            middle = f"{ratios[0]:.3f} to {ratios[-1]:.3f}, median {statistics.median(ratios):.3f}"
            lines.append(f"{operator}: now/before of {len(ratios)} loads: {middle}")
    return "\n".join(lines)
