"""What a fuzzing process has done so far: a line of JSON every few seconds, when it is told to end, and at its time
limit. A thread prints it, and ends the process: the one that fuzzes may be in a compiler or a kernel, for seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

ENDS = {signal.SIGTERM, signal.SIGINT}
printing = threading.Lock()


def block_signals() -> None:
    """To be called before libraries start threads, which inherit the mask: the signals are for Reporter's thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)


def say(text: str) -> None:
    with printing:
        print(text, flush=True)


class Reporter:
    """Prints `summary()` every `every` seconds. After `limit` seconds, where there is one, and after SIGTERM or SIGINT
    it prints the last one and ends the process, with 1 if something failed."""

    def __init__(self, summary: Callable[[], dict], every: float, limit: float | None) -> None:
        self.started = time.monotonic()
        self._summary, self._every, self._limit = summary, every, limit
        self._ended = threading.Lock()
        threading.Thread(target=self._report, daemon=True).start()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def end(self) -> None:
        """The last summary, and the end of the process, which waits for no other thread."""
        with self._ended:  # never released: one thread ends the process
            status = 1
            try:
                status = self._print()
                sys.stdout.flush()
            finally:
                os._exit(status)

    def _print(self) -> int:
        summary = {"seconds": round(self.elapsed(), 1), **self._summary()}
        say(json.dumps(summary))
        return 1 if summary["failures"] else 0

    def _report(self) -> None:
        try:
            while True:
                left = float("inf") if self._limit is None else self._limit - self.elapsed()
                if left <= 0 or signal.sigtimedwait(ENDS, min(left, self._every)):
                    return self.end()
                if left > self._every:
                    self._print()
        except BrokenPipeError:  # nobody reads
            os._exit(1)
