"""Fuzzes for a while, by hand:

    python -m tests.fuzz --minutes 60                                   # every front end that this process can open
    python -m tests.fuzz --minutes 5 --frontend eager-cuda --frontend jax-cuda --jobs 8
    python -m tests.fuzz --kind attention --seed 7 --examples 1000      # a round of that seed again

Prints every failure with the smallest input that shows it, as an expression for tests/fuzz/regressions.py, and a line
of JSON with what was checked so far, by operator: every --every seconds, after SIGTERM or SIGINT, and at the end, which
is after --minutes at the latest, whatever it is doing then. With --jobs it waits a minute more for processes that have
not ended, until the next SIGTERM or SIGINT. Ends with 1 if something failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence

from tests.common import machine
from tests.fuzz import progress

# Before any framework is imported, as conftest.py does it.
os.environ.setdefault("PJRT_DEVICE", machine.default_pjrt_device())
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

EXAMPLES = 50  # inputs of a round: a seed repeats a round
AHEAD = 4  # seconds by which the processes of --jobs end before this one
# Seconds after which one of them that has not ended hangs: the thread that ends it waits for the call that holds the
# GIL, and the driver frees the GPU's memory before the process is gone.
GRACE = 60
COUNTS = ("rounds", "inputs", "calls")


def main() -> None:
    progress.block_signals()
    limits = _limits()
    args, _ = limits.parse_known_args()  # the time limit holds for the imports, too
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    progress.say(f"seed {seed}")
    if args.jobs > 1:
        _in_processes(args, seed)
    found = Found()
    reporter = progress.Reporter(found.summary, args.every, None if args.examples else args.minutes * 60)
    _fuzz(_arguments(limits), seed, found)
    reporter.end()


def _limits() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--minutes", type=float, default=60, help="until it ends, to the second")
    parser.add_argument("--seed", type=int, help="of the first round; a random one, if not given")
    parser.add_argument(
        "--examples", type=int, help="of one round, which then is all; else rounds until the time is up"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that fuzz with seeds of their own")
    parser.add_argument("--every", type=float, default=20, help="seconds between two summaries")
    return parser


def _arguments(limits: argparse.ArgumentParser) -> argparse.Namespace:
    from tests.common import frontends
    from tests.fuzz import run

    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", formatter_class=argparse.ArgumentDefaultsHelpFormatter, parents=[limits]
    )
    parser.add_argument(
        "--frontend", action="append", choices=[*frontends.ALL], help="all that can be opened, if not given"
    )
    parser.add_argument("--kind", action="append", choices=[*run.KINDS], help="all, if not given")
    return parser.parse_args()


class Found:
    """What a process has done so far."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.rounds: collections.Counter[str] = collections.Counter()
        self.under_way: dict = {}

    def attempt_round(self, kind: str, seed: int, *arguments) -> None:
        from tests.fuzz import run

        self.rounds[kind] += 1
        self.under_way = {"kind": kind, "seed": seed}
        self.attempt(run.run, kind, seed, *arguments)

    def attempt(self, what, *arguments) -> None:
        try:
            what(*arguments)
        except Exception as e:
            self.failures.append(str(e))
            progress.say(f"FAILED {e}")

    def summary(self) -> dict:
        # The modules are imported under the time limit.
        checks, run = (sys.modules.get(f"tests.fuzz.{name}") for name in ("checks", "run"))
        failures = len(self.failures)
        if unfinished := getattr(run, "found", None):
            failures += 1
            progress.say(f"FAILED, not made small yet: {unfinished}")
        counts = {name: dict(getattr(checks, name, {})) for name in ("inputs", "calls")}
        return {"rounds": dict(self.rounds), **counts, "failures": failures, "under_way": self.under_way}


def _fuzz(args: argparse.Namespace, seed: int, found: Found) -> None:
    from tests.common import frontends
    from tests.fuzz import checks, regressions, run
    from tests.fuzz.programs import forget

    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about the overflows that inputs ask for
    chosen = []
    for frontend in frontends.ALL.values():
        if args.frontend and frontend.name not in args.frontend:
            continue
        if reason := frontend.unavailable():
            progress.say(f"without {frontend.name}: {reason}")
        else:
            chosen.append(frontend)
    if not chosen:
        sys.exit("no front end to fuzz")
    for x in regressions.CASES.values():
        found.attempt(checks.check, x, chosen)
    kinds = args.kind or list(run.KINDS)
    if args.examples:
        for kind in kinds:
            found.attempt_round(kind, seed, args.examples, chosen)
        return
    turns, weights = random.Random(seed), [run.WEIGHTS[kind] for kind in kinds]
    while True:  # the reporter ends it
        (kind,) = turns.choices(kinds, weights)
        found.attempt_round(kind, seed, EXAMPLES, chosen)
        seed = (seed + 1) % 2**32
        forget()


class Worker:
    """A process that fuzzes, and the last summary that it printed."""

    def __init__(self, command: list[str]) -> None:
        self.summary: dict = {"seconds": 0, "failures": 0}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self.summary = json.loads(line)
                elif not line.startswith(("without", "seed")):
                    progress.say(f"[{self.process.pid}] {line.rstrip()}")

    def running(self) -> bool:
        return self.process.poll() is None

    def end(self) -> bool:
        """Whether it has ended by itself, as its summary says. One that runs is killed. All it printed is read then."""
        status = self.process.poll()
        if status is None:
            self.process.kill()
        self._reader.join(0.5)
        ok = status == (1 if self.summary["failures"] else 0)
        if not ok:
            ended = "did not end" if status is None else f"ended with {status}"
            if at := self.summary.get("under_way"):
                ended += f" in a round of {at['kind']} with seed {at['seed']}"
            progress.say(f"FAILED: process {self.process.pid} {ended}; its last summary: {json.dumps(self.summary)}")
        return ok


def wait_for_end(workers: Sequence[Worker], seconds: float) -> None:
    """Returns when all have ended, after SIGTERM or SIGINT, and after ``seconds`` at the latest."""
    started = time.monotonic()
    while any(worker.running() for worker in workers) and (left := seconds - (time.monotonic() - started)) > 0:
        if signal.sigtimedwait(progress.ENDS, min(0.2, left)):
            return


def _in_processes(args: argparse.Namespace, seed: int) -> None:
    started = time.monotonic()
    limit = float("inf") if args.examples else args.minutes * 60
    given = _without(sys.argv[1:], "--jobs", "--seed", "--minutes", "--every")
    command = [sys.executable, "-m", "tests.fuzz", *given]
    command += [f"--minutes={max(limit - AHEAD, 0) / 60}"] if not args.examples else []
    command += [f"--every={min(args.every, 5)}"]
    # Seeds far apart: a process goes on from its own, one by one.
    seeds = [(seed + i * 2**24) % 2**32 for i in range(args.jobs)]
    workers = [Worker([*command, f"--seed={s}"]) for s in seeds]

    def total(crashed: int = 0) -> dict:
        done = [worker.summary for worker in workers]
        counts = {name: collections.Counter() for name in COUNTS}
        for name, count in counts.items():
            for x in done:
                count.update(x.get(name, {}))
        return {
            "seconds": round(time.monotonic() - started, 1),
            "process_minutes": round(sum(x["seconds"] for x in done) / 60, 1),
            **counts,
            "failures": sum(x["failures"] for x in done) + crashed,
        }

    due = args.every
    while any(worker.running() for worker in workers) and (left := limit - (time.monotonic() - started)) > 1:
        if signal.sigtimedwait(progress.ENDS, min(0.2, left)):
            limit = min(limit, time.monotonic() - started + AHEAD)
            for worker in workers:
                worker.process.terminate()
        elif time.monotonic() - started >= due:
            progress.say(json.dumps(total()))
            due += args.every
    if late := [worker for worker in workers if worker.running()]:
        progress.say(json.dumps(total()))
        progress.say(f"{len(late)} processes have not ended: they have {GRACE} s more")
        wait_for_end(late, GRACE)
    summary = total(crashed=sum(not worker.end() for worker in workers))
    progress.say(json.dumps(summary))
    sys.exit(1 if summary["failures"] else 0)


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
    main()
