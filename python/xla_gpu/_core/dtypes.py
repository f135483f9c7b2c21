"""Element types by their NumPy names, with what XLA's FFI and StableHLO call them."""

from typing import NamedTuple


class DType(NamedTuple):
    name: str  # as numpy and ml_dtypes spell it
    code: int  # XLA_FFI_DataType
    mlir: str
    itemsize: int  # bytes


_TABLE = (
    DType("bool", 1, "i1", 1),
    DType("int8", 2, "i8", 1),
    DType("int16", 3, "i16", 2),
    DType("int32", 4, "i32", 4),
    DType("int64", 5, "i64", 8),
    DType("uint8", 6, "ui8", 1),
    DType("uint16", 7, "ui16", 2),
    DType("uint32", 8, "ui32", 4),
    DType("uint64", 9, "ui64", 8),
    DType("float16", 10, "f16", 2),
    DType("float32", 11, "f32", 4),
    DType("float64", 12, "f64", 8),
    DType("bfloat16", 16, "bf16", 2),
    DType("complex64", 15, "complex<f32>", 8),
    DType("complex128", 18, "complex<f64>", 16),
    DType("float8_e5m2", 19, "f8E5M2", 1),
    DType("float8_e4m3fn", 20, "f8E4M3FN", 1),
    DType("float8_e5m2fnuz", 24, "f8E5M2FNUZ", 1),
    DType("float8_e4m3fnuz", 25, "f8E4M3FNUZ", 1),
    DType("float8_e8m0fnu", 33, "f8E8M0FNU", 1),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
FLOATS = ("float32", "float16", "bfloat16")  # in which operators compute
