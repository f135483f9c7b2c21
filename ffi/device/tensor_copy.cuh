// Copies of boxes of a four-dimensional tensor into shared memory by the copy engine of sm_90 and above.
#ifndef XLA_GPU_DEVICE_TENSOR_COPY_CUH_
#define XLA_GPU_DEVICE_TENSOR_COPY_CUH_

#include <cuda.h>

#include <cstdint>

#include "ffi/device/async_copy.cuh"

namespace xla_gpu {

__device__ inline void PrefetchTensorMap(const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Copies the box of `map` at (x, y, z, w), x fastest, to shared address `shared`; parts outside the tensor become
// zeros. `barrier` counts the box's bytes when they are there. Called by one thread.
__device__ inline void CopyBox(uint32_t shared, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z, int w,
                               uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
#endif
}

// Orders this thread's ordinary accesses to shared memory before the copy engine's later ones.
__device__ inline void FenceForCopies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_TENSOR_COPY_CUH_
