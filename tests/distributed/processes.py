"""Programs of several processes: jax.distributed over CPU devices as over hosts, or with a GPU for each process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.common.machine import ROOT


def run(program: str, count: int, *arguments: str, timeout: float = 300, **environment: str) -> list[str]:
    """What each of ``count`` processes prints, ``python -c program PORT RANK *arguments`` each; fails if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(port), str(rank), *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outs = []
        for process in processes:
            out, error = process.communicate(timeout=timeout)
            assert process.returncode == 0, out + error[-3000:]
            outs.append(out)
        return outs
    finally:
        for process in processes:
            process.kill()
