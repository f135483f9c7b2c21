// Thread block clusters on sm_90 and above: messages between blocks' shared memories, counted in by barriers there.
//
// NOTE: barrier.cluster with its default semantics orders all memory: the arrival waits for every copy that the thread
// has in flight, and the wait empties L1. Here it is only used to start with; blocks that stream data meet through
// mbarriers, which count the bytes that have come.
#ifndef XLA_GPU_DEVICE_CLUSTER_CUH_
#define XLA_GPU_DEVICE_CLUSTER_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"

namespace xla_gpu {

// An arrival at a barrier in this block's shared memory completes its phase after `arrivals` of them, and when the
// bytes announced with them have come. Phases have parity 0, 1, 0, …
__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals) : "memory");
#endif
}

// After InitBarrier, before the cluster's blocks may use the barriers: this thread's are seen by all that
// ClusterStartWait.
__device__ inline void ClusterStartArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void ClusterStartWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The one arrival of a phase: announces `bytes`, which may have come already.
__device__ inline void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
#endif
}

__device__ inline void WaitBarrier(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile("{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                 : "=r"(done)
                 : "r"(SharedAddress(barrier)), "r"(parity)
                 : "memory");
  }
#endif
}

// The address in the block of rank `rank` that `pointer` has in this one.
__device__ inline uint32_t RemoteAddress(const void* pointer, uint32_t rank) {
  uint32_t remote = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(SharedAddress(pointer)), "r"(rank));
#endif
  return remote;
}

// Arrives at another block's barrier. Orders nothing.
__device__ inline void ArriveRemote(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Sends two floats; the other block's barrier counts their bytes when they are there.
__device__ inline void SendRemote(uint32_t to, uint32_t barrier, float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(value.x), "f"(value.y), "r"(barrier)
               : "memory");
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_CLUSTER_CUH_
