// bidirectional_attention in float16 and bfloat16 for sm_90a. Persistent CTAs take one work tile (row tile of a
// sequence and query head) after the other. In a CTA a producer warp loads Q, K and V by TMA, in place, into rings of
// stages in shared memory, and consumer warpgroups compute, 64 rows each.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/bidirectional_attention/sm90_consumer.cuh"
#include "ffi/ops/bidirectional_attention/sm90_producer.cuh"
#include "ffi/ops/bidirectional_attention/sm90_schedule.cuh"
#include "ffi/ops/bidirectional_attention/sm90_traits.cuh"

namespace xla_gpu::bidirectional {

// By one warp.
template <typename Traits>
__device__ void InitBarriers(const Sm90Cta<Traits>& cta) {
  if (ElectOne()) {
    PrefetchTensorMap(cta.params.q_map);
    PrefetchTensorMap(cta.params.k_map);
    PrefetchTensorMap(cta.params.v_map);
    PrefetchTensorMap(cta.params.k_tail_map);
    PrefetchTensorMap(cta.params.v_tail_map);
    const auto init = [](uint32_t barriers, int stages) {
      for (int stage = 0; stage < stages; ++stage) {
        const uint32_t full = barriers + stage * static_cast<int>(sizeof(prefill::StageBarriers));
        InitBarrier(full, 1);
        // An arrival for each consumer warp.
        InitBarrier(full + static_cast<int>(offsetof(prefill::StageBarriers, empty)), Traits::kWarpgroups * 4);
      }
    };
    init(cta.query.barriers, Traits::kQueryStages);
    init(cta.keys.barriers, Traits::kKeyStages);
    init(cta.values.barriers, Traits::kValueStages);
    init(cta.tiles.barriers, Traits::kTileStages);
    FenceProxyAsync();
  }
  __syncwarp();
}

// Writes `word` to the rows [begin, end) of all heads, by all CTAs.
template <typename T>
__device__ void FillTokens(const Sm90Params& params, int begin, int end, uint32_t word) {
  const int64_t row_vectors = static_cast<int64_t>(params.num_heads) * params.head_dim * sizeof(T) / 16;
  uint4* const out = static_cast<uint4*>(params.out);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = begin * row_vectors + blockIdx.x * blockDim.x + threadIdx.x; i < end * row_vectors; i += threads) {
    out[i] = make_uint4(word, word, word, word);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Traits::kThreads : 32, Traits::kCtas)
    BidirectionalSm90Kernel(const __grid_constant__ Sm90Params params) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Traits::Element;
  extern __shared__ __align__(1024) char shared[];
  const Sm90Cta<Traits> cta(params, shared);
  if (threadIdx.x < 32) InitBarriers(cta);
  WaitForPreviousKernel();
  AllowDependentLaunch();
  const Sm90Schedule<Traits> schedule(cta);  // its barrier also shows the mbarriers to all threads
  if (!schedule.valid) {
    FillTokens<T>(params, 0, params.num_tokens, Pack<T>(CUDART_NAN_F, CUDART_NAN_F));
    return;
  }
  FillTokens<T>(params, 0, schedule.owned_begin, 0);
  FillTokens<T>(params, schedule.owned_end, params.num_tokens, 0);
  if (blockIdx.x >= schedule.total) return;

  // By a shuffle, so that the compiler knows it to be uniform in a warp.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if constexpr (Traits::kSmall) {
    if (warp == Traits::kProducerWarp) {
      Sm90Producer<Traits>{cta}.Run(schedule);
    } else {
      Sm90Consumer<Traits>(cta, 0).Run();
    }
  } else {
    if (warp < 4) {
      DecreaseRegisters<Traits::kProducerRegisters>();
      if (warp == Traits::kProducerWarp) Sm90Producer<Traits>{cta}.Run(schedule);
    } else {
      IncreaseRegisters<Traits::kConsumerRegisters>();
      Sm90Consumer<Traits>(cta, warp / 4 - 1).Run();
    }
  }
#endif
}

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_CUH_
