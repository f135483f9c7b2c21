"""Prints what the extras named on the command line require, one requirement a line, from pyproject.toml.

`pip install '.[test]'` would build the package to learn this. Set-up wants the frameworks first and once, and the
package again after each change.
"""

import pathlib
import re
import sys
import tomllib

PROJECT = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> list[str]:
    """The requirements of `extra`, with references to the project's other extras replaced by what those require."""
    found: list[str] = []
    for requirement in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(r"xla_gpu\[([\w,-]+)\]", requirement)
        found += [r for other in own[1].split(",") for r in requirements(other)] if own else [requirement]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join([*PROJECT["dependencies"], *(r for extra in sys.argv[1:] for r in requirements(extra))]))
