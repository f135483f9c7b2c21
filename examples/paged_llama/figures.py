"""What a run of the server measures, and the loop that measures it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from .scheduler import Scheduler, Step, run

Launched = TypeVar("Launched")


@dataclasses.dataclass
class Phase:
    """The steps of one layout. Seconds are the host's, from one step's tokens to the next one's."""

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0  # stored
    new_tokens: int = 0  # generated

    def add(self, step: Step, new: int, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.prompt_tokens += step.prompt_tokens
        self.new_tokens += new


@dataclasses.dataclass
class Figures:
    """What a run measured."""

    seconds: float = 0.0
    mixed: Phase = dataclasses.field(default_factory=Phase)
    decode: Phase = dataclasses.field(default_factory=Phase)

    @property
    def new_tokens(self) -> int:
        return self.mixed.new_tokens + self.decode.new_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.mixed.prompt_tokens + self.decode.prompt_tokens

    def rates(self) -> dict[str, float]:
        """Tokens per second: prompt tokens in the mixed steps, new ones in the steps that only decode, and overall."""
        return {
            "prefill_tokens_per_second": _rate(self.mixed.prompt_tokens, self.mixed.seconds),
            "decode_tokens_per_second": _rate(self.decode.new_tokens, self.decode.seconds),
            "tokens_per_second": _rate(self.new_tokens, self.seconds),
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def serve(
    scheduler: Scheduler,
    launch: Callable[[Step], Launched],
    read: Callable[[Launched], Sequence[int]],
    compilations: Callable[[], int],
    on_tokens: Callable[[int, int], None],
) -> Figures:
    """Serves until all requests of the scheduler are finished; launch and read as scheduler.run takes them.

    on_tokens: told after each step how many prompt tokens were stored and how many new tokens came out.
    Raises RuntimeError if anything was compiled in the meantime.
    """
    compiled = compilations()
    figures = Figures()
    start = last = time.perf_counter()
    # Reading waits for that step alone; the one launched after it keeps the device busy meanwhile.
    for step, new in run(scheduler, launch, read):
        now = time.perf_counter()
        (figures.mixed if step.mixed else figures.decode).add(step, new, now - last)
        last = now
        on_tokens(step.prompt_tokens, new)
    figures.seconds = last - start
    if compilations() != compiled:
        raise RuntimeError(f"{compilations() - compiled} programs were compiled after the warm-up")
    return figures
