"""What users set for this back end alone, by vLLM's --additional-config."""

from __future__ import annotations

import dataclasses
from typing import Any

from xla_gpu._runtime import library

MAX_COMPILE_THREADS = 64

# XLA uses several cores for a program, for the kernels that it tries; the rest of a compilation takes one.
_CORES_PER_THREAD = 3
# More wait for each other's trials of kernels, and for the memory that these take.
_MOST_CHOSEN_THREADS = 4


def default_compile_threads() -> int:
    """A compile thread for each three processors that this process, or its container, may keep busy; up to 4."""
    cores: int = library.load().build_info()["host_processors"]
    return max(1, min(cores // _CORES_PER_THREAD, _MOST_CHOSEN_THREADS))


@dataclasses.dataclass(frozen=True)
class Options:
    """The keys of --additional-config.

    Attributes:
      token_buckets: numbers of tokens of a step that programs are compiled for, in the place of the powers of two.
      async_scheduling: whether the next step is prepared while the device works.
      compile_threads: programs that are compiled at a time at start, on a GPU.
      encoder_buckets: numbers of tokens of images that programs of an encoder for any size are compiled for, in the
        place of the powers of two.
    """

    token_buckets: list[int] | None = None
    async_scheduling: bool = True
    compile_threads: int = dataclasses.field(default_factory=default_compile_threads)
    encoder_buckets: list[int] | None = None

    @classmethod
    def of(cls, config: Any) -> Options:
        """The options of a VllmConfig.

        Raises:
          ValueError: a key is none of the above, or its value is not of the key's kind.
        """
        given = config.additional_config
        if not isinstance(given, dict):
            raise ValueError(f"xla_gpu.vllm: additional_config: expected a dict, got {type(given).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                raise ValueError(f"xla_gpu.vllm: additional_config: expected keys {', '.join(names)}, got {key!r}")
        options = cls(**given)
        if (sizes := options.encoder_buckets) is not None and not _are_sizes(sizes):
            raise ValueError(
                f"xla_gpu.vllm: additional_config: encoder_buckets: expected a list of positive integers, got {sizes!r}"
            )
        if not isinstance(options.async_scheduling, bool):
            raise ValueError(
                "xla_gpu.vllm: additional_config: async_scheduling: expected true or false, got "
                f"{options.async_scheduling!r}"
            )
        threads = options.compile_threads
        if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MAX_COMPILE_THREADS:
            raise ValueError(
                "xla_gpu.vllm: additional_config: compile_threads: expected an integer from 1 to "
                f"{MAX_COMPILE_THREADS}, got {threads!r}"
            )
        return options


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, (list, tuple)) and all(type(size) is int and size > 0 for size in sizes)
