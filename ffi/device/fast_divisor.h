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

#ifdef __CUDACC__
// x / y, exact for x below 2^21 and y of 1 or more, in a quarter of the instructions of a division. (x + 0.5) / y is
// 0.5 / y or more from the next whole numbers, and its product with the reciprocal is off by half of that at most,
// since the reciprocal is off by 2^-23 of itself at most. Added to 2^23 and rounded down, it stands in the lowest bits.
__device__ inline uint32_t SmallQuotient(uint32_t x, uint32_t y) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(__uint2float_rn(y)));
  constexpr float kOne = 8388608.0f;
  return __float_as_uint(__fmaf_rd(__uint2float_rn(x) + 0.5f, reciprocal, kOne)) & 0x7fffff;
}
#endif

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_FAST_DIVISOR_H_
