// The sequence of a call that has one, by a kernel of the prefill path: where it has no more tokens than the decode
// path takes, although the call has room for many more. Its bits are those of the split-KV kernel.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ONE_SEQUENCE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ONE_SEQUENCE_CUH_

#include "ffi/ops/paged_attention/decode/epilogue.cuh"
#include "ffi/ops/paged_attention/decode/sequence_plan.cuh"
#include "ffi/ops/paged_attention/decode/split_kv_kernel.cuh"
#include "ffi/ops/paged_attention/decode/work_range.cuh"

namespace xla_gpu::decode {

template <typename Traits>
struct OneSequenceStorage {
  alignas(1024) char k[Traits::kStages][Traits::kWarps][Traits::kTileBytes];
  alignas(1024) char v[Traits::kStages][Traits::kWarps][Traits::kTileBytes];
  SharedScores<Traits> scores[2];   // of this iteration and the one before, in turns
  WorkRange range[Traits::kWarps];  // registers are short
};

// In the place of a tile scheduler: the only sequence has no others to share CTAs with.
struct NoTileScheduler {
  struct FirstLoads;
};

// By Traits::kThreads threads, behind the launch wait; the others of the CTA have ended. CTA `cta` of `ctas` takes
// every `ctas`th work tile. `live`: the call has a sequence. `metadata`: its.
template <typename Traits>
__device__ inline void ComputeOneSequence(const DecodeArgs& args, OneSequenceStorage<Traits>& shared, bool live,
                                          const SequenceMetadata& metadata, int cta, int ctas) {
  using Shape = FixedTileShape<Traits::kBlockKeysLog2, Traits::kRowsLog2>;
  const SequencePlan plan = MakeSequencePlan<Shape>(args, live && metadata.InOrder(args), metadata);
  const int tiles = plan.WorkTiles(args);  // 0 if it is not of the decode path
#pragma unroll 1
  for (int tile = cta; tile < tiles; tile += ctas) {
    if (tile > cta) __syncthreads();  // shared memory is no longer read
    const WorkTile work_tile = WorkTile::Of(args, plan, tile, /*cta=*/0);
    if (plan.end_key == plan.first_key) {
      StoreEmptyRows<Traits>(args, plan, work_tile);
      continue;
    }
    WorkRange& range = shared.range[threadIdx.x / 32];
    range = {plan, 0, tile, work_tile, 0, 0, plan.splits, plan.first_key, plan.end_key};
    using Cta = SplitKvCta<Traits, OneSequenceStorage<Traits>, NoTileScheduler>;
    Cta(args, shared, WholeCta{}, NoTileScheduler{}).ComputeNarrowRange(range);
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ONE_SEQUENCE_CUH_
