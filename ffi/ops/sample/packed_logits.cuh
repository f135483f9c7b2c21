// Logits as bits.
#ifndef XLA_GPU_OPS_SAMPLE_PACKED_LOGITS_CUH_
#define XLA_GPU_OPS_SAMPLE_PACKED_LOGITS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace xla_gpu::sampling {

// 16 bytes of logits, as they lie in memory. NOTE: as whole words, since 16-bit elements would take a register each.
struct alignas(16) PackedLogits {
  uint32_t words[4];
};

// Bits of a logit, and the bits of minus infinity.
template <typename T>
struct LogitBits {
  using Type = uint16_t;
  static constexpr Type kMinusInfinity = std::is_same_v<T, __half> ? 0xfc00 : 0xff80;
  __device__ static float Value(Type bits) {
    if constexpr (std::is_same_v<T, __half>) return __half2float(__ushort_as_half(bits));
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
};
template <>
struct LogitBits<float> {
  using Type = uint32_t;
  static constexpr Type kMinusInfinity = 0xff800000;
  __device__ static float Value(Type bits) { return __uint_as_float(bits); }
};

}  // namespace xla_gpu::sampling

#endif  // XLA_GPU_OPS_SAMPLE_PACKED_LOGITS_CUH_
