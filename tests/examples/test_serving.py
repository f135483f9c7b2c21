"""The serving example's bookkeeping: pages, admission, chunks, and what a device would compute from packed steps."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from paged_llama.allocator import PageAllocator
from paged_llama.batch import StepLayout
from paged_llama.scheduler import Request, Scheduler, run
from paged_llama.tokens import ByteTokenizer, read_prompts

VOCABULARY = 50


def next_token(text: list[int]) -> int:
    """Stands in for a model: depends on every token and on the order."""
    value = 7
    for token in text:
        value = (value * 31 + token + 1) % 1000003
    return value % VOCABULARY


def continuation(request: Request) -> list[int]:
    text, new = list(request.prompt), []
    while len(new) < request.max_new_tokens and not (new and new[-1] in request.eos_token_ids):
        new.append(next_token(text))
        text.append(new[-1])
    return new


class Device:
    """Runs packed steps as the model would, on a cache that remembers which token at which position a slot holds."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.cache: dict[int, tuple[int, int]] = {}
        self.previous = np.zeros(scheduler.mixed.max_seqs, np.int32)
        self.steps = []

    def launch(self, step):
        assert step.layout in self.scheduler.layouts
        assert step.packed.shape == (step.layout.size,) and step.packed.dtype == np.int32
        self.steps.append(step)
        parts = step.layout.unpack(step.packed)
        tokens = np.where(parts["sources"] < 0, parts["tokens"], self.previous[np.maximum(parts["sources"], 0)])
        (count,) = parts["num_seqs"]
        starts = parts["query_start_loc"]
        assert starts[0] == 0 and (np.diff(starts) >= 0).all() and (starts[count:] == starts[count]).all()
        live = starts[count]
        assert (parts["slots"][live:] == -1).all(), "padding must not be stored"
        slots = parts["slots"][:live].tolist()
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        self.cache |= dict(zip(slots, zip(parts["positions"].tolist(), tokens.tolist(), strict=True), strict=False))

        chosen = np.full(step.layout.max_seqs, -1, np.int32)
        size = self.scheduler.page_size
        for i in range(count):
            length = parts["context_lens"][i]
            assert starts[i + 1] > starts[i] and parts["last_rows"][i] == starts[i + 1] - 1
            last_position = parts["positions"][parts["last_rows"][i]]
            assert last_position == length - 1
            seen = [self.cache[int(parts["block_tables"][i, p // size]) * size + p % size] for p in range(length)]
            assert [position for position, _ in seen] == list(range(length)), "a slot of somebody else"
            chosen[i] = next_token([token for _, token in seen])
        self.previous = chosen
        return chosen


def serve(scheduler: Scheduler, requests: list[Request]) -> Device:
    device = Device(scheduler)
    scheduler.add(requests)
    for step, new in run(scheduler, device.launch, lambda chosen: chosen.tolist()):
        assert 0 <= new <= len(step.rows)
        assert len(scheduler.running) <= scheduler.mixed.max_seqs
        owned = [page for request in scheduler.running for page in request.pages]
        assert len(set(owned)) == len(owned) == scheduler.allocator.num_used
    return device


def make(**changes) -> Scheduler:
    sizes = {"num_pages": 16, "page_size": 4, "max_seqs": 3, "chunk": 8, "max_tokens": 32}
    return Scheduler(**(sizes | changes))


# ---- Pages -----------------------------------------------------------------------------------------------------------


def test_allocator_hands_out_each_page_once_and_takes_it_back():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(3), allocator.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.allocate(1) is None
    assert allocator.num_free == 0 and allocator.num_used == 5
    allocator.free(first)
    assert sorted(allocator.allocate(3)) == sorted(first)
    assert allocator.peak_used == 5 and allocator.handed_out == 8


def test_allocator_takes_nothing_where_it_cannot_give_all():
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


@pytest.mark.parametrize("page", [-1, 2, 3])
def test_allocator_refuses_a_page_that_is_not_in_use(page):
    allocator = PageAllocator(3)
    pages = allocator.allocate(3)
    allocator.free([2])
    with pytest.raises(ValueError, match=rf"page {page} is not in use \(the cache has pages 0 to 2\)"):
        allocator.free([page])
    allocator.free([p for p in pages if p != 2])
    assert allocator.num_free == 3


# ---- Admission and chunks --------------------------------------------------------------------------------------------


def test_a_request_waits_until_its_pages_are_free():
    scheduler = make(num_pages=5)
    long, short = Request([1] * 13, 4), Request([2] * 2, 3)  # 4 pages and 1
    late = Request([3] * 5, 1)  # 2 pages
    device = serve(scheduler, [long, short, late])
    assert [row.request for row in device.steps[0].rows] == [long]
    first_of_late = next(i for i, s in enumerate(device.steps) if any(row.request is late for row in s.rows))
    last_of_short = max(i for i, s in enumerate(device.steps) if any(row.request is short for row in s.rows))
    assert first_of_late > last_of_short
    assert scheduler.allocator.peak_used == 5 and scheduler.allocator.num_used == 0


def test_no_request_overtakes_the_one_that_waits_first():
    scheduler = make(num_pages=5)
    first, big, small = Request([1] * 4, 5), Request([2] * 13, 4), Request([3], 1)
    device = serve(scheduler, [first, big, small])
    order = [row.request for step in device.steps for row in step.rows]
    assert order.index(big) < order.index(small)


def test_a_long_prompt_is_cut_into_chunks_beside_a_request_that_generates():
    scheduler = make(max_seqs=2)
    short, long = Request([5], 6), Request(list(range(20)), 2)
    device = serve(scheduler, [short, long])
    chunks = [(row.start, row.count) for step in device.steps for row in step.rows if row.request is long]
    # Seven rows are left of eight: one goes to the other request in each step, be it prompt or new token.
    assert chunks == [(0, 7), (7, 7), (14, 6), (20, 1)]
    assert all(step.mixed == any(row.count > 1 for row in step.rows) for step in device.steps)
    assert {step.layout for step in device.steps} == set(scheduler.layouts)


def test_a_request_ends_at_the_end_of_sequence_token_and_not_before():
    prompt = [4, 2]
    free = continuation(Request(prompt, 10))
    request = Request(prompt, 10, frozenset({free[3]}))
    serve(make(), [request])
    assert request.generated == free[: free.index(free[3]) + 1]
    assert request.finished


def test_a_token_computed_past_the_end_is_dropped():
    prompt = [4, 2]
    eos = frozenset({next_token(prompt)})
    request = Request(prompt, 10, eos)
    device = serve(make(), [request])
    assert request.generated == [next_token(prompt)]
    assert len(device.steps) == 2  # the second was under way when the first one's token became known


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "a prompt of at least one token"),
        (Request([1], 0), "max_new_tokens: expected at least 1, got 0"),
        (Request([1] * 40, 4), "a prompt of 40 tokens with 4 new ones needs 11 pages of 4, and the block table has 8"),
        (Request([1] * 20, 4), "a prompt of 20 tokens with 4 new ones needs 6 pages of 4, and the cache has 5"),
    ],
)
def test_a_request_that_could_never_run_is_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        make(num_pages=5).add([request_])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 2}, "chunk: expected at least max_seqs = 3, a row for each sequence, got 2"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"num_pages": 0}, "num_pages: expected at least 1, got 0"),
        ({"max_seqs": 0}, "max_seqs: expected at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


# ---- Random loads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_loads_come_out_right_and_leave_no_page_behind(seed):
    rng = np.random.default_rng(seed)
    page_size, max_seqs = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    chunk = max_seqs + int(rng.integers(0, 20))
    requests = [
        Request(
            rng.integers(VOCABULARY, size=rng.integers(1, 60)).tolist(),
            int(rng.integers(1, 20)),
            frozenset(rng.integers(VOCABULARY, size=rng.integers(0, 3)).tolist()),
        )
        for _ in range(rng.integers(1, 25))
    ]
    longest = max(request.most_tokens for request in requests)
    needed = -(-longest // page_size)
    scheduler = Scheduler(
        num_pages=needed + int(rng.integers(0, 2 * needed)),  # barely enough, or room for three of the longest
        page_size=page_size,
        max_seqs=max_seqs,
        chunk=chunk,
        max_tokens=longest,
    )
    device = serve(scheduler, requests)

    for request in requests:
        assert request.generated == continuation(request)
        assert request.finished and not request.pages
    assert scheduler.allocator.num_used == 0 and not scheduler.running and not scheduler.waiting
    assert sum(step.prompt_tokens for step in device.steps) == sum(len(request.prompt) for request in requests)
    for step in device.steps:
        assert sum(row.count for row in step.rows) <= step.layout.num_tokens


def test_pages_are_used_again():
    scheduler = make(num_pages=8, max_seqs=2)
    requests = [Request([i] * 10, 5) for i in range(20)]
    serve(scheduler, requests)
    assert scheduler.allocator.handed_out == 20 * 4 > scheduler.allocator.num_pages
    assert [request.generated for request in requests] == [continuation(request) for request in requests]


# ---- Packing and text ------------------------------------------------------------------------------------------------


def test_the_parts_of_a_layout_fill_it():
    layout = StepLayout(num_tokens=6, max_seqs=2, pages_per_seq=3)
    parts = layout.unpack(np.arange(layout.size))
    assert np.concatenate([part.ravel() for part in parts.values()]).tolist() == list(range(layout.size))
    assert parts["block_tables"].shape == (2, 3) and parts["query_start_loc"].shape == (3,)


def test_bytes_survive_the_byte_tokenizer():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("Grüße, 世界")
    assert ids[0] == tokenizer.bos and max(ids[1:]) < 256
    assert tokenizer.decode([*ids, tokenizer.eos]) == "Grüße, 世界"


def test_prompts_are_separated_by_dashes_on_a_line_of_their_own(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n---\n\ntwo\n\nparagraphs --- here\n---\n---\nlast\n")
    assert read_prompts(file) == ["one", "two\n\nparagraphs --- here", "last"]
    file.write_text("---\n")
    with pytest.raises(ValueError, match="no prompt in it"):
        read_prompts(file)


def test_the_prompts_of_the_example_differ_in_length():
    lengths = [len(text) for text in read_prompts(pathlib.Path(__file__).parents[2] / "examples" / "prompts.txt")]
    assert len(lengths) > 8 and min(lengths) < 20 and max(lengths) > 2000
