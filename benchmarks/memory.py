"""Loads that do not fit into this machine's memory are left out, and the others are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

TEXTS = ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")  # XLA's, CUDA's, and PyTorch's on a CPU


def is_about_memory(text: str) -> bool:
    return any(each in text for each in TEXTS)


@contextlib.contextmanager
def left_out_if_too_large(load: str) -> Iterator[None]:
    """Says so, instead of raising, where the body runs out of memory."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not is_about_memory(text):
            raise
        first = (text.splitlines() or [type(error).__name__])[0][:150]
        print(f"{load}: not measured, needs more memory than is free: {first}", flush=True)
