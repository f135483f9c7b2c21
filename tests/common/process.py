"""Programs in processes of their own: what does not fit may crash one, and a test must live to say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(code: str, *arguments: str, path: Path | None = None, timeout: float = 300, **environment: str) -> str:
    """What `code` printed; fails if the process did not end well. `path` comes before all else on sys.path."""
    everything = {**os.environ, **environment}
    if path is not None:
        everything["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=everything, timeout=timeout)
    assert result.returncode >= 0, f"died of signal {-result.returncode}: {result.stderr[-2000:]}"
    assert result.returncode == 0, f"exit {result.returncode}: {result.stdout[-1000:]}\n{result.stderr[-3000:]}"
    return result.stdout.strip()


def error_of(code: str, path: Path | None = None, **environment: str) -> str:
    """'module.Name: text' of the exception that `code` ends with."""
    lines = "\n".join(f"    {line}" for line in code.strip().splitlines())
    report = "    print(f'{type(error).__module__}.{type(error).__qualname__}: {error}')"
    return run(f"try:\n{lines}\n    print('no error')\nexcept Exception as error:\n{report}", path=path, **environment)


def errors_of(setup: str, codes: Sequence[str], **environment: str) -> list[str]:
    """As `error_of` of each code, which see the names of `setup`: in one process, since frameworks take long to import.

    For codes that leave nothing behind where they fail.
    """
    program = f"""
import json
{setup}
for code in {list(codes)!r}:
    try:
        exec(code, dict(globals()))
        text = "no error"
    except Exception as error:
        text = f"{{type(error).__module__}}.{{type(error).__qualname__}}: {{error}}"
    print("outcome " + json.dumps(text))
"""
    lines = [line for line in run(program, **environment).splitlines() if line.startswith("outcome ")]
    assert len(lines) == len(codes), lines
    return [json.loads(line.removeprefix("outcome ")) for line in lines]
