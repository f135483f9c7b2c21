"""What torch_xla counts: operations that it runs on the host, and values that are taken from the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch_xla.debug.metrics as metrics


class FallbackError(RuntimeError):
    """A program needs an operation that torch_xla cannot run on the device."""


def fallbacks() -> dict[str, int]:
    """How often each operation without a lowering has run on the host in this process."""
    return {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}


def fallbacks_since(before: Mapping[str, int]) -> set[str]:
    """The operations that have run on the host since ``before``, of fallbacks(); in earlier traces, too, perhaps."""
    return {name for name, count in fallbacks().items() if count != before.get(name)}


def fallback_error(where: str, names: Iterable[str]) -> FallbackError:
    """The error for these operations."""
    return FallbackError(
        f"{where}: torch_xla has no lowering for {', '.join(sorted(names))}, which would run on the host in every call"
    )


def values_taken() -> int:
    """How often this process has run a program or read a tensor."""
    timed = map(metrics.metric_data, ("ExecuteTime", "TransferFromDeviceTime"))
    return sum(data[0] for data in timed if data)
