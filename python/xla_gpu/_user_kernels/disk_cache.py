"""Files of compiled kernels, by a hash of all that they were made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

ENVIRONMENT = "XLA_GPU_CACHE_DIR"
_DIGEST_BYTES = 32


def folder() -> Path:
    """$XLA_GPU_CACHE_DIR, else ~/.cache/xla_gpu, where XDG_CACHE_HOME may stand for ~/.cache."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xla_gpu"


def key(*parts: str | bytes) -> str:
    """A name for what is made from ``parts``, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read(name: str) -> bytes | None:
    """The file's contents; None where there is none, or one that was damaged."""
    try:
        data = (folder() / name).read_bytes()
    except (OSError, RuntimeError):  # the latter where the user has no home folder
        return None
    digest, contents = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return contents if hashlib.sha256(contents).digest() == digest else None


def write(name: str, contents: bytes) -> None:
    """Stores a file as a whole or not at all; other processes may store the same one. A full disk is no error."""
    with contextlib.suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder(), prefix=f"{name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(contents).digest() + contents)
            os.replace(temporary, folder() / name)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
