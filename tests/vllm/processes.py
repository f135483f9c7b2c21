"""Programs in processes of their own, for what is of a whole process: SPMD, the sizes of engines, patched modules.

On a CPU they are forked from a process that has imported vLLM and started nothing, as vLLM forks its own engines: the
imports take ten seconds. On GPUs each is a new interpreter.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.common import machine

IMPORTED = ["tests.vllm.engines", "tests.vllm.tiny", "vllm.v1.engine.core", "xla_gpu.vllm.worker"]


@dataclasses.dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str

    def line(self) -> str:
        """The one line of output that begins with RESULT, without that word."""
        lines = [line for line in self.stdout.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == 1, f"exit status {self.returncode}: {self.stderr[-3000:]}"
        return lines[0].removeprefix("RESULT ")


def run(command: list[str], timeout: float = 600, **environment: str) -> Result:
    """Runs what would follow ``python``: "-m", a module and its arguments, or "-c", a text and its arguments.

    ``environment``: variables beside those of this process; those that are read by an import take ``run_anew``.
    """
    if os.environ.get("PJRT_DEVICE", "").upper() == "GPU":
        return run_anew(command, timeout, **environment)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "stdout"), Path(folder, "stderr")
        for path in paths:  # which are read also where the process ends before it has begun
            path.touch()
        process = context.Process(target=_main, args=(command, environment, *map(str, paths)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"no end after {timeout} s: {paths[1].read_text()[-3000:]}")
        return Result(process.exitcode, *(path.read_text() for path in paths))


def run_anew(command: list[str], timeout: float = 600, **environment: str) -> Result:
    """The same in a new interpreter."""
    path = os.pathsep.join([str(machine.ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=machine.ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def _main(command: list[str], environment: dict[str, str], *paths: str) -> None:
    for descriptor, path in enumerate(paths, start=1):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(environment)
    kind, program, *arguments = command
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, {"__name__": "__main__"})
