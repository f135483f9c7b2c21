"""Environment variables that turn something on or off."""

from __future__ import annotations

import os


def switch(name: str, default: bool) -> bool:
    """Whether the variable says 1, or 0; ``default`` where it is not set, or empty.

    Raises:
      ValueError: it says something else, as "off", which must not be taken for a 1.
    """
    value = os.environ.get(name, "")
    if value in ("", "0", "1"):
        return default if not value else value == "1"
    raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
