"""The doctor's try of the back end for vLLM."""

from typing import Any

from ..errors import CompatibilityError
from ..vllm import versions
from . import probe


def attempt(device: str) -> dict[str, Any]:
    """Lets vLLM choose its platform, imports the back end, and runs simple_add where its models would run."""
    if (problem := versions.problem()) is not None:
        raise CompatibilityError(problem)
    from vllm.platforms import current_platform

    chosen = type(current_platform).__name__
    if chosen != "XlaGpuPlatform":
        raise CompatibilityError(
            f"vLLM chose {chosen}: expected XlaGpuPlatform. Install this package with pip, so that vLLM finds its "
            "entry point vllm.platform_plugins, and name xla_gpu in VLLM_PLUGINS where that is set"
        )
    from ..vllm import model_runner, moe, worker  # noqa: F401
    from . import probe_torch_xla

    return probe_torch_xla.attempt(device)


if __name__ == "__main__":
    probe.report(attempt)
