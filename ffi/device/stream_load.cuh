// Loads of data that a kernel reads once: past L1, and with a policy for L2.
#ifndef XLA_GPU_DEVICE_STREAM_LOAD_CUH_
#define XLA_GPU_DEVICE_STREAM_LOAD_CUH_

#include <cstdint>

namespace xla_gpu {

// The first to leave L2: what createpolicy.fractional.L2::evict_first makes of the fraction 1.
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000;

__device__ inline uint4 LoadStream16(uint64_t policy, const void* from) {
  uint4 to;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "l"(from), "l"(policy));
  return to;
}

__device__ inline uint2 LoadStream8(uint64_t policy, const void* from) {
  uint2 to;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0,%1}, [%2], %3;"
               : "=r"(to.x), "=r"(to.y)
               : "l"(from), "l"(policy));
  return to;
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_STREAM_LOAD_CUH_
