// mla_attention in float16 and bfloat16 on sm_90a, for latents of 512 and keys of 576 elements. A CTA computes work
// tiles (sm90_schedule.cuh) of 64 rows, (token, head), of a sequence: producer warps load Q and key tiles of 64 keys
// by TMA, two consumer warpgroups compute (sm90_consumer.cuh). The kernel in sm90_combine.cuh follows.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/mla_attention/sm90_consumer.cuh"
#include "ffi/ops/mla_attention/sm90_producer.cuh"
#include "ffi/ops/mla_attention/sm90_schedule.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"

namespace xla_gpu::mla {

// By one warp.
__device__ inline void InitBarriers(const Cta& cta) {
  if (ElectOne()) {
    PrefetchTensorMap(cta.params.q_map);
    PrefetchTensorMap(cta.params.cache_map);
    // An arrival for each consumer warp that reads a stage last.
    const auto init = [](uint32_t barriers, int stages, int readers) {
      for (int stage = 0; stage < stages; ++stage) {
        const uint32_t full = barriers + stage * static_cast<int>(sizeof(prefill::StageBarriers));
        InitBarrier(full, 1);
        InitBarrier(full + static_cast<int>(offsetof(prefill::StageBarriers, empty)), readers);
      }
    };
    init(cta.keys.barriers, kStages * kPieces, 4);
    init(cta.query.barriers, 1, 8);
    init(cta.tiles.barriers, 2, 8 + kProducerThreads / 32 - 1);  // the producer's other warps, too
    FenceProxyAsync();
  }
  __syncwarp();
}

template <typename T>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? kThreads : 32, 1)
    MlaSm90Kernel(const __grid_constant__ Sm90Params params) {
#if XLA_GPU_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const Cta cta(params, shared);
  if (threadIdx.x < 32) InitBarriers(cta);
  WaitForPreviousKernel();
  AllowDependentLaunch();
  const Schedule schedule(params, cta.Storage().schedule);  // its barriers also show the mbarriers to all threads
  // By a shuffle, so that the compiler knows it to be uniform in a warp.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kProducerThreads / 32) {
    DecreaseRegisters<kProducerRegisters>();
    Producer(cta, warp).Run(schedule);
  } else {
    IncreaseRegisters<kConsumerRegisters>();
    Consumer<T>(cta, (warp - kProducerThreads / 32) / 4).Run();
  }
#endif
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_CUH_
