"""StableHLO to HLO, by the converter that jaxlib holds: torch_xla has none to call from Python. jax is not needed."""

from __future__ import annotations

from ._errors import LibraryError


def hlo_module_proto(stablehlo: str) -> bytes:
    """The serialized HloModuleProto of a StableHLO module's text."""
    try:
        from jaxlib import _jax
    except ImportError as error:
        raise LibraryError("lowering for torch_xla needs jaxlib 0.7 or newer: pip install 'xla_gpu[torch]'") from error
    computation = _jax.mlir.mlir_module_to_xla_computation(stablehlo, use_tuple_args=False, return_tuple=True)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto
