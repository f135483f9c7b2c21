"""Programs in processes of their own: what does not fit may crash one, and a test must live to say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(code: str, path: Path | None = None, **environment: str) -> str:
    """What `code` printed; fails if the process did not end by itself. `path` comes before all else on sys.path."""
    everything = {**os.environ, **environment}
    if path is not None:
        everything["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=everything, timeout=300)
    assert result.returncode >= 0, f"died of signal {-result.returncode}: {result.stderr[-2000:]}"
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def error_of(code: str, path: Path | None = None, **environment: str) -> str:
    """'module.Name: text' of the exception that `code` ends with."""
    lines = "\n".join(f"    {line}" for line in code.strip().splitlines())
    report = "    print(f'{type(error).__module__}.{type(error).__qualname__}: {error}')"
    return run(f"try:\n{lines}\n    print('no error')\nexcept Exception as error:\n{report}", path, **environment)
