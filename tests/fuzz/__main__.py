"""Fuzzes for a while, by hand:

    python -m tests.fuzz --minutes 60                                   # every front end that this process can open
    python -m tests.fuzz --minutes 5 --frontend eager-cuda --frontend jax-cuda --jobs 8
    python -m tests.fuzz --kind attention --seed 7 --examples 1000      # a round of that seed again

Prints every failure with the smallest input that shows it, as an expression for tests/fuzz/regressions.py, and at the
end one line of JSON with what was checked. Ends with 1 if something failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import time
import warnings

from tests.common import machine

# Before any framework is imported, as conftest.py does it.
os.environ.setdefault("PJRT_DEVICE", machine.default_pjrt_device())
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

EXAMPLES = 50  # inputs of a round: a seed repeats a round


def main() -> int:
    args = _arguments()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    summary = _in_processes(args, seed) if args.jobs > 1 else _fuzz(args, seed)
    print(json.dumps(summary), flush=True)
    return 1 if summary["failures"] else 0


def _arguments() -> argparse.Namespace:
    from tests.common import frontends
    from tests.fuzz import run

    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--frontend", action="append", choices=[*frontends.ALL], help="all that can be opened, if not given"
    )
    parser.add_argument("--kind", action="append", choices=[*run.KINDS], help="all, if not given")
    parser.add_argument("--seed", type=int, help="of the first round; a random one, if not given")
    parser.add_argument(
        "--examples", type=int, help="of one round, which then is all; else rounds until the time is up"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that fuzz with seeds of their own")
    return parser.parse_args()


def _fuzz(args: argparse.Namespace, seed: int) -> dict:
    from tests.common import frontends
    from tests.fuzz import checks, regressions, run
    from tests.fuzz.programs import forget

    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about the overflows that inputs ask for
    chosen = []
    for frontend in frontends.ALL.values():
        if args.frontend and frontend.name not in args.frontend:
            continue
        if reason := frontend.unavailable():
            print(f"without {frontend.name}: {reason}", flush=True)
        else:
            chosen.append(frontend)
    if not chosen:
        sys.exit("no front end to fuzz")
    started, failures, rounds = time.monotonic(), [], collections.Counter()

    def attempt(what, *arguments):
        try:
            what(*arguments)
        except Exception as e:
            failures.append(str(e))
            print(f"FAILED {e}", flush=True)

    for x in regressions.CASES.values():
        attempt(checks.check, x, chosen)
    kinds = args.kind or list(run.KINDS)
    if args.examples:
        for kind in kinds:
            rounds[kind] += 1
            attempt(run.run, kind, seed, args.examples, chosen)
    else:
        turns, weights = random.Random(seed), [run.WEIGHTS[kind] for kind in kinds]
        while time.monotonic() - started < args.minutes * 60:
            (kind,) = turns.choices(kinds, weights)
            rounds[kind] += 1
            attempt(run.run, kind, seed, EXAMPLES, chosen)
            seed = (seed + 1) % 2**32
            forget()
    return {
        "seconds": round(time.monotonic() - started),
        "rounds": dict(rounds),
        "inputs": dict(checks.inputs_seen),
        "calls": dict(checks.calls),
        "failures": len(failures),
    }


def _in_processes(args: argparse.Namespace, seed: int) -> dict:
    command = [sys.executable, "-m", "tests.fuzz", *_without(sys.argv[1:], "--jobs", "--seed")]
    # Seeds far apart: a process goes on from its own, one by one.
    seeds = [(seed + i * 2**24) % 2**32 for i in range(args.jobs)]
    processes = [subprocess.Popen([*command, f"--seed={s}"], stdout=subprocess.PIPE, text=True) for s in seeds]
    total = collections.defaultdict(collections.Counter)
    summary = {"seconds": 0, "failures": 0}
    for process in processes:
        output, _ = process.communicate()
        *lines, last = output.splitlines() or [""]
        if process.returncode not in (0, 1) or not last.startswith("{"):
            print(f"{output}\na process ended with {process.returncode}", flush=True)
            summary["failures"] += 1
            continue
        print("\n".join(line for line in lines if not line.startswith("without")), flush=True)
        part = json.loads(last)
        summary["seconds"] = max(summary["seconds"], part["seconds"])
        summary["failures"] += part["failures"]
        for name in ("rounds", "inputs", "calls"):
            total[name].update(part[name])
    return summary | {name: dict(count) for name, count in total.items()}


def _without(arguments: list[str], *options: str) -> list[str]:
    """Command-line arguments less the options named, which take one value each."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in options:
            skip = True
        elif argument.partition("=")[0] not in options:
            kept.append(argument)
    return kept


if __name__ == "__main__":
    sys.exit(main())
