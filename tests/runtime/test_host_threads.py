"""The threads and the instructions of eager CPU calls, and the processors of this process."""

from __future__ import annotations

import functools
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


@functools.cache  # a process imports PyTorch
def run(threads: str, isa: str) -> tuple[int, str]:
    """The threads of a process after two calls, and what it wrote to stderr."""
    settings = {"XLA_GPU_NUM_THREADS": threads, "XLA_GPU_HOST_ISA": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=os.environ | settings, capture_output=True, text=True, check=True
    )
    return int(done.stdout), done.stderr


def test_values_that_are_none_are_named_once():
    _, text = run("abc", "avx")
    for wrong in (
        'xla_gpu: XLA_GPU_NUM_THREADS: expected an integer of 1 or more, got "abc": not used',
        'xla_gpu: XLA_GPU_HOST_ISA: expected baseline, avx2 or avx512, got "avx": not used',
    ):
        assert text.count(wrong) == 1


@pytest.mark.parametrize(("threads", "isa"), [("1", "baseline"), ("5", "avx2"), ("1", "avx512")])
def test_values_that_are_right_are_not_named(threads, isa):
    assert "xla_gpu" not in run(threads, isa)[1]


def test_as_many_threads_as_it_says():
    assert run("5", "avx2")[0] - run("1", "baseline")[0] == 4


def test_processors_of_the_affinity_mask_at_most():
    assert 1 <= library.load().build_info()["host_processors"] <= len(os.sched_getaffinity(0))
