// Barriers in shared memory that count arrivals and can be waited for by phase, and the named barriers of a block.
// sm_90.
#ifndef XLA_GPU_DEVICE_MBARRIER_CUH_
#define XLA_GPU_DEVICE_MBARRIER_CUH_

#include <cstdint>

namespace xla_gpu {

__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void ArriveBarrier(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase whose number has this parity; phases count from 0. Before the end of phase 0 a wait
// for parity 1 returns at once.
__device__ inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes this thread's completed writes to shared memory visible to the tensor cores' own reads.
__device__ inline void FenceForTensorCores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers, number 0 being __syncthreads. `threads`: how many take part, those that only arrive included.
__device__ inline void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void ArriveNamed(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_MBARRIER_CUH_
