// Thread block clusters: a barrier and writes to another block's shared memory. Callable on sm_90 and above.
#ifndef XLA_GPU_DEVICE_CLUSTER_CUH_
#define XLA_GPU_DEVICE_CLUSTER_CUH_

#include <cstdint>

namespace xla_gpu {

// Arrive orders this thread's earlier writes before other threads' reads after their wait. All threads of the cluster
// take part; arrivals and waits alternate.
__device__ inline void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes two floats to shared address `shared` of the block of rank `rank`.
__device__ inline void StoreRemote(uint32_t shared, uint32_t rank, float2 value) {
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(value.x), "f"(value.y) : "memory");
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_CLUSTER_CUH_
