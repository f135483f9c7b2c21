// Unsigned division by a number that the host knows, as one multiplication by its precomputed reciprocal.
#ifndef XLA_GPU_DEVICE_FAST_DIVISOR_H_
#define XLA_GPU_DEVICE_FAST_DIVISOR_H_

#include <cstdint>

namespace xla_gpu {

// Exact for numerators and divisors below 2^31.
struct FastDivisor {
  uint32_t divisor;
  uint32_t multiplier;  // ceil(2^(31 + shift) / divisor)
  int shift;            // ceil(log2(divisor))

  // divisor: 1 or more.
  static FastDivisor Make(int64_t divisor) {
    FastDivisor fast{static_cast<uint32_t>(divisor), 0, 0};
    while (int64_t{1} << fast.shift < divisor) ++fast.shift;
    const uint64_t rounded_up = (uint64_t{1} << (31 + fast.shift)) + static_cast<uint64_t>(divisor) - 1;
    fast.multiplier = static_cast<uint32_t>(rounded_up / static_cast<uint64_t>(divisor));
    return fast;
  }

#ifdef __CUDACC__
  __device__ uint32_t Divide(uint32_t x) const { return __umulhi(2u * x, multiplier) >> shift; }
#endif
};

// Without the shift, which saves an instruction: exact where x * divisor < 2^31, and at most one too large for other x
// below 2^31.
struct SmallDivisor {
  uint32_t multiplier;  // ceil(2^31 / divisor)

  static SmallDivisor Make(int64_t divisor) {
    return {static_cast<uint32_t>(((int64_t{1} << 31) + divisor - 1) / divisor)};
  }

#ifdef __CUDACC__
  __device__ uint32_t Divide(uint32_t x) const { return __umulhi(2u * x, multiplier); }
#endif
};

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_FAST_DIVISOR_H_
