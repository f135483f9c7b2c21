"""The bounded run of the fuzzer. XLA_GPU_FUZZ_SEED takes other inputs than the usual ones; a failure says which seed it
was, and the smallest input that shows it, to be kept in regressions.py. For hours: python -m tests.fuzz."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import doors
from tests.fuzz import checks, regressions

SEED = int(os.environ.get("XLA_GPU_FUZZ_SEED", "2026"))
# Inputs through the eager door, which takes a millisecond where the others compile each program; and through all doors.
EAGER = {"attention": 220, "hostile": 500, "update": 500, "merge": 300, "add": 300}
ALL_DOORS = {"attention": 25, "hostile": 40, "update": 25, "merge": 15, "add": 15}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the overflows that inputs ask for


def available(platform: str) -> list[doors.Door]:
    found = [door for door in doors.ALL.values() if door.platform == platform and not door.unavailable()]
    return found or pytest.skip(f"no {platform} door can be opened")


PLATFORMS = [pytest.param("host"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", regressions.CASES)
def test_what_once_failed(platform, name):
    checks.check(regressions.CASES[name], available(platform))


@pytest.mark.parametrize("kind", EAGER)
@pytest.mark.doors("eager", "eager-cuda")
def test_eager(door, kind):
    run = pytest.importorskip("tests.fuzz.run")  # needs hypothesis
    run.run(kind, SEED, EAGER[kind], [door])


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("kind", ALL_DOORS)
def test_all_doors(platform, kind):
    run = pytest.importorskip("tests.fuzz.run")
    run.run(kind, SEED + 1, ALL_DOORS[kind], available(platform))


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_other_instruction_sets(isa):
    """The host kernels that this processor would not choose, in a process of its own, and with one thread."""
    pytest.importorskip("tests.fuzz.run")
    if reason := doors.ALL["eager"].unavailable():
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--door=eager", f"--seed={SEED + 2}", "--examples=60"],
        env=os.environ | {"XLA_GPU_HOST_ISA": isa, "XLA_GPU_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-3000:]


def test_a_fault_is_found_and_made_small(monkeypatch):
    """The fuzzer itself: an operator that takes windows of over 3 keys for windows of 2."""
    run = pytest.importorskip("tests.fuzz.run")
    door = doors.ALL["eager"]
    if reason := door.unavailable():
        pytest.skip(reason)
    right = checks.program

    def wrong(door, operator, options):
        window = options["sliding_window"]
        return right(door, operator, options | {"sliding_window": 2 if (window or 0) > 3 else window})

    monkeypatch.setattr(checks, "program", wrong)
    with pytest.raises(run.Failure, match=r"attention, seed 1: [^\n]* error .*\n.*\n.*sliding_window=4\b") as caught:
        run.run("attention", 1, 200, [door])
    (batch,) = caught.value.input.batches
    assert len(batch) == 1
