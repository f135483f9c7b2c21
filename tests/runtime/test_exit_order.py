"""Rank 0 of torchrun ends after the others, whose processes XLA would abort otherwise. Without a GPU or XLA."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch_xla")
torch = pytest.importorskip("torch")

RANK = """
import sys
from xla_gpu._torch_xla import exit_order
exit_order.rank_0_ends_last(int(sys.argv[1]), 2)
import threading
[thread.join() for thread in threading.enumerate() if thread.name == "xla_gpu exit order"]
print("arranged", flush=True)
exec(sys.argv[2])
"""


@pytest.fixture
def rank():
    """Starts one; its second argument is what the rank does. The store stands for that of torchrun's agent."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PJRT_DEVICE": "CPU",
    }
    started = []

    def start(number, does):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen([sys.executable, "-c", RANK, str(number), does], env=environ, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_rank_0_ends_after_the_others(rank):
    other, first = rank(1, "input()"), rank(0, "print('done', flush=True)")
    assert other.stdout.readline() == first.stdout.readline() == "arranged\n"
    assert first.stdout.readline() == "done\n"
    time.sleep(0.5)
    assert first.poll() is None
    other.communicate("\n")
    assert (other.returncode, first.wait(30)) == (0, 0)


def test_a_rank_has_ended_when_its_process_is_gone(rank):
    """XLA's threads run on behind the interpreter's end, until then."""
    other = rank(1, "import ctypes; libc = ctypes.CDLL(None); libc.on_exit(libc.pause, None)")
    first = rank(0, "print('done', flush=True)")
    assert other.stdout.readline() == first.stdout.readline() == "arranged\n"
    assert first.stdout.readline() == "done\n"
    time.sleep(2)
    assert first.poll() is None
    other.kill()
    assert first.wait(30) == 0


def test_rank_0_does_not_wait_after_an_error(rank):
    """Others may wait for it, in a sum: torchrun ends them when this rank has ended."""
    other, first = rank(1, "input()"), rank(0, "input(); raise SystemError('of this test')")
    assert other.stdout.readline() == first.stdout.readline() == "arranged\n"
    output, _ = first.communicate("\n", timeout=30)
    assert first.returncode == 1 and "of this test" in output
    assert other.poll() is None


def test_nothing_happens_without_torchruns_agent(rank, monkeypatch):
    from xla_gpu._torch_xla import exit_order

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(exit_order.threading, "Thread", lambda **kwargs: pytest.fail("a thread was started"))
    exit_order.rank_0_ends_last(0, 2)
