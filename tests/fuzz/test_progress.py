"""What a run of the fuzzer says when it is ended: what it checked is known where its machine is taken away."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.common import frontends
from tests.fuzz.__main__ import Found, Worker, wait_for_end

COMMAND = [sys.executable, "-m", "tests.fuzz", "--frontend=eager", "--kind=add", "--every=0.5"]


@pytest.fixture(autouse=True)
def _fuzzer():
    pytest.importorskip("hypothesis")
    if reason := frontends.ALL["eager"].unavailable():
        pytest.skip(reason)


@pytest.mark.parametrize("jobs", [1, 2])
def test_ended_by_a_signal(jobs):
    with subprocess.Popen([*COMMAND, f"--jobs={jobs}"], stdout=subprocess.PIPE, text=True) as process:
        summaries = (json.loads(line) for line in process.stdout if line.startswith("{"))
        first = next(x for x in summaries if x["inputs"].get("simple_add"))
        process.send_signal(signal.SIGTERM)
        *_, last = summaries
        assert process.wait(30) == 0
    assert last["inputs"]["simple_add"] >= first["inputs"]["simple_add"]
    assert last["failures"] == 0


def test_ended_by_its_time_limit():
    result = subprocess.run([*COMMAND, "--minutes=0.05"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert 3 <= json.loads(result.stdout.splitlines()[-1])["seconds"] < 10


def test_a_process_that_ends_early_is_a_failure():
    command = [*COMMAND, "--jobs=2", "--kind=nothing"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert json.loads(result.stdout.splitlines()[-1])["failures"] == 2
    assert result.stdout.count("ended with 2") == 2


def test_a_failure_that_is_not_small_yet_is_told(monkeypatch, capsys):
    run = pytest.importorskip("tests.fuzz.run")
    found = Found()
    assert found.summary()["failures"] == 0
    monkeypatch.setattr(run, "found", run.Failure("add", 7, "an input", AssertionError("wrong")))
    assert found.summary()["failures"] == 1
    assert "add, seed 7: wrong" in capsys.readouterr().out


def a_process_that(does):
    """Prints a summary, then does this."""
    summary = json.dumps({"seconds": 89.0, "failures": 0, "under_way": {"kind": "linear", "seed": 7}})
    return Worker([sys.executable, "-c", f"import time; print({summary!r}, flush=True); {does}"])


def test_a_process_that_ends_late_is_waited_for(capsys):
    worker = a_process_that("time.sleep(1)")
    wait_for_end([worker], 60)
    assert worker.end()
    assert worker.summary["seconds"] == 89.0
    assert not capsys.readouterr().out


def test_a_process_that_hangs_is_a_failure(capsys):
    worker = a_process_that("time.sleep(600)")
    while worker.running() and not worker.summary["seconds"]:
        time.sleep(0.01)
    wait_for_end([worker], 0.5)
    assert not worker.end()
    assert worker.process.wait() < 0
    assert "did not end in a round of linear with seed 7; its last summary: {" in capsys.readouterr().out
