"""Continuous batching: which tokens of which requests go into the next step.

Each step takes one token of every request that is generating and fills what is left of its rows with the next chunks
of prompts. A request is admitted when a seat and all the pages that it can ever need are free, in order of arrival:
every running request can finish, so there is no deadlock and nothing is computed twice.

The scheduler runs one step ahead of the device. A token that the device has chosen but the host has not read is
*pending*; the step that continues from it names the row of the step before instead of the token's id.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from .allocator import PageAllocator
from .batch import StepLayout


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt to continue, and how far that has come."""

    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()

    generated: list[int] = dataclasses.field(default_factory=list)  # ends with the end-of-sequence token, if it came
    pages: list[int] = dataclasses.field(default_factory=list)
    scheduled: int = 0  # tokens whose K and V are in the cache, or will be after the steps scheduled so far
    sampled: int = 0  # tokens chosen by those steps; one more than len(generated) while one is pending
    row: int = -1  # this request's place among the sequences of the step scheduled last
    finished: bool = False
    number: int = 0  # in order of arrival

    @property
    def left(self) -> int:
        """Tokens that have no place in the cache yet: many while the prompt is read, then one."""
        return len(self.prompt) + self.sampled - self.scheduled

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that will be stored; the last token generated is not."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclasses.dataclass(frozen=True)
class Row:
    """What one sequence does in a step: `count` tokens from position `start` on."""

    request: Request
    start: int
    count: int
    samples: bool  # the last of them is the last known token, so the step chooses the next one


@dataclasses.dataclass(frozen=True)
class Step:
    layout: StepLayout
    rows: list[Row]
    packed: np.ndarray  # see StepLayout
    mixed: bool  # of the layout for prompts, rather than the one for decoding
    prompt_tokens: int  # prompt tokens stored by this step


class Scheduler:
    """Packs requests into steps of two layouts: `mixed`, of `chunk` rows, and `decode`, of `max_seqs` rows."""

    def __init__(self, *, num_pages: int, page_size: int, max_seqs: int, chunk: int, max_tokens: int):
        """max_tokens: the longest sequence to store, in tokens; it sets the width of the block table."""
        for name, value in (("page_size", page_size), ("max_seqs", max_seqs), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if chunk < max_seqs:
            raise ValueError(f"chunk: expected at least max_seqs = {max_seqs}, a row for each sequence, got {chunk}")
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        pages_per_seq = self._pages_for(max_tokens)
        self.mixed = StepLayout(chunk, max_seqs, pages_per_seq)
        self.decode = StepLayout(max_seqs, max_seqs, pages_per_seq)
        self.waiting: collections.deque[Request] = collections.deque()
        self._added = 0
        self.running: list[Request] = []

    @property
    def layouts(self) -> tuple[StepLayout, StepLayout]:
        return self.mixed, self.decode

    @property
    def idle(self) -> bool:
        """Whether every request that was added is finished."""
        return not self.waiting and not self.running

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises ValueError for one that could never run."""
        for request in requests:
            if not request.prompt:
                raise ValueError("a request needs a prompt of at least one token")
            if request.max_new_tokens < 1:
                raise ValueError(f"max_new_tokens: expected at least 1, got {request.max_new_tokens}")
            pages = self._pages_for(request.most_tokens)
            for limit, what in ((self.mixed.pages_per_seq, "the block table"), (self.allocator.num_pages, "the cache")):
                if pages > limit:
                    raise ValueError(
                        f"a prompt of {len(request.prompt)} tokens with {request.max_new_tokens} new ones needs "
                        f"{pages} pages of {self.page_size}, and {what} has {limit}"
                    )
            request.number = self._added
            self._added += 1
            self.waiting.append(request)

    def schedule(self) -> Step | None:
        """The next step, or None where there is nothing to do (until pending tokens are known)."""
        self._admit()
        # Requests whose last token is pending or known have one token to go; the others are reading their prompts.
        active = [request for request in self.running if request.sampled < request.max_new_tokens]
        generating = [request for request in active if request.sampled > 0]
        reading = [request for request in active if request.sampled == 0]
        if not active:
            return None

        rows, room = [], self.mixed.num_tokens
        for request in generating + reading:
            count = min(room, request.left)
            if count > 0:
                rows.append(Row(request, request.scheduled, count, samples=count == request.left))
                room -= count
        mixed = any(row.count > 1 for row in rows)
        layout = self.mixed if mixed else self.decode
        packed = self._pack(layout, rows)

        for index, row in enumerate(rows):
            row.request.row = index
            row.request.scheduled += row.count
            row.request.sampled += row.samples
        return Step(
            layout=layout,
            rows=rows,
            packed=packed,
            mixed=mixed,
            prompt_tokens=sum(row.count for row in rows if row.start < len(row.request.prompt)),
        )

    def commit(self, step: Step, chosen: Sequence[int]) -> int:
        """Takes in the tokens that a step chose, one of each sequence; returns how many belong to the output.

        Steps are committed in the order in which they were scheduled. A request that ended one step ago may have been
        scheduled once more in the meantime: that token is dropped.
        """
        new = 0
        for row, token in zip(step.rows, chosen, strict=False):
            request = row.request
            if not row.samples or request.finished:
                continue
            request.generated.append(int(token))
            new += 1
            if request.generated[-1] in request.eos_token_ids or len(request.generated) == request.max_new_tokens:
                self._finish(request)
        return new

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.mixed.max_seqs:
            pages = self.allocator.allocate(self._pages_for(self.waiting[0].most_tokens))
            if pages is None:
                return
            request = self.waiting.popleft()
            request.pages = pages
            self.running.append(request)

    def _finish(self, request: Request) -> None:
        # A step in flight may still write to these pages. Steps run in order on the device, so the next owner of the
        # pages writes later, and reads only what it wrote.
        request.finished = True
        self.running.remove(request)
        self.allocator.free(request.pages)
        request.pages = []

    def _pack(self, layout: StepLayout, rows: list[Row]) -> np.ndarray:
        packed = layout.empty()
        parts = layout.unpack(packed)
        at = 0
        for index, row in enumerate(rows):
            request, start, count = row.request, row.start, row.count
            positions = np.arange(start, start + count)
            pages = np.asarray(request.pages)
            span = slice(at, at + count)
            known = (request.prompt + request.generated)[start : start + count]
            parts["tokens"][at : at + len(known)] = known
            if len(known) < count:
                parts["sources"][at + len(known)] = request.row
            parts["positions"][span] = positions
            parts["slots"][span] = pages[positions // self.page_size] * self.page_size + positions % self.page_size
            parts["context_lens"][index] = start + count
            parts["block_tables"][index, : len(pages)] = pages
            parts["last_rows"][index] = at + count - 1
            parts["requests"][index] = request.number
            parts["choices"][index] = request.sampled
            at += count
            parts["query_start_loc"][index + 1] = at
        parts["query_start_loc"][len(rows) + 1 :] = at
        parts["num_seqs"][0] = len(rows)
        return packed


Launched = TypeVar("Launched")


def run(
    scheduler: Scheduler, launch: Callable[[Step], Launched], read: Callable[[Launched], Sequence[int]]
) -> Iterator[tuple[Step, int]]:
    """Serves until all requests are finished, with one step in flight while the next one is prepared.

    launch: starts a step on the device, without waiting; read: waits for what launch returned, and returns the tokens
    that the step chose. Yields each step when its tokens are known, and how many of them belong to the output.
    """
    in_flight: tuple[Step, Launched] | None = None
    while True:
        step = scheduler.schedule()
        launched = (step, launch(step)) if step else None
        if in_flight:
            done, chosen = in_flight
            yield done, scheduler.commit(done, read(chosen))
        if not launched and scheduler.idle:
            return
        in_flight = launched
