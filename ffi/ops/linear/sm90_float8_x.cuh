// x for the kernel of sm_90a for float8 weights: split into two terms of float8, in shared memory or in front.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FLOAT8_X_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FLOAT8_X_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/linear/sm90_float8_traits.cuh"

namespace xla_gpu::linear {

// Two pairs of float16, at most 256, as four float8 numbers each of two terms.
__device__ inline void SplitFour(uint32_t first, uint32_t second, uint32_t* high, uint32_t* low) {
  asm("{ .reg .b16 a, b; .reg .b32 x, y;\n\t"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, %2; cvt.rn.satfinite.e4m3x2.f16x2 b, %3; mov.b32 %0, {a, b};\n\t"
      "cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;\n\t"
      "sub.rn.f16x2 x, %2, x; sub.rn.f16x2 y, %3, y;\n\t"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, x; cvt.rn.satfinite.e4m3x2.f16x2 b, y; mov.b32 %1, {a, b}; }"
      : "=&r"(*high), "=r"(*low)
      : "r"(first), "r"(second));
}

// The larger of the lower halves, and that of the upper halves.
__device__ inline uint32_t MaxPair(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

// A pair of bfloat16, times `scale`, as float16.
__device__ inline uint32_t ScalePair(uint32_t pair, float scale) {
  const __half2 scaled =
      __floats2half2_rn(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
  return reinterpret_cast<const uint32_t&>(scaled);
}

// A pair of bfloat16 of which one may be infinite or NaN: infinite values as 1 or -1, NaN as NaN, finite ones
// as 0.
__device__ inline uint32_t SpecialPair(uint32_t pair) {
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = pair >> (16 * i) & 0x7fffu, sign = pair >> (16 * i) & 0x8000u;
    if (bits >= 0x7f80u) result |= (bits > 0x7f80u ? 0x7fffu : sign | 0x3f80u) << (16 * i);
  }
  return result;
}

// The scale of values of which the largest has magnitude `most`; returns its inverse. Infinite values and NaN: 1, and
// infinity.
__device__ inline float ScaleOfLargest(uint32_t most, float* scale) {
  const bool special = most >= 0x7f80u;
  const int exponent = special ? 134 : max(static_cast<int>(most >> 7), 8);
  *scale = __uint_as_float(static_cast<uint32_t>(261 - exponent) << 23);
  return __uint_as_float(special ? 0x7f800000u : static_cast<uint32_t>(exponent - 7) << 23);
}

// The scale of a row's 256 values, of which a lane of eight has 32 in `words`: a power of two that makes the largest
// 128 to 256. Returns its inverse. Infinite values and NaN: see SpecialPair; the inverse is infinite.
__device__ inline float FindScale(uint32_t (&words)[4][4], float* scale) {
  uint32_t most = 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    uint32_t more = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) more = MaxPair(more, words[p][w] & 0x7fff7fffu);
    most = MaxPair(most, more);
  }
  most = max(most & 0xffffu, most >> 16);
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
  const bool special = most >= 0x7f80u;
  if (__any_sync(~0u, special)) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int w = 0; w < 4; ++w) words[p][w] = special ? SpecialPair(words[p][w]) : words[p][w];
    }
  }
  return ScaleOfLargest(most, scale);
}

// The same of a row's 256 values, of which a lane of a warp has 8.
__device__ inline float FindScaleOfWarp(uint32_t (&words)[4], float* scale) {
  uint32_t most = 0;
#pragma unroll
  for (const uint32_t word : words) most = MaxPair(most, word & 0x7fff7fffu);
  most = max(most & 0xffffu, most >> 16);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
  if (most >= 0x7f80u) {
#pragma unroll
    for (uint32_t& word : words) word = SpecialPair(word);
  }
  return ScaleOfLargest(most, scale);
}

// Splits each stage's 256 values of each row, in place: the first terms in the stage's first two panels, the second
// terms in the others. A row's values are multiplied by a power of two first, so that the largest is 128 to 256;
// `factors` gets its inverse. What 8 significant bits hold, two float8 numbers of 4 hold: values down to 2^-9 of the
// largest are exact. By one of the kSplitters warps.
template <typename Config>
__device__ inline void SplitX(const Sm90Args& args, int stages, char* xs, float* factors,
                              ConvertedBarriers<Config> barriers, int warp) {
  constexpr int kPanelBytes = Config::kXPanelBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32, octet = lane / 8, j = lane % 8;
  // An item is 4 rows of 8, 8 lanes a row: no bank conflicts, neither of the loads of 16 bytes nor of the stores of 8.
  const int items = (args.linear.rows + 7) / 8 * 2;
  PipelineState ring;
  int item = warp;
  for (int i = 0; i < stages; ++i) {
    char* const stage = xs + ring.stage * Config::kXStageBytes;
    WaitBarrier(barriers.XFull(ring.stage), ring.phase);
#pragma unroll 1
    for (; item < items; item += Config::kSplitters) {
      const int row_of_8 = item % 2 * 2 + octet % 2 * 4 + octet / 2, row = item / 2 * 8 + row_of_8;
      char* const at = stage + row * 128;
      uint32_t words[4][4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint4 four = *reinterpret_cast<const uint4*>(at + p * kPanelBytes + ((j ^ row_of_8) << 4));
        words[p][0] = four.x, words[p][1] = four.y, words[p][2] = four.z, words[p][3] = four.w;
      }
      float scale;
      const float inverse = FindScale(words, &scale);
      __syncwarp();  // the lanes of a row have read it
#pragma unroll
      for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[p][w] = ScalePair(words[p][w], scale);
        uint2 high, low;
        SplitFour(words[p][0], words[p][1], &high.x, &low.x);
        SplitFour(words[p][2], words[p][3], &high.y, &low.y);
        char* const to = at + p / 2 * kPanelBytes + (((p % 2 * 4 + j / 2) ^ row_of_8) << 4) + j % 2 * 8;
        *reinterpret_cast<uint2*>(to) = high;
        *reinterpret_cast<uint2*>(to + 2 * kPanelBytes) = low;
      }
      if (j == 0) factors[ring.stage * Config::kRowTile + row] = inverse;
    }
    item -= items;
    FenceProxyAsync();
    __syncwarp();
    if (lane == 0) ArriveBarrier(barriers.XReady(ring.stage));
    ring.Advance(Config::kXStages);
  }
}

inline constexpr int kSplitRows = kLinearMaxRows;  // zeros past the rows of x

// Splits up to 64 rows: `terms` gets float8[2][kSplitRows][k], `factors` float[k / 256, rounded up][kSplitRows]. A warp
// splits 256 values of four rows.
template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    SplitRowsKernel(const uint16_t* x, int rows, int k, char* terms, float* factors) {
#if XLA_GPU_HAS_WGMMA
  AllowDependentLaunch();
  const int lane = static_cast<int>(threadIdx.x) % 32, j = lane % 8;
  const int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int group = item / (kSplitRows / 4), row = item % (kSplitRows / 4) * 4 + lane / 8;
  WaitForPreviousKernel();
  uint32_t words[4][4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int column = group * 256 + p * 64 + j * 8;
    uint4 four = {0, 0, 0, 0};
    if (row < rows && column < k) four = *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * k + column);
    words[p][0] = four.x, words[p][1] = four.y, words[p][2] = four.z, words[p][3] = four.w;
  }
  float scale;
  const float inverse = FindScale(words, &scale);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int column = group * 256 + p * 64 + j * 8;
#pragma unroll
    for (int w = 0; w < 4; ++w) words[p][w] = ScalePair(words[p][w], scale);
    uint2 high, low;
    SplitFour(words[p][0], words[p][1], &high.x, &low.x);
    SplitFour(words[p][2], words[p][3], &high.y, &low.y);
    if (column >= k) continue;
    char* const to = terms + static_cast<int64_t>(row) * k + column;
    *reinterpret_cast<uint2*>(to) = high;
    *reinterpret_cast<uint2*>(to + static_cast<int64_t>(kSplitRows) * k) = low;
  }
  if (j == 0) factors[group * kSplitRows + row] = inverse;
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FLOAT8_X_CUH_
