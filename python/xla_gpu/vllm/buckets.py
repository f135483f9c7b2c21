"""Sizes that programs are compiled for. A step is padded to the next of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from .options import Options

# Sampling works on whole rows of logits and is compiled once per number of rows, half a dozen programs each time: for
# this many, eight times as many, and so on to the most sequences that a step has.
MIN_LOGITS_ROWS = 8
_ROWS_FACTOR = 8

# Steps of prompts are halved from here on. Below, they read the weights whatever their tokens.
_HALVED_FROM = 512

# Steps in which many sequences decode: a row of padding costs some 20 us, of an 8B model on an H200, and less below 64
# rows.
_DECODE_HALVED_FROM = 64
_DECODE_QUARTERED_FROM = 128

# Tokens of the smallest step with images, where steps may have as many.
_IMAGE_TOKENS = 256


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... below ``most``, and ``most``."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most == 1 else [*sizes, most]


def token_buckets(max_tokens: int, max_seqs: int, chosen: Sequence[int] | None = None) -> list[int]:
    """Numbers of tokens of a step.

    Powers of two; halfway between them from 512 on, and below ``max_seqs`` from 64 on; below ``max_seqs`` from 128 on
    quarters too; ``max_seqs``, so that a full batch decodes unpadded; ``max_tokens``.

    Args:
      max_tokens: tokens of the largest step.
      max_seqs: sequences of the largest step.
      chosen: the user's buckets, which take the place of all but the last two.

    Raises:
      ValueError: ``chosen`` is not a list of integers from 1 to ``max_tokens``.
    """
    if chosen is None:
        powers = powers_of_two(max_tokens)
        sizes = {size * 3 // 2 for size in powers if size >= _HALVED_FROM}
        decode = {size * 3 // 2 for size in powers if size >= _DECODE_HALVED_FROM}
        decode |= {size * part // 4 for size in powers if size >= _DECODE_QUARTERED_FROM for part in (5, 7)}
        sizes |= {size for size in decode if size < max_seqs}
        sizes = {size for size in sizes if size < max_tokens} | set(powers)
    else:
        if not isinstance(chosen, (list, tuple)) or not all(
            isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= max_tokens for size in chosen
        ):
            raise ValueError(
                "additional_config: token_buckets: expected a list of integers from 1 to max_num_batched_tokens = "
                f"{max_tokens}, got {chosen!r}"
            )
        sizes = set(chosen)
    return sorted(sizes | {min(max_seqs, max_tokens), max_tokens})


def of_steps(config: Any) -> list[int]:
    """The numbers of tokens of a VllmConfig's steps."""
    chosen = Options.of(config).token_buckets
    return token_buckets(config.scheduler_config.max_num_batched_tokens, most_rows(config), chosen)


def of_images(sizes: Sequence[int]) -> list[int]:
    """Of the numbers of tokens of a step those of steps with images, which have programs of their own.

    An image has hundreds of tokens: what is left of one after a hit in the prefix cache alone has fewer.
    """
    return [size for size in sizes if size >= _IMAGE_TOKENS] or [sizes[-1]]


def compile_order(sizes: Sequence[int], max_seqs: int) -> list[int]:
    """``sizes`` in the order in which programs are compiled, so that several threads have work throughout.

    XLA chooses kernels for one program after the other, and takes longest for steps that decode: the first of them
    comes first, and between them come steps of prompts, for which it tries fewer.
    """
    decode = sorted((size for size in sizes if size <= max_seqs), reverse=True)
    prompts = sorted((size for size in sizes if size > max_seqs), reverse=True)
    both = [size for pair in zip(decode, prompts, strict=False) for size in pair]
    return [*both, *decode[len(prompts) :], *prompts[len(decode) :]]


def most_rows(config: Any) -> int:
    """Rows, at most, of which a step computes logits: of a VllmConfig, one for each sequence, and for each draft."""
    scheduler, speculative = config.scheduler_config, config.speculative_config
    if speculative is None:
        return int(scheduler.max_num_seqs)
    return int(min(scheduler.max_num_seqs * (1 + speculative.num_speculative_tokens), scheduler.max_num_batched_tokens))


def logits_rows(num_rows: int, most: int) -> int:
    """Rows of logits of a step with room for ``num_rows``, where no step has more than ``most``."""
    rows = MIN_LOGITS_ROWS
    while rows < num_rows:
        rows *= _ROWS_FACTOR
    return min(rows, max(most, MIN_LOGITS_ROWS))


def next_bucket(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds ``size``."""
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise ValueError(f"no bucket holds {size}; the largest is {buckets[-1]}")
    return buckets[at]
