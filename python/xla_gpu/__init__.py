"""Hand-written LLM-serving kernels for XLA programs: one library of typed FFI handlers, four front ends.

``import xla_gpu`` imports no framework. The front ends are ``xla_gpu.torch`` (torch_xla, ``torch.compile``, and eager
PyTorch on CPU and CUDA tensors) and ``xla_gpu.jax``.
"""

__version__: str

_MODULES = ("adapters", "errors", "jax", "quantization", "torch", "torchax", "vllm")


def __getattr__(name: str) -> str:
    # Computed on first access: torch_xla imports this package at start-up, and importlib.metadata costs milliseconds.
    if name != "__version__":
        text = f"module {__name__!r} has no attribute {name!r}"
        if name in _MODULES:
            text += f" before import {__name__}.{name}"
        elif not name.startswith("_"):
            text += f": the operators are in {__name__}.torch and {__name__}.jax"
        raise AttributeError(text)
    from importlib import metadata
    from pathlib import Path

    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():  # a checkout on PYTHONPATH, whatever may be installed beside it
        import tomllib

        version = tomllib.loads(project.read_text())["project"]["version"]
    else:
        version = metadata.version("xla_gpu")
    globals()[name] = version
    return str(version)
