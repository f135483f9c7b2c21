"""What the doctor's processes share: each tries one front end and reports in one line. No framework here."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._runtime import cuda_plugin, library
from .._runtime.abi import api_version
from .report import REPORT_MARK

A = (1.0, 2.0, 3.0, -4.0)
B = (0.5, 0.25, -3.0, 8.0)


def check(results: Iterable[float]) -> None:
    """Raises unless ``results`` is A + B."""
    got = [float(result) for result in results]
    expected = [a + b for a, b in zip(A, B, strict=True)]
    if got != expected:
        raise RuntimeError(f"simple_add returned {got}, expected {expected}")


def runtime(platform: str, pjrt_api: str | None, ffi_api: str | None, plugin: str | None) -> dict[str, Any]:
    """The description of an XLA runtime with which the library's targets of ``platform`` are registered."""
    targets = [handler.target for handler in library.load().handlers() if handler.platform == platform]
    return {"pjrt_api": pjrt_api, "ffi_api": ffi_api, "plugin": plugin, "targets": targets}


def host_runtime(ffi_api: int) -> dict[str, Any]:
    """The description of a CPU runtime whose XLA_FFI_Api is at ``ffi_api``."""
    return runtime("Host", None, _dotted(api_version(ffi_api)), None)


def plugin_runtime(path: Path) -> dict[str, Any]:
    """The description of the CUDA runtime inside a PJRT plug-in."""
    api = cuda_plugin.pjrt_api(path)
    return runtime("CUDA", _dotted(api_version(api)), _dotted(cuda_plugin.ffi_version(api)), str(path))


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


def report(attempt: Callable[[str], dict[str, Any] | None]) -> None:
    """Calls ``attempt`` with the device that the command line names, and reports what came of it.

    ``attempt`` tries the front end and returns the description of its XLA runtime, None where it has none.
    """
    try:
        result: dict[str, Any] = {"runtime": attempt(sys.argv[1])}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    print(f"{REPORT_MARK}{json.dumps(result)}", flush=True)
