"""StableHLO to HLO, by the converter that jaxlib holds: torch_xla has none to call from Python. jax is not needed."""

from __future__ import annotations

from ..errors import CompatibilityError, LibraryError


def hlo_module_proto(stablehlo: str) -> bytes:
    """The serialized HloModuleProto of a StableHLO module's text."""
    try:
        from jaxlib import _jax
    except ImportError as error:
        raise LibraryError(
            "lowering for torch_xla needs jaxlib 0.7 or newer: pip install '.[torch]' in a checkout of xla_gpu"
        ) from error
    try:
        convert = _jax.mlir.mlir_module_to_xla_computation
        computation = convert(stablehlo, use_tuple_args=False, return_tuple=True)
        proto: bytes = computation.as_serialized_hlo_module_proto()
    except (AttributeError, TypeError) as error:
        import jaxlib

        raise CompatibilityError(
            f"lowering for torch_xla needs the StableHLO converter of jaxlib 0.7 to 0.12, and jaxlib "
            f"{getattr(jaxlib, '__version__', 'of an unknown version')} does not have it in that form ({error}): "
            "pip install 'jaxlib>=0.7,<0.13'"
        ) from error
    return proto
