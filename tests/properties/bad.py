"""A wrong static input: which operator's, which argument, and what its error must say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bad:
    operator: str
    name: str
    argument: str
    got: str  # a piece of the text after "got"
    change: Callable[[dict, dict], None]  # of the arrays and the options, in place
    error: type[Exception] = ValueError
    base: str = "float32"  # the cache's dtype

    def __str__(self) -> str:
        return f"{self.operator}-{self.argument}-{self.name}"


def put(argument: str, shape=None, dtype=None):
    """The argument replaced by zeros of another shape or dtype."""

    def change(arrays, options):
        old = arrays.get(argument, np.zeros(1, np.float32))
        arrays[argument] = np.zeros(old.shape if shape is None else shape, old.dtype if dtype is None else dtype)

    return change


def option(name: str, value):
    return lambda arrays, options: options.update({name: value})


def drop(name: str):
    return lambda arrays, options: arrays.pop(name)
