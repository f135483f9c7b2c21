// Weights in registers, and their scales: linear's formats by its conversions, and mxfp4.
#ifndef XLA_GPU_OPS_GROUPED_LINEAR_WEIGHTS_CUH_
#define XLA_GPU_OPS_GROUPED_LINEAR_WEIGHTS_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/ops/grouped_linear/args.h"
#include "ffi/ops/linear/sm90_int4_weights.cuh"
#include "ffi/ops/linear/weight_formats.cuh"

namespace xla_gpu::grouped_linear {

constexpr WeightFormat LinearFormat(GroupedFormat format) {
  return format == GroupedFormat::kPlain    ? WeightFormat::kPlain
         : format == GroupedFormat::kFloat8 ? WeightFormat::kFloat8
         : format == GroupedFormat::kInt8   ? WeightFormat::kInt8
                                            : WeightFormat::kInt4;
}

constexpr bool HasFourBits(GroupedFormat format) {
  return format == GroupedFormat::kInt4 || format == GroupedFormat::kMxfp4;
}

template <typename T>
__device__ inline uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair value = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(value);
}

// ---- mxfp4. In bfloat16 the two bits of e2m1's exponent and its mantissa, as the lowest bits of the exponent and the
// highest of the mantissa, are 2^-126 times the value, also where it is subnormal. One product with 2^126 and the scale
// makes the weight, times 2^-kMxfp4Shift, so that the factor is a number for scales of up to 2^33. In float16 they are
// 2^-14 times the value; it and the scale become factors of their own, as few scales would fit into one.

inline constexpr int kMxfp4Shift = 32;
template <typename T>
inline constexpr float kMxfp4Unit = std::is_same_v<T, __half> ? 1.0f : 4294967296.0f;  // 2^kMxfp4Shift

// A pair of T of a scale's byte.
template <typename T>
__device__ inline uint32_t Mxfp4Factor(uint32_t byte) {
  if constexpr (std::is_same_v<T, __half>) {
    const float scale = __uint_as_float(byte << 23);
    return Pack<T>(scale, scale);
  } else {
    const uint32_t field = min(byte + (126 - kMxfp4Shift), 255u);
    return field << 7 | field << 23;
  }
}

// Nibbles `index` and index + 4 of `word` as a pair of T.
template <typename T>
__device__ inline uint32_t ConvertMxfp4Pair(uint32_t word, int index, uint32_t factor) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  const int up = (kHalf ? 9 : 6) - 4 * index;
  const uint32_t magnitude = (up >= 0 ? word << up : word >> -up) & (kHalf ? 0x0e000e00u : 0x01c001c0u);
  const uint32_t value = ((word << (12 - 4 * index)) & 0x80008000u) | magnitude;
  if constexpr (kHalf) return MultiplyPair<T>(MultiplyPair<T>(value, 0x74007400u), factor);  // 2^14
  return MultiplyPair<T>(value, factor);
}

// ---- Any format: eight values of k, two steps of a product

// What conversions take of a row's zero point or scale.
template <GroupedFormat kFormat>
struct Operand {};
template <>
struct Operand<GroupedFormat::kInt4> : linear::Int4Offsets {};
template <>
struct Operand<GroupedFormat::kMxfp4> {
  uint32_t factor;
};

// Values 8 * index to 8 * index + 7 of 16 bytes as four registers, two of each step.
template <typename T, GroupedFormat kFormat>
__device__ inline void ConvertEight(const uint4& raw, int index, const Operand<kFormat>& operand, uint32_t magic,
                                    uint32_t (&to)[4]) {
  if constexpr (kFormat == GroupedFormat::kMxfp4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = ConvertMxfp4Pair<T>(linear::Word(raw, index), i, operand.factor);
  } else if constexpr (kFormat == GroupedFormat::kInt4) {
    linear::ConvertInt4Word<T>(linear::Word(raw, index), operand, magic, to);
  } else {
    linear::ConvertStep<T, LinearFormat(kFormat)>(raw, 2 * index, 0, &to[0], &to[1]);
    linear::ConvertStep<T, LinearFormat(kFormat)>(raw, 2 * index + 1, 0, &to[2], &to[3]);
  }
}

// Eight values of x in the order of the weights: mxfp4's pairs are four values from one another.
template <GroupedFormat kFormat>
__device__ inline uint4 OrderX(const uint4& x) {
  if constexpr (kFormat != GroupedFormat::kMxfp4) return x;
  return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
          __byte_perm(x.y, x.w, 0x7632)};
}

}  // namespace xla_gpu::grouped_linear

#endif  // XLA_GPU_OPS_GROUPED_LINEAR_WEIGHTS_CUH_
