// cp.async: copies from global to shared memory that complete in the background, in groups, per thread.
#ifndef XLA_GPU_DEVICE_ASYNC_COPY_CUH_
#define XLA_GPU_DEVICE_ASYNC_COPY_CUH_

#include <cstdint>

namespace xla_gpu {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// An L2 policy for data that is read once.
__device__ inline uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes past L1.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy)
               : "memory");
}

// As above; writes zeros, and reads nothing, where !read.
// NOTE: not the form with a source size, for which the compiler moves the address about.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool read, uint64_t policy) {
  asm volatile(
      "{.reg .pred ignore; setp.eq.u32 ignore, %2, 0;"
      " cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, ignore, %3;}" ::"r"(shared),
      "l"(global), "r"(static_cast<uint32_t>(read)), "l"(policy)
      : "memory");
}

// As CopyAsync16 for rows that are only 8-byte aligned; these go through L1.
__device__ inline void CopyAsync8(uint32_t shared, const void* global, bool read, uint64_t policy) {
  asm volatile(
      "{.reg .pred ignore; setp.eq.u32 ignore, %2, 0;"
      " cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, ignore, %3;}" ::"r"(shared),
      "l"(global), "r"(static_cast<uint32_t>(read)), "l"(policy)
      : "memory");
}

// Copies 4 bytes, through L1.
__device__ inline void CopyAsync4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ inline void CommitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void WaitAsync() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// WaitAsync for a count that is the same in all threads, but only known at run time: 0 to 5. The likely one is asked
// for first, and the questions are branches rather than a table: a table's look-up takes longer than a branch.
__device__ inline void WaitAsync(int pending) {
  if (pending == 2) {
    WaitAsync<2>();
  } else if (pending == 1) {
    WaitAsync<1>();
  } else if (pending == 5) {
    WaitAsync<5>();
  } else if (pending == 3) {
    WaitAsync<3>();
  } else if (pending == 4) {
    WaitAsync<4>();
  } else {
    WaitAsync<0>();
  }
}

// Brings the 128 bytes at `global` into L2, some time.
__device__ inline void PrefetchToL2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ASYNC_COPY_CUH_
