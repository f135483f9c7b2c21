// The single-tile scheduler of the prefill kernels. Scheduling is planned on the device: each CTA finds its work tiles
// from the metadata alone, so that the launch depends on shapes only.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_TILE_SCHEDULER_CUH_

#include <algorithm>

#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/prompt_list.cuh"
#include "ffi/ops/paged_attention/prefill/prompt_tiles.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::prefill {

// The scheduler of a kernel whose CTAs have one work tile each. CTAs start in the order of their number, so that the
// last ones to start are the short ones.
template <int kThreads, int kRows>
class SingleTileScheduler {
 public:
  // Up to 1024 prompts are listed at once; a call with more is scheduled in several batches.
  using List = PromptList<kThreads, kRows, 1024, std::min(kThreads, 256), WholePromptKv>;
  struct Storage {
    typename List::Storage list;
    WorkTile tile;
  };

  // By all threads of the CTA together.
  __device__ SingleTileScheduler(const PagedAttentionParams& params, Storage& storage)
      : params_(params),
        storage_(storage),
        list_(params, static_cast<unsigned>(params.num_heads / params.num_kv_heads), WholePromptKv(), storage.list) {}

  // The work tile of the given rank, over all sequences and kv heads; kv heads are next to each other, since they read
  // the same pages. False if there are only `*total` tiles. By all threads of the CTA, with a barrier before the
  // storage is used for something else.
  __device__ bool Find(unsigned rank, WorkTile* tile, unsigned* total) {
    const int num_live = LiveSequences(params_);
    const bool in_order = QueryStartsInOrder(params_, num_live);
    const auto kv_heads = static_cast<unsigned>(params_.num_kv_heads);
    const unsigned row_tile = rank / kv_heads;
    unsigned before = 0;  // tiles of the batches so far
    for (int next = 0; next < num_live;) {
      list_.Clear();
      __syncthreads();
      for (; next < num_live && list_.HasRoom(); next += kThreads) list_.Collect(next, num_live, in_order);
      const unsigned in_batch = list_.CountTiles();
      if (row_tile < before + in_batch) {
        if (threadIdx.x < 32) {
          const WorkTile found = list_.Find(row_tile - before, rank - row_tile * kv_heads);
          if (threadIdx.x == 0) storage_.tile = found;
        }
        __syncthreads();
        // NOTE: loaded from one address, so that the compiler knows it to be uniform.
        *tile = storage_.tile;
        return true;
      }
      before += in_batch;
      __syncthreads();
    }
    *total = before * kv_heads;
    return false;
  }

 private:
  const PagedAttentionParams& params_;
  Storage& storage_;
  List list_;
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_TILE_SCHEDULER_CUH_
