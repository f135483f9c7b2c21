// Clusters of CTAs, which synchronise and reach each other's shared memory. Code for architectures before sm_90 has
// clusters of one CTA: launch it so.
#ifndef XLA_GPU_DEVICE_CLUSTER_CUH_
#define XLA_GPU_DEVICE_CLUSTER_CUH_

#include <cstdint>

namespace xla_gpu {

__device__ __forceinline__ uint32_t ClusterRank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// The cluster's number in the grid, of one dimension.
__device__ __forceinline__ uint32_t ClusterId() {
#if __CUDA_ARCH__ >= 900
  uint32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
#else
  return blockIdx.x;
#endif
}

__device__ __forceinline__ uint32_t ClusterSize() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// Waits for all threads of the cluster, whose writes to shared memory are then visible. No CTA may end while another
// one still reads its shared memory.
__device__ __forceinline__ void ClusterSync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The same, but of writes to shared memory alone, each CTA's to its own. ClusterSync would wait for writes to global
// memory, too, or find out that there are none, which takes as long.
__device__ __forceinline__ void ClusterSyncOwnShared() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\nbarrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// Waits until all threads of the cluster have come here. Orders no writes: for the end of a kernel whose CTAs read each
// other's shared memory, where ClusterSync would wait for this CTA's results to have been written.
__device__ __forceinline__ void ClusterSyncOfReaders() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The same place in the shared memory of another CTA of the cluster.
template <typename T>
__device__ __forceinline__ T* SharedOf(T* shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  T* other;
  asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(shared), "r"(rank));
  return other;
#else
  return shared;
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_CLUSTER_CUH_
