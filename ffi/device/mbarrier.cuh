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

// Arrives when this thread's cp.async copies so far are complete, without waiting for them.
__device__ inline void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only after `bytes` more from the copy engine.
__device__ inline void ArriveExpecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
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

// Makes writes to shared memory that this thread has made, or learnt of through a barrier, visible to the tensor cores'
// own reads.
__device__ inline void FenceForTensorCores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers, number 0 being __syncthreads. `threads`: how many take part, those that only arrive included.
__device__ inline void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// As SyncNamed; whether `value` is true in any of the threads.
__device__ inline bool SyncNamedOr(int barrier, int threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}
__device__ inline void ArriveNamed(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_MBARRIER_CUH_
