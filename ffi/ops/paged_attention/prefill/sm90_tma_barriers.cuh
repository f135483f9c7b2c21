// The barriers of the TMA prefill kernel (sm90_tma.cuh) in shared memory: initialised, and given up again.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_BARRIERS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_BARRIERS_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_consumer.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

// Calls visit(address, arrivals) for each barrier of the CTA, unrolled.
template <typename Traits, typename Visit>
__device__ void VisitBarriers(const TmaCta<Traits>& cta, Visit visit) {
  using SharedStorage = typename Traits::SharedStorage;
  // Of a key tile: each warp of a work tile's rows.
  constexpr int kReaderWarps = Traits::kRowWarpgroups * 4;
  constexpr int kQueryBarriers = Traits::kQueryStages * Traits::kRowWarpgroups;
  constexpr auto kEmpty = static_cast<uint32_t>(offsetof(StageBarriers, empty));
  const auto each = [&](size_t offset, int stages, int full_arrivals, int empty_arrivals) {
#pragma unroll
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t barrier = cta.Address(offset + stage * sizeof(StageBarriers));
      visit(barrier, full_arrivals);
      if (empty_arrivals > 0) visit(barrier + kEmpty, empty_arrivals);
    }
  };
  // Q arrives from each lane of its warp, for which cp.async copies count; a stage is read by one warpgroup.
  each(offsetof(SharedStorage, q_barriers), kQueryBarriers, 32, 4);
  // K and V of a float8 cache come from all producer warps, and by cp.async from each lane of one warp.
  constexpr int kKvArrivals = Traits::kFloat8Cache ? Traits::kProducerWarps : Traits::kAnyPages ? 32 : 1;
  each(offsetof(SharedStorage, kv_barriers), Traits::kKvStages, kKvArrivals, kReaderWarps);
  each(offsetof(SharedStorage, tile_barriers), Traits::kTileStages, 1, Traits::kTileReaders);
  each(offsetof(SharedStorage, checked_barriers), Traits::kTileStages, 1, 0);
  each(offsetof(SharedStorage, unmasked_values), 1, 1, 0);
  if constexpr (Traits::kAlternates) each(offsetof(SharedStorage, accumulated), 3, 4, 0);
  if constexpr (Traits::kFloat8Cache) {
    each(Traits::kRawTilesBegin + offsetof(typename Traits::RawTiles, barriers), 2 * Traits::kRawStages, 1,
         Traits::kProducerWarps);
  }
}

// By one warp. One elected lane initialises all barriers: with a lane for each, the compiler makes a loop over lanes of
// every instruction, since they take uniform operands.
template <typename Traits>
__device__ void InitBarriers(const TmaCta<Traits>& cta) {
  if (ElectOne()) {
    if constexpr (!Traits::kAnyPages) {
      PrefetchTensorMap(cta.params.k_map);
      PrefetchTensorMap(cta.params.v_map);
    }
    if (cta.params.query_by_tma) PrefetchTensorMap(cta.params.q_map);
    VisitBarriers(cta, [](uint32_t barrier, int arrivals) { InitBarrier(barrier, arrivals); });
    FenceProxyAsync();
  }
  __syncwarp();
}

// By all threads, producers and consumers each in their own branch. Each side arrives at the barrier that the other
// waits for: one barrier of all threads must be one instruction, by compute-sanitizer's synccheck.
template <typename Traits>
__device__ __forceinline__ void MeetBehindWork(bool is_producer) {
  using Consumer = TmaConsumer<Traits>;
  constexpr int kOfProducers = Consumer::kTurnBarrier + Consumer::kWarpgroups + 1, kOfConsumers = kOfProducers + 1;
  NamedBarrierArrive(is_producer ? kOfConsumers : kOfProducers, Traits::kThreads);
  NamedBarrierSync(is_producer ? kOfProducers : kOfConsumers, Traits::kThreads);
}

// By all threads, when none waits for a barrier any more: from now on shared memory may be used for something else.
template <typename Traits>
__device__ void InvalidateBarriers(const TmaCta<Traits>& cta) {
  if (threadIdx.x == 0) {
    VisitBarriers(cta, [](uint32_t barrier, int) { InvalidateBarrier(barrier); });
  }
  __syncthreads();
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_BARRIERS_CUH_
