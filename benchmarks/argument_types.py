"""Types of command-line arguments: argparse then says which option is wrong, and what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return number


def add_devices(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--devices", type=positive, default=default, help="of them, the first ones (default %(default)s)"
    )


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends where PyTorch reaches no GPU, with the reason."""
    from tests.common import frontends

    if reason := frontends.ALL["eager-cuda"].unavailable():
        cpu = ", or --device cpu" if any("--device" in action.option_strings for action in parser._actions) else ""
        parser.error(f"expected a GPU that PyTorch reaches{cpu}: {reason}")


def load_size(text: str) -> tuple[int, int]:
    """Sequences and tokens of each: "64x2048"."""
    try:
        count, length = map(positive, text.split("x"))
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected sequences x tokens, 64x2048 for example, got {text}") from None
    return count, length


def containing(option: str, texts: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that contain one of the texts, each of which some name must contain."""
    names = list(names)
    some = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    for text in texts:
        if not any(text in name for name in names):
            raise SystemExit(f"{option}: expected a part of one of {some}, got {text}")
    return [name for name in names if any(text in name for text in texts)]
