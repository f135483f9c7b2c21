"""Compares two builds of the library on one GPU: whether random calls return the same bits, and how long loads take.

    python -m benchmarks.compare_builds --before OLD/libxla_gpu_ffi.so --now build/cuda/ffi/libxla_gpu_ffi.so
    python -m benchmarks.compare_builds --before … --now … --operator paged_attention --loads short-decode 8x4k
    python -m benchmarks.compare_builds --before … --now … --bits 0 --operator linear --loads int4 --seconds 60
    python -m benchmarks.compare_builds --before … --now … --device cpu      # bits of the host's handlers

Each build has a process of its own. Random calls are the fuzzer's inputs (tests/fuzz), wrong ones among them, and for
paged_attention on a GPU loads of benchmarks.sweep; both builds get the same ones, and each call is made twice. A seed
repeats them. Loads are those of the other benchmarks, captured in CUDA graphs over rotating inputs; the builds take
turns at each, and the least of three medians counts. "noise" is the largest ratio of two readings of one build: a
now/before within it says nothing. FlashAttention-3 is timed beside where FA3_LIBRARY names it (implementations.py).

Ends with 1 if a call differed or failed, or a load could not be timed for another reason than the GPU's memory.
"""

from __future__ import annotations

import argparse
import datetime
import filecmp
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.argument_types import containing, positive, require_gpu
from benchmarks.compare_builds import compare, random_calls, timed_loads
from benchmarks.compare_builds.builds import Build, Failed


def from_zero(text: str) -> int:
    return 0 if text == "0" else positive(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_builds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, required=True, metavar="LIBRARY", help="the build to compare with")
    parser.add_argument("--now", type=Path, required=True, metavar="LIBRARY", help="the build that is tried")
    parser.add_argument(
        "--operator",
        nargs="+",
        choices=random_calls.KINDS,
        default=list(random_calls.KINDS),
        metavar="NAME",
        help=f"default: all, which are {', '.join(random_calls.KINDS)}",
    )
    parser.add_argument("--bits", type=from_zero, default=100, metavar="N", help="random calls of each (%(default)s)")
    parser.add_argument("--loads", nargs="+", metavar="TEXT", help="time those whose name contains one (default: all)")
    parser.add_argument("--members", type=positive, default=2, help="loads drawn from each class (%(default)s)")
    parser.add_argument("--seed", type=from_zero, default=0, help="of random calls and loads (%(default)s)")
    parser.add_argument(
        "--seconds", type=from_zero, help="for times: no load is begun later (120; 0, which is no times, on a CPU)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes all outcomes and readings there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.seconds is None:
        arguments.seconds = 120 if arguments.device == "cuda" else 0
    for name in ("before", "now"):
        if not getattr(arguments, name).is_file():
            parser.error(f"--{name}: expected a library, got {getattr(arguments, name)}, which is not a file")
    if arguments.before.samefile(arguments.now):
        parser.error(f"--before, --now: expected two libraries, got {arguments.now} twice")
    if arguments.device == "cuda":
        require_gpu(parser)
    return arguments


def open_builds(arguments: argparse.Namespace) -> list[Build]:
    made = []
    for name in ("before", "now"):
        try:
            made.append(Build(name, getattr(arguments, name).resolve(), arguments.device))
        except Failed as error:
            sys.exit(f"--{name}: {error}")
        info = made[-1].info
        text = ", ".join(f"{key} {info[key]}" for key in ("version", "cuda_architectures", "compiler") if info.get(key))
        print(f"{name:7}{made[-1].path} ({text})")
    if filecmp.cmp(arguments.before, arguments.now, shallow=False):
        print("Both files have the same bytes: whatever differs is not the build's.")
    return made


def chosen_loads(arguments: argparse.Namespace) -> list[timed_loads.Load]:
    if not arguments.seconds:
        return []
    found = timed_loads.of(arguments.operator, arguments.members, arguments.seed, arguments.device)
    if without := [name for name in arguments.operator if name not in {load.operator for load in found}]:
        print(f"No loads to time, on {arguments.device}: {', '.join(without)}")
    if not arguments.loads or not found:
        return found
    names = set(containing("--loads", arguments.loads, [f"{load.operator} {load.name}" for load in found]))
    return [load for load in found if f"{load.operator} {load.name}" in names]


def main() -> int:
    arguments = parse_arguments()
    loads = chosen_loads(arguments)
    before, now = open_builds(arguments)
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "device": arguments.device}
    result |= {"seed": arguments.seed, "bits": {}, "times": []}
    result |= {build.name: {"path": str(build.path), **build.info} for build in (before, now)}

    def save() -> None:  # after each step, so that an end before the last loses none
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))

    for operator in arguments.operator if arguments.bits else ():
        drawn = random_calls.draw(operator, arguments.bits, arguments.seed, arguments.device)
        result["bits"][operator] = found = compare.bits(before, now, drawn)
        print(compare.text_of_bits(operator, found), flush=True)
        save()
    if loads:
        print(f"\n{compare.HEADER}   (microseconds)", flush=True)
    for row in compare.times(before, now, loads, arguments.seconds):
        result["times"].append(row)
        print(compare.text_of_times(row), flush=True)
        save()
    if len(result["times"]) < len(loads):
        print(f"{len(loads) - len(result['times'])} loads were not timed: --seconds was over")
    if text := compare.summary(result["times"]):
        print(f"\n{text}")
    before.close()
    now.close()
    wrong = any(found["differ"] or found["unsteady"] for found in result["bits"].values())
    errors = [row["error"] for row in result["times"] if "error" in row]
    return 1 if wrong or not all(map(memory.is_about_memory, errors)) else 0


if __name__ == "__main__":
    sys.exit(main())
