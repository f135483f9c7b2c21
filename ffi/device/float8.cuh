// Conversions of several float8 values of a cache to wider types. All are exact.
#ifndef XLA_GPU_DEVICE_FLOAT8_CUH_
#define XLA_GPU_DEVICE_FLOAT8_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "ffi/device/mma.cuh"

namespace xla_gpu {

// The lower two bytes as a pair of T, __half or __nv_bfloat16. kE4M3: float8_e4m3fn; else float8_e5m2.
template <typename T, bool kE4M3>
__device__ inline uint32_t ConvertFloat8Pair(uint32_t bytes) {
  const uint32_t halves = Float8PairToHalf2<kE4M3 ? __NV_E4M3 : __NV_E5M2>(bytes);
  if constexpr (std::is_same_v<T, __half>) {
    return halves;
  } else {
    const float2 pair = Unpack<__half>(halves);
    return Pack<T>(pair.x, pair.y);
  }
}

// Eight bytes as eight T.
template <typename T, bool kE4M3>
__device__ inline uint4 ConvertFloat8(uint2 raw) {
  return make_uint4(ConvertFloat8Pair<T, kE4M3>(raw.x), ConvertFloat8Pair<T, kE4M3>(raw.x >> 16),
                    ConvertFloat8Pair<T, kE4M3>(raw.y), ConvertFloat8Pair<T, kE4M3>(raw.y >> 16));
}

// Four bytes as four floats.
template <bool kE4M3>
__device__ inline float4 Float8ToFloat4(uint32_t raw) {
  const float2 low = Unpack<__half>(ConvertFloat8Pair<__half, kE4M3>(raw));
  const float2 high = Unpack<__half>(ConvertFloat8Pair<__half, kE4M3>(raw >> 16));
  return make_float4(low.x, low.y, high.x, high.y);
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_FLOAT8_CUH_
