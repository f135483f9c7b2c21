// Element types that kernels know. No XLA, no framework: kernels and handlers both include this.
#ifndef XLA_GPU_BASE_DTYPE_H_
#define XLA_GPU_BASE_DTYPE_H_

#include <cstddef>

namespace xla_gpu {

// The float8 types are storage types of the KV cache; nothing is computed in them.
enum class DType { kF32, kF16, kBF16, kF8E4M3FN, kF8E5M2 };

constexpr size_t SizeOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kF16 || dtype == DType::kBF16 ? 2 : 1;
}

constexpr bool IsFloat8(DType dtype) { return SizeOf(dtype) == 1; }

// The switch from a dtype to a type: calls `body` with a value of the type that stands for `dtype`.
// Inlined always, so that sources that are compiled for one ISA may use it (host/simd.h).
template <class F32, class F16, class BF16, class F8E4M3FN, class F8E5M2, class Body>
inline __attribute__((always_inline)) auto WithStorageType(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kF32:
      break;
    case DType::kF16:
      return body(F16{});
    case DType::kBF16:
      return body(BF16{});
    case DType::kF8E4M3FN:
      return body(F8E4M3FN{});
    case DType::kF8E5M2:
      return body(F8E5M2{});
  }
  return body(F32{});
}

// The same for a dtype that is computed in, which handlers have checked to be no float8 type (GetComputeDType).
template <class F32, class F16, class BF16, class Body>
inline __attribute__((always_inline)) auto WithComputeType(DType dtype, Body&& body) {
  return WithStorageType<F32, F16, BF16, F32, F32>(dtype, static_cast<Body&&>(body));
}

}  // namespace xla_gpu

#endif  // XLA_GPU_BASE_DTYPE_H_
