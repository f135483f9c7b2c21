"""How many threads eager CPU calls use: XLA_GPU_NUM_THREADS, and what this process may keep busy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from xla_gpu._runtime import library

CALL = """
import os, torch, xla_gpu.torch as xg
x = torch.ones(1 << 20)
assert xg.simple_add(x, x)[-1] == 2
assert xg.simple_add(x, x)[-1] == 2
print(len(os.listdir("/proc/self/task")))
"""


def run(threads: str, **environment: str) -> tuple[int, str]:
    """The threads of a process after two calls, and what it wrote to stderr."""
    environment = os.environ | {"XLA_GPU_NUM_THREADS": threads, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout), done.stderr


def test_a_number_that_is_none_is_named_once():
    _, text = run("abc")
    wrong = 'xla_gpu: XLA_GPU_NUM_THREADS: expected an integer of 1 or more, got "abc": not used'
    assert text.count(wrong) == 1
    assert "XLA_GPU_NUM_THREADS" not in run("3")[1]


def test_as_many_threads_as_it_says():
    assert run("5")[0] - run("1")[0] == 4


def test_processors_of_the_affinity_mask_at_most():
    assert 1 <= library.load().build_info()["host_processors"] <= len(os.sched_getaffinity(0))


def test_instructions_that_are_none_are_named_once():
    wrong = 'xla_gpu: XLA_GPU_HOST_ISA: expected baseline, avx2 or avx512, got "avx": not used'
    assert run("2", XLA_GPU_HOST_ISA="avx")[1].count(wrong) == 1
    for isa in ("baseline", "avx2", "avx512"):
        assert "XLA_GPU_HOST_ISA" not in run("2", XLA_GPU_HOST_ISA=isa)[1]
