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

}  // namespace xla_gpu

#endif  // XLA_GPU_BASE_DTYPE_H_
