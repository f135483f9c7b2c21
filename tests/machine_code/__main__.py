"""`python -m tests.machine_code BEFORE AFTER`: compares two build folders. Status 0: same, 1: different, 2: failure."""

import argparse
import sys
from pathlib import Path

from tests.machine_code.compare import compare, report
from tests.machine_code.kernels import ToolError, read_build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machine_code", description=__doc__)
    parser.add_argument("before", type=Path, help="build folder to compare with")
    parser.add_argument("after", type=Path, help="build folder")
    arguments = parser.parse_args()
    try:
        result = compare(read_build(arguments.before), read_build(arguments.after))
    except ToolError as error:
        print(error, file=sys.stderr)
        return 2
    print(report(result))
    return 0 if result.equal else 1


if __name__ == "__main__":
    sys.exit(main())
