// cp.async: copies from global to shared memory that complete in the background, in groups of a thread.
#ifndef XLA_GPU_DEVICE_ASYNC_COPY_CUH_
#define XLA_GPU_DEVICE_ASYNC_COPY_CUH_

#include <cstdint>

namespace xla_gpu {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The L2 policy for data that is read once: evicted first. It is what createpolicy.fractional.L2::evict_first returns
// for the fraction 1.
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000;
// The policy of accesses without one, as createpolicy.fractional.L2::evict_normal returns it.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000;

// Copies 16 bytes, bypassing L1. Where !read it writes zeros and reads nothing. Without an L2 policy, for data that
// other CTAs read too.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(read ? 16 : 0)
               : "memory");
}

// The same with an L2 policy.
// NOTE: the form with a source size instead of a predicate costs more instructions: the compiler moves the address to
// other registers.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool read, uint64_t policy) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.eq.u32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, ignore, %3;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<uint32_t>(read)), "l"(policy)
      : "memory");
}

// As CopyAsync16, for addresses that are aligned to 8 bytes only. Goes through L1: cp.async.cg has 16 bytes alone.
__device__ inline void CopyAsync8(uint32_t shared, const void* global, bool read) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(read ? 8 : 0)
               : "memory");
}

__device__ inline void CommitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void WaitAsync() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Starts to bring the 128 bytes at `global` into L2.
__device__ inline void PrefetchToL2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// The same for `bytes` bytes. Address and number are multiples of 16. Before sm_90 it does nothing.
__device__ inline void PrefetchRowToL2(const void* global, uint32_t bytes, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global), "r"(bytes), "l"(policy));
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ASYNC_COPY_CUH_
