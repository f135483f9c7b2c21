// async_copy.cuh's copies for data that other blocks read too: no hint, so that it stays in L2 as long as it is used.
#ifndef XLA_GPU_DEVICE_CACHED_COPY_CUH_
#define XLA_GPU_DEVICE_CACHED_COPY_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"

namespace xla_gpu {

// Copies 16 bytes past L1; writes zeros, and reads nothing, where !read.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(read ? 16 : 0)
               : "memory");
}

// As CopyAsync16 for rows that are only 8-byte aligned; these go through L1.
__device__ inline void CopyAsync8(uint32_t shared, const void* global, bool read) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(read ? 8 : 0)
               : "memory");
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_CACHED_COPY_CUH_
