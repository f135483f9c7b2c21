"""One text for what an operator takes and returns, shown by the functions of every front end."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def docstring(text: str) -> Callable[[_Function], _Function]:
    """A decorator that appends ``text`` to the docstring of a function."""

    def decorate(function: _Function) -> _Function:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n{text}"
        return function

    return decorate
