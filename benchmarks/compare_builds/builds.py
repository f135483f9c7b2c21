"""A build of the library in a process of its own, which loads it; a process that dies is replaced."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from benchmarks.compare_builds import worker


class Failed(Exception):
    """What the process could not do, or how it ended."""


class Build:
    def __init__(self, name: str, path: Path, device: str) -> None:
        self.name, self.path, self.device = name, path, device
        self._start()

    def _start(self) -> None:
        """Raises Failed where the library does not load."""
        context = multiprocessing.get_context("spawn")  # frameworks and CUDA do not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=worker.serve, args=(theirs, str(self.path), self.device), daemon=True)
        self._process.start()
        theirs.close()
        self.info: dict[str, Any] = self.answer()

    def ask(self, method: str, *arguments: Any) -> None:
        """Raises Failed where the process had died, and another one does not start."""
        if not self._process.is_alive():
            self._start()
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """Raises Failed."""
        try:
            well, result, ends = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            code = self._process.exitcode
            self._end()  # one that takes longer than that would be asked again
            ended = f"died of signal {-code}" if code is not None and code < 0 else f"ended with {code}"
            raise Failed(f"the process {ended}") from None
        if ends:  # where CUDA failed, which takes a while
            self._process.join(60)
            self._end()
        if not well:
            raise Failed(result)
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def close(self) -> None:
        self._connection.close()
        self._process.join(5)
        self._end()

    def _end(self) -> None:
        """Ends the process, if it runs, and waits until it has ended."""
        self._process.kill()
        self._process.join()


def both(before: Build, now: Build, method: str, *arguments: Any) -> list[Any]:
    """Their answers, which they work on at the same time; a Failed in the place of one."""
    found: list[Any] = [None, None]
    for step in ("ask", "answer"):
        for i, build in enumerate((before, now)):
            if isinstance(found[i], Failed):
                continue
            try:
                found[i] = build.ask(method, *arguments) if step == "ask" else build.answer()
            except Failed as error:
                found[i] = error
    return found
