// mbarriers (barriers in shared memory with phases) and the named barriers of a CTA. sm_90.
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

// As `count` arrivals.
__device__ inline void ArriveBarrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives, in the background, once this thread's cp.async copies so far have completed.
__device__ inline void ArriveOnCpAsync(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of TMA copies.
__device__ inline void ArriveExpectTx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity; phases count from 0. Before the end of phase 0 a wait for parity 1
// returns at once.
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

// Whether the phase of this parity has ended.
__device__ inline bool HasPassed(uint32_t barrier, uint32_t parity) {
  int passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// Makes writes to shared memory by this thread, or observed through a barrier, visible to the async proxy: wgmma and
// TMA.
__device__ inline void FenceProxyAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before its place in shared memory is used for something else. Nobody waits for it any more.
__device__ inline void InvalidateBarrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Named barriers; number 0 is __syncthreads. `threads`: all that take part, those that only arrive included.
__device__ inline void NamedBarrierSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// As NamedBarrierSync; returns whether `value` is true in any of the threads.
__device__ inline bool NamedBarrierSyncOr(int barrier, int threads, bool value) {
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
__device__ inline void NamedBarrierArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_MBARRIER_CUH_
