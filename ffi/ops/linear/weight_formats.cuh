// How 16 bytes of a weight row, as each format stores them, become operands of mma.m16n8k16.
//
// The order in which a matrix product sums over k is free, as long as both operands agree. So a lane takes 16
// neighbouring bytes of a row, kElements values of k, and gives them to the instruction's k slots in the order in which
// they come: a step uses four values, (0, 1) as slots 2t and 2t + 1, (2, 3) as slots 2t + 8 and 2t + 9.
#ifndef XLA_GPU_OPS_LINEAR_WEIGHT_FORMATS_CUH_
#define XLA_GPU_OPS_LINEAR_WEIGHT_FORMATS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/device/float8.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/linear/linear.h"

namespace xla_gpu::linear {

// Values of k in 16 bytes.
constexpr int ElementsIn16Bytes(WeightFormat format) {
  return format == WeightFormat::kPlain ? 8 : format == WeightFormat::kInt4 ? 32 : 16;
}

__device__ inline uint32_t Word(const uint4& raw, int i) {
  return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
}

// Bytes 2 * half and 2 * half + 1 of `word`, int8 + 128, as a pair of T. Exact.
template <typename T>
__device__ inline uint32_t ConvertInt8Pair(uint32_t word, int half) {
  if constexpr (std::is_same_v<T, __half>) {
    // 0x6400 | u is 1024 + u.
    const uint32_t pair = __byte_perm(word, 0x64646464u, half == 0 ? 0x4140 : 0x4342);
    const __half2 value = __hsub2(reinterpret_cast<const __half2&>(pair), __floats2half2_rn(1152.0f, 1152.0f));
    return reinterpret_cast<const uint32_t&>(value);
  } else {
    // 0x4b000000 | u is 2^23 + u.
    const float low = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | (2 * half))) - 8388736.0f;
    const float high = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | (2 * half + 1))) - 8388736.0f;
    return Pack<T>(low, high);
  }
}

// What is subtracted from an unsigned int4 value that stands in the mantissa of kInt4Magic: a pair of T. NaN for a zero
// point that no int4 format has: results are then not plausible wrong numbers.
template <typename T>
inline constexpr uint32_t kInt4Magic = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;

template <typename T>
__device__ inline uint32_t Int4Offset(int zero_point) {
  const float offset = zero_point > 127 ? __int_as_float(0x7fffffff)
                                        : static_cast<float>(zero_point + (std::is_same_v<T, __half> ? 1024 : 128));
  return Pack<T>(offset, offset);
}

// Nibbles `index` and index + 4 of `word` as a pair of T, less the zero point. Exact.
template <typename T>
__device__ inline uint32_t ConvertInt4Pair(uint32_t word, int index, uint32_t offset) {
  const uint32_t pair = ((word >> (4 * index)) & 0x000f000fu) | kInt4Magic<T>;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 value = __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(offset));
    return reinterpret_cast<const uint32_t&>(value);
  } else {
    const __nv_bfloat162 value =
        __hsub2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(offset));
    return reinterpret_cast<const uint32_t&>(value);
  }
}

// The four values of step `step`, counted from the start of the 16 bytes, as two registers.
template <typename T, WeightFormat kFormat>
__device__ inline void ConvertStep(const uint4& raw, int step, uint32_t int4_offset, uint32_t* low, uint32_t* high) {
  if constexpr (kFormat == WeightFormat::kPlain) {
    *low = Word(raw, 2 * step);
    *high = Word(raw, 2 * step + 1);
  } else if constexpr (kFormat == WeightFormat::kFloat8) {
    const uint32_t word = Word(raw, step);
    *low = ConvertFloat8Pair<T, true>(word);
    *high = ConvertFloat8Pair<T, true>(word >> 16);
  } else if constexpr (kFormat == WeightFormat::kInt8) {
    const uint32_t word = Word(raw, step) ^ 0x80808080u;
    *low = ConvertInt8Pair<T>(word, 0);
    *high = ConvertInt8Pair<T>(word, 1);
  } else {
    const uint32_t word = Word(raw, step / 2);
    *low = ConvertInt4Pair<T>(word, step % 2 * 2, int4_offset);
    *high = ConvertInt4Pair<T>(word, step % 2 * 2 + 1, int4_offset);
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_WEIGHT_FORMATS_CUH_
