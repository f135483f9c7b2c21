// int4 weights in registers for the kernels of sm_90a: zero points and conversions. All conversions are exact.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_WEIGHTS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_WEIGHTS_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/mma.cuh"
#include "ffi/ops/linear/sm90_converted_weights.cuh"
#include "ffi/ops/linear/weight_formats.cuh"

namespace xla_gpu::linear {

// What conversions add for a weight row: to a pair in the lower and in the upper half of a byte.
struct Int4Offsets {
  uint32_t low;
  uint32_t high;
};

// Weights become (u - zero point) / kInt4Unit, in both kernels: rows have the same bits in both.
template <typename T>
inline constexpr float kInt4Unit = std::is_same_v<T, __half> ? 1.0f : 4.0f;

template <typename T>
inline constexpr uint32_t kPairOfOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;

template <typename T>
__device__ inline uint32_t FmaPair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// Of the zero point in byte `byte` of `zero_points`. NaN for one that no int4 format has: results are then not
// plausible wrong numbers.
template <typename T>
__device__ inline Int4Offsets OffsetsOf(uint32_t zero_points, int byte) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  // -(1024 + zero point), and -(128 + zero point) / 4
  uint32_t low = __byte_perm(zero_points, kHalf ? 0xe4e4e4e4u : 0xc2c2c2c2u, 0x4040 | byte << 8 | byte);
  if (zero_points >> (8 * byte) & 0x80) low = 0x7fff7fffu;
  return {low, FmaPair<T>(low, kHalf ? 0x3c003c00u : 0x3f803f80u, kHalf ? 0x63806380u : 0x42004200u)};  // + 960, + 32
}

// The same of two groups at once, a pair of each: what is added to pairs in the lower and in the upper half of a byte.
struct Int4GroupOffsets {
  uint32_t low;
  uint32_t high;

  // Of one of the two groups.
  __device__ Int4Offsets Of(int group) const { return {TwiceHalf(low, group), TwiceHalf(high, group)}; }

 private:
  // As two halves, which HFMA2 takes out of a register without another instruction.
  static __device__ uint32_t TwiceHalf(uint32_t pair, int half) {
    uint32_t twice;
    if (half == 0) {
      asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {a, a}; }" : "=r"(twice) : "r"(pair));
    } else {
      asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, b}; }" : "=r"(twice) : "r"(pair));
    }
    return twice;
  }
};

// `Int4GroupOffsets::low` of the zero points in the lower two bytes of `zero_points`: those of OffsetsOf.
template <typename T>
__device__ inline uint32_t LowOffsetsOf(uint32_t zero_points) {
  // NOTE: not __byte_perm, which ignores the upper bit of a selector. With it each byte is the sign of the one
  // selected.
  uint32_t invalid;
  asm("prmt.b32 %0, %1, %1, 0x9988;" : "=r"(invalid) : "r"(zero_points));
  return __byte_perm(zero_points, std::is_same_v<T, __half> ? 0xe4e4e4e4u : 0xc2c2c2c2u, 0x4140) | invalid;
}

// Those of the upper halves, from those of the lower ones. one: a pair of 1, in a register.
template <typename T>
__device__ inline uint32_t HighOffsetsOf(uint32_t low, uint32_t one) {
  return FmaPair<T>(low, one, std::is_same_v<T, __half> ? 0x63806380u : 0x42004200u);  // + 960, + 32
}

// Values 4 * half to 4 * half + 3 of a word, whose offset is that of the lower half of a byte.
template <typename T>
__device__ inline void ConvertInt4(uint32_t word, int half, uint32_t offset, uint32_t magic, uint32_t* low,
                                   uint32_t* high) {
  constexpr uint32_t kFactor = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3e803e80u;  // 1, 1 / 4
  *low = FmaPair<T>(MaskOr<0x000f000fu>(word >> (8 * half), magic), kFactor, offset);
  *high = FmaPair<T>(MaskOr<0x000f000fu>(word >> (8 * half + 4), magic), kFactor, offset);
}

// A word, eight values of k, as the operands of two steps. What is in the lower half of a byte becomes 128 + u
// (bfloat16) or 1024 + u (float16), in the upper half 1024 + 16 u (float16). In bfloat16 16 u is taken as it is for a
// number, 16 u * 2^-133, which is subnormal or has the smallest exponent.
template <typename T>
__device__ inline void ConvertInt4Word(uint32_t word, const Int4Offsets& offsets, uint32_t magic, uint32_t (&to)[4]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kLow = kHalf ? 0x3c003c00u : 0x3e803e80u;   // 1, 1 / 4
  constexpr uint32_t kHigh = kHalf ? 0x2c002c00u : 0x7f007f00u;  // 1 / 16, 2^127
  const uint32_t upper = word >> 8;
  to[0] = FmaPair<T>(MaskOr<0x000f000fu>(word, magic), kLow, offsets.low);
  to[2] = FmaPair<T>(MaskOr<0x000f000fu>(upper, magic), kLow, offsets.low);
  to[1] = FmaPair<T>(kHalf ? MaskOr<0x00f000f0u>(word, magic) : word & 0x00f000f0u, kHigh, offsets.high);
  to[3] = FmaPair<T>(kHalf ? MaskOr<0x00f000f0u>(upper, magic) : upper & 0x00f000f0u, kHigh, offsets.high);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_WEIGHTS_CUH_
