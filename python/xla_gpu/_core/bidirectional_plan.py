"""The batches of bidirectional_attention's two calls, in a framework's own operations.

Sequences get pages of their own, one after the other, each sequence from the begin of a page: once with its tokens in
their order, and once in the reverse one. No value of an array decides what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

# Few, since on average half a page of each sequence stays empty, and is filled as the others are.
SMALLEST_PAGE = 16


class Pages(NamedTuple):
    """Sizes of the temporary caches, from shapes alone."""

    page_size: int
    num_pages: int
    pages_per_seq: int


def pages(num_tokens: int, max_seqs: int, bytes_of_token: int) -> Pages:
    """Room for any max_seqs sequences of num_tokens tokens in all, with K and V of ``bytes_of_token`` each.

    A sequence may have all of the tokens, so that the block tables are large where there are many of both. Pages are as
    large as it takes for them to have no more bytes than the cache, or one page for each sequence.
    """
    size = SMALLEST_PAGE
    while True:
        num_pages = (num_tokens + min(max_seqs, num_tokens) * (size - 1)) // size
        pages_per_seq = math.ceil(num_tokens / size)
        if pages_per_seq <= 1 or 4 * max_seqs * pages_per_seq <= num_pages * size * bytes_of_token:
            return Pages(size, num_pages, pages_per_seq)
        size *= 2


class Arrays(NamedTuple):
    """What PyTorch and JAX do not name alike, of int32 arrays on the operands' device."""

    numpy: Any  # the module with where, clip, …: torch or jax.numpy
    arange: Callable[[int], Any]
    cumsum: Callable[[Any], Any]
    take: Callable[[Any, Any], Any]  # rows of an array, by integers that are in bounds
    count_up_to: Callable[[Any, Any], Any]  # of each integer, how many of the sorted ones are not above it


class Plan(NamedTuple):
    """Integers are int32."""

    is_sound: Any  # bool[1]: query_start_loc and num_seqs have values that they may have
    reverse: Any  # [num_tokens]: the row in the place of each where every sequence is reversed; padding stays
    tokens: Any  # [num_pages * page_size]: the token in each slot of the cache; any one in a slot that is not used
    reverse_tokens: Any  # the same of the cache of reversed sequences
    block_tables: Any  # [max_seqs, pages_per_seq], of both caches
    context_lens: Any  # [max_seqs]: a row sees the keys up to its own
    reverse_context_lens: Any  # [max_seqs]: one less, so that a row sees the keys in front of its own


def plan(arrays: Arrays, size: Pages, num_tokens: int, query_start_loc: Any, num_seqs: Any) -> Plan:
    """The plan of a batch. Where it is not sound, all indices are in bounds, and lengths fit their pages."""
    np, arange, cumsum, take, count_up_to = arrays
    max_seqs = query_start_loc.shape[0] - 1
    page_size, num_pages, pages_per_seq = size
    last_token, last_page = max(num_tokens - 1, 0), max(num_pages - 1, 0)

    # Of max_seqs + 1 sequences; those from num_seqs on are empty, and stand behind the last row of the others.
    sequence = arange(max_seqs + 1)
    live = np.clip(num_seqs, 0, max_seqs)
    begin = np.where(live > 0, take(query_start_loc, np.minimum(sequence, live)), 0)
    end = take(begin, np.clip(sequence + 1, 0, max_seqs))
    in_order = ((begin >= 0) & (begin <= end) & (end <= num_tokens)).all()
    length = np.clip(end - begin, 0, num_tokens)
    pages_end = cumsum((length + (page_size - 1)) // page_size)
    first_page = pages_end - (length + (page_size - 1)) // page_size

    row = arange(num_tokens)
    owner = count_up_to(end[:max_seqs], row)
    first, behind = take(begin, owner), take(end, owner)
    is_owned = (first <= row) & (row < behind)

    page = arange(num_pages)
    owner = np.clip(count_up_to(pages_end, page), 0, max_seqs)
    position = ((page - take(first_page, owner)) * page_size)[:, None] + arange(page_size)[None]
    lens = length[:max_seqs]
    return Plan(
        is_sound=(num_seqs == live) & in_order,
        reverse=np.clip(np.where(is_owned, first + behind - 1 - row, row), 0, last_token),
        tokens=np.clip(take(begin, owner)[:, None] + position, 0, last_token).reshape(-1),
        reverse_tokens=np.clip(take(end, owner)[:, None] - 1 - position, 0, last_token).reshape(-1),
        block_tables=np.clip(first_page[:max_seqs, None] + arange(pages_per_seq)[None], 0, last_page),
        context_lens=lens,
        reverse_context_lens=np.clip(lens - 1, 0, num_tokens),
    )
