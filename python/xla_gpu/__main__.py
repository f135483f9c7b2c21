"""``python -m xla_gpu``: the package's command line."""

from __future__ import annotations

import argparse
import signal
import sys

from . import __version__
from ._doctor import report


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m xla_gpu", description="LLM-serving GPU kernels inside XLA programs: what of them works here."
    )
    parser.add_argument("--version", action="version", version=f"xla_gpu {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, and which front ends work",
        description="Calls simple_add through every front end, each in a process of its own, and says which work and "
        "what to do about the others. Exit status 0: every front end whose framework and device are there works.",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options = parser.parse_args(arguments)
    return report.run(as_json=options.json)


if __name__ == "__main__":
    # Where the reader of a pipe has gone, as `head` does, the process ends as other commands do: without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
