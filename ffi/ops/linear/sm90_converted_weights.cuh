// Weights in registers for the kernel of sm_90a that converts them: four values of k of a weight row become two
// registers of wgmma's A operand. All conversions are exact.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_WEIGHTS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_WEIGHTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/device/mma.cuh"
#include "ffi/ops/linear/args.h"
#include "ffi/ops/linear/weight_formats.cuh"

namespace xla_gpu::linear {

// Whether the two registers have values (0, 2) and (1, 3), instead of (0, 1) and (2, 3).
template <WeightFormat kFormat>
inline constexpr bool kSplitsPairs = kFormat == WeightFormat::kInt8;

// (value & kMask) | bits, and (value & kMask) ^ bits: one instruction where `bits` is in a register, two with a
// constant.
template <uint32_t kMask>
__device__ inline uint32_t MaskOr(uint32_t value, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "n"(kMask), "r"(bits));
  return result;
}
template <uint32_t kMask>
__device__ inline uint32_t MaskXor(uint32_t value, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(value), "n"(kMask), "r"(bits));
  return result;
}

template <typename T>
__device__ inline uint32_t SubtractPair(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair value = __hsub2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(value);
}

// The constant that conversions take as `magic`, in a register.
template <typename T, WeightFormat kFormat>
__device__ inline uint32_t ConversionMagic() {
  uint32_t magic = kFormat == WeightFormat::kInt8 && std::is_same_v<T, __half> ? 0x64806480u : kInt4Magic<T>;
  asm volatile("" : "+r"(magic));
  return magic;
}

// A word of float8 or int8.
template <typename T, WeightFormat kFormat>
__device__ inline void ConvertWord(uint32_t word, uint32_t magic, uint32_t* low, uint32_t* high) {
  if constexpr (kFormat == WeightFormat::kFloat8) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
        : "=r"(*low), "=r"(*high)
        : "r"(word));
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const float2 first = Unpack<__half>(*low), second = Unpack<__half>(*high);
      *low = Pack<T>(first.x, first.y);
      *high = Pack<T>(second.x, second.y);
    }
  } else if constexpr (std::is_same_v<T, __half>) {
    // 0x6400 | u is 1024 + u, where u is the value + 128.
    const uint32_t bias = 0x64806480u;  // 1152
    *low = SubtractPair<T>(MaskXor<0x00ff00ffu>(word, magic), bias);
    *high = SubtractPair<T>(MaskXor<0x00ff00ffu>(word >> 8, magic), bias);
  } else {
    // 0x4300 | u is 128 + u for 7 bits: those of the value, less 256 instead of 128 where it is negative.
    *low = SubtractPair<T>(MaskOr<0x007f007fu>(word, magic), MaskOr<0x00800080u>(word, magic));
    *high = SubtractPair<T>(MaskOr<0x007f007fu>(word >> 8, magic), MaskOr<0x00800080u>(word >> 8, magic));
  }
}

// Scales and zero points of a lane's two weight rows, r and r + 8: of int4 those of groups g and g + 1 along k, g being
// even, else the scale of group g.
template <typename T, WeightFormat kFormat>
struct RowGroups {
  uint32_t scale[2];        // of int4 two T, else a float32
  uint32_t zero_points[2];  // two bytes
};

// Loads them.
template <typename T, WeightFormat kFormat>
class GroupLoader {
 public:
  __device__ GroupLoader(const LinearArgs& args, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r, row += 8) {
      const int scale_row = kFormat == WeightFormat::kInt4 ? row : row / static_cast<int>(kQuantGroup);
      first_[r] = row < args.n ? static_cast<int64_t>(scale_row) * args.groups : -1;
    }
  }

  __device__ void Load(const LinearArgs& args, int group, RowGroups<T, kFormat>* to) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool read = first_[r] >= 0 && group < args.groups;
      const int64_t at = first_[r] + group;
      if constexpr (kFormat == WeightFormat::kInt4) {
        to->scale[r] = 0;
        to->zero_points[r] = 0x0808;
        if (!read) continue;
        const uint16_t* const scales = static_cast<const uint16_t*>(args.weight_scale) + at;
        const uint8_t* const zeros = args.zero_point + at;
        if (args.groups % 2 == 0) {
          to->scale[r] = *reinterpret_cast<const uint32_t*>(scales);
          if (args.zero_point != nullptr) to->zero_points[r] = *reinterpret_cast<const uint16_t*>(zeros);
        } else {
          const bool both = group + 1 < args.groups;
          to->scale[r] = scales[0] | (both ? scales[1] : 0u) << 16;
          if (args.zero_point != nullptr) to->zero_points[r] = zeros[0] | (both ? zeros[1] : 8u) << 8;
        }
      } else {
        to->scale[r] = 0x3f800000;  // 1
        if (read) to->scale[r] = static_cast<const uint32_t*>(args.weight_scale)[at];
      }
    }
  }

 private:
  int64_t first_[2];  // group of the rows; negative where there is no row
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_WEIGHTS_CUH_
