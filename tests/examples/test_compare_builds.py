"""benchmarks.compare_builds, of copies of the library, one of them with two handlers' names swapped."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import frontends, machine
from xla_gpu._runtime import library

pytest.importorskip("torch")
pytest.importorskip("hypothesis")
from benchmarks.compare_builds import __main__, builds, compare, random_calls, timed_loads

from tests.fuzz import run

ROOT = Path(__file__).parents[2]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> tuple[Path, Path]:
    """The library, and one whose silu_and_mul is gelu_and_mul, and the reverse."""
    folder = tmp_path_factory.mktemp("libraries")
    same, swapped = folder / "same.so", folder / "swapped.so"
    shutil.copy(library.find(), same)
    data = bytearray(same.read_bytes())
    names = [f"\0xla_gpu_{name}_and_mul\0".encode() for name in ("silu", "gelu")]
    places = [data.index(name) for name in names]
    assert [data.count(name) for name in names] == [1, 1]
    for place, name in zip(places, reversed(names), strict=True):
        data[place : place + len(name)] = name
    swapped.write_bytes(data)
    return same, swapped


def skip_without(device: str) -> None:
    if reason := frontends.ALL["eager-cuda" if device == "cuda" else "eager"].unavailable():
        pytest.skip(reason)


def compared(tmp_path: Path, *options: object) -> tuple[subprocess.CompletedProcess[str], dict]:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.compare_builds", *map(str, options), "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_has_the_same_bits(copies, device, tmp_path):
    skip_without(device)
    options = ["--before", library.find(), "--now", copies[0], "--device", device, "--bits", 4, "--seconds", 0]
    done, result = compared(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Both files have the same bytes" in done.stdout
    assert {name: found["calls"] for name, found in result["bits"].items()} == dict.fromkeys(random_calls.KINDS, 4)
    assert all(found["differ"] == found["unsteady"] == [] for found in result["bits"].values())


@pytest.mark.parametrize("device", DEVICES)
def test_other_bits_are_found_and_times_taken(copies, device, tmp_path):
    skip_without(device)
    options = ["--before", copies[0], "--now", copies[1], "--device", device, "--bits", 12, "--seed", 5]
    options += ["--operator", "simple_add", "silu_and_mul", "--loads", "simple_add 64 Ki", "--seconds", 30]
    done, result = compared(tmp_path, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    same, other = result["bits"]["simple_add"], result["bits"]["silu_and_mul"]
    assert same["calls"] == 12 and same["differ"] == []
    assert "same bytes" not in done.stdout
    assert f"silu_and_mul: 12 random calls, {len(other['differ'])} differ or fail, 0 differ in repeats" in done.stdout
    assert len(other["differ"]) >= 6  # calls of no elements have the same
    assert all(row["call"].startswith("Gated(") and row["before"] != row["now"] for row in other["differ"])
    (row,) = result["times"]
    assert row["load"] == "64 Ki" and row["us"]["before"] > 0 and row["us"]["now"] > 0
    assert "simple_add: now/before of 1 loads: " in done.stdout


def error_of(monkeypatch, capsys, *options: object) -> str:
    monkeypatch.setattr(sys, "argv", ["compare_builds", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    return f"{capsys.readouterr().err}{ended.value}"


def test_errors_name_the_library(copies, tmp_path, monkeypatch, capsys):
    """What one that does not load, a file twice and a missing one are told."""
    good, text = copies[0], tmp_path / "text.so"
    text.write_text("no library")
    for before, now, expected in (
        (good, text, f"--now: {text} cannot be loaded: it is not an ELF library"),
        (good, good, f"--before, --now: expected two libraries, got {good} twice"),
        (good, "none.so", "--now: expected a library, got none.so, which is not a file"),
    ):
        assert expected in error_of(monkeypatch, capsys, "--before", before, "--now", now, "--device", "cpu")


@pytest.mark.skipif(bool(machine.gpu_count()), reason="of a machine without a GPU")
def test_without_a_gpu_it_says_so(copies, monkeypatch, capsys):
    text = error_of(monkeypatch, capsys, "--before", copies[0], "--now", copies[1])
    assert "expected a GPU that PyTorch reaches, or --device cpu: no NVIDIA GPU on this machine" in text


def test_unknown_loads(copies, monkeypatch, capsys):
    options = ["--before", copies[0], "--now", copies[1], "--device", "cpu", "--seconds", 9]
    text = error_of(monkeypatch, capsys, *options, "--operator", "rms_norm", "--loads", "99 rows")
    assert "--loads: expected a part of one of rms_norm with residual 1 rows, " in text


def test_operators_without_loads_are_named(copies, monkeypatch, capsys):
    options = ["--before", copies[0], "--now", copies[1], "--device", "cpu", "--bits", 0, "--seconds", 9]
    monkeypatch.setattr(sys, "argv", ["compare_builds", *map(str, options), "--operator", "linear"])
    assert __main__.main() == 0
    assert "No loads to time, on cpu: linear\n" in capsys.readouterr().out


def test_a_library_without_cuda_is_refused_for_a_gpu(monkeypatch):
    from benchmarks.compare_builds import worker

    entries = [entry for entry in library.load().handlers() if entry.platform != "CUDA"]
    monkeypatch.setattr(library.Library, "handlers", lambda self: entries)
    with pytest.raises(ValueError, match="was built without CUDA; --device cpu compares its other half"):
        worker.Worker("cuda")


def test_a_process_that_died_is_replaced(copies):
    """What the call was that it died of must not be the end."""
    skip_without("cpu")
    (drawn,) = random_calls.draw("simple_add", 1, 0, "cpu")
    before, now = (builds.Build(name, copies[0], "cpu") for name in ("before", "now"))
    first = builds.both(before, now, "outcomes", drawn)
    assert first[0] == first[1]
    os.kill(now._process.pid, signal.SIGSTOP)
    now.ask("outcomes", drawn)
    os.kill(now._process.pid, signal.SIGKILL)
    with pytest.raises(builds.Failed, match="died of signal 9"):
        now.answer()
    assert builds.both(before, now, "outcomes", drawn) == first
    with pytest.raises(builds.Failed, match="AttributeError: 'Worker' object has no attribute 'nothing'"):
        now.call("nothing")
    with pytest.raises(builds.Failed, match=r"KeyError: 'CUDA error'"):  # with which a context is lost
        now.call("measure", "CUDA error", 1)
    assert not now._process.is_alive()
    assert builds.both(before, now, "outcomes", drawn) == first
    os.kill(now._process.pid, signal.SIGKILL)
    now._process.join()
    now.path = Path("gone.so")
    same, failed = builds.both(before, now, "outcomes", drawn)
    assert same == first[0] and re.search("names .*gone.so, which is not a file", str(failed))
    before.close()
    now.close()


# ---- Parts of it


def test_random_calls_are_of_all_the_fuzzers_kinds_and_of_a_seed():
    assert sorted(itertools.chain(*random_calls.KINDS.values())) == sorted(run.KINDS)
    first, again, other = (random_calls.draw("paged_attention", 30, seed, "cuda") for seed in (1, 1, 2))
    assert list(map(str, first)) == list(map(str, again)) != list(map(str, other))
    assert len(first) == 30
    kinds = {type(each.what).__name__ for each in first}
    assert kinds == {"Attention", "Hostile", "AttentionCase"}
    assert "AttentionCase" not in {type(e.what).__name__ for e in random_calls.draw("paged_attention", 30, 1, "cpu")}


class FakeBuild:
    """Answers from lists."""

    def __init__(self, name: str, **answers: list) -> None:
        self.name, self.answers, self.asked = name, {key: iter(values) for key, values in answers.items()}, []

    def ask(self, method, *arguments):
        self.asked.append((method, *arguments))

    def answer(self):
        answer = next(self.answers[self.asked[-1][0]])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, *request):
        self.ask(*request)
        return self.answer()


def test_outcomes_that_differ_fail_or_are_unsteady():
    lost = builds.Failed("RuntimeError: CUDA error")
    before = FakeBuild("before", outcomes=[["a", "a"], ["b", "b"], ["c", "c"], lost, ["e", "e"], ["ValueError: x"] * 2])
    now = FakeBuild("now", outcomes=[["a", "a"], ["B", "B"], ["c", "C"], lost, lost, ["ValueError: x"] * 2])
    found = compare.bits(before, now, ["first", "second", "third", "fourth", "fifth", "sixth"])
    assert found["calls"] == 6
    assert [row["call"] for row in found["differ"]] == ["second", "fourth", "fifth"]
    assert [row["call"] for row in found["unsteady"]] == ["third"]
    text = compare.text_of_bits("linear", found, shown=3)
    assert text.startswith("linear: 6 random calls, 3 differ or fail, 1 differ in repeats\n  second\n    before b\n")
    assert "    now    failed: RuntimeError: CUDA error" in text and text.endswith("and 1 more (--json has all)")


def test_builds_take_turns_and_the_least_median_counts():
    prepared = {"names": ["xla_gpu", "FA3"], "bytes": 2e6}
    # The first turn is not counted: one of the GPU at another clock.
    before = FakeBuild("before", prepare=[prepared], measure=[4.0, 3.0, 10.0, 7.0, 12.0, 8.0, 11.0, 9.0])
    now = FakeBuild("now", prepare=[prepared], measure=[2.0, 6.0, 5.0, 9.0])
    loads = [timed_loads.Load("paged_attention", "8x4k", None)]
    (row,) = compare.times(before, now, loads, 60)
    assert row["readings"] == {"before": [10.0, 12.0, 11.0], "now": [6.0, 5.0, 9.0], "FA3": [7.0, 8.0, 9.0]}
    assert row["us"] == {"before": 10.0, "now": 5.0, "FA3": 7.0}
    assert row["ratio"] == 0.5 and row["noise"] == 1.8
    words = "paged_attention 8x4k 2.0 10.00 5.00 0.500 1.80 FA3 7.00"
    assert compare.text_of_times(row).split() == words.split()
    failed = FakeBuild("now", prepare=[builds.Failed("OutOfMemoryError: CUDA out of memory")])
    (row,) = compare.times(FakeBuild("before", prepare=[prepared]), failed, loads, 60)
    assert row["error"] == "now: OutOfMemoryError: CUDA out of memory"
    assert list(compare.times(before, now, loads, 0)) == []


def test_loads_of_operators_come_in_turns():
    found = timed_loads.of(["sample", "linear", "bidirectional_attention"], 1, 0, "cuda")
    assert [load.operator for load in found[:4]] == ["sample", "linear"] * 2
    assert found[1].name == "bfloat16 qkv 1 rows"
    names = [(load.operator, load.name) for load in timed_loads.of(list(random_calls.KINDS), 2, 0, "cuda")]
    assert len(names) == len(set(names)) > 300
    assert set(timed_loads.SOURCES) <= set(random_calls.KINDS)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", timed_loads.SOURCES)
def test_loads_are_prepared(operator):
    """The first of each operator."""
    skip_without("cuda")
    import torch

    prepared = timed_loads.prepare(timed_loads.of([operator], 1, 0, "cuda")[0], "cuda")
    for call in prepared.calls["xla_gpu"]:
        call()
    torch.cuda.synchronize()
    assert prepared.bytes > 0
