// The sequences of the decode path by a kernel of the prefill path, a whole work tile at a time: of calls that probably
// have none. Their bits are those of the split-KV kernel.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WHOLE_TILES_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WHOLE_TILES_CUH_

#include "ffi/ops/paged_attention/decode/epilogue.cuh"
#include "ffi/ops/paged_attention/decode/sequence_plan.cuh"
#include "ffi/ops/paged_attention/decode/split_kv_kernel.cuh"
#include "ffi/ops/paged_attention/decode/work_range.cuh"

namespace xla_gpu::decode {

template <typename Traits>
struct WholeTilesStorage {
  alignas(1024) char k[Traits::kStages][Traits::kWarps][Traits::kTileBytes];
  alignas(1024) char v[Traits::kStages][Traits::kWarps][Traits::kTileBytes];
  SharedScores<Traits> scores[2];   // of this iteration and the one before, in turns
  WorkRange range[Traits::kWarps];  // registers are short
};

// In the place of a tile scheduler: whole work tiles need none.
struct NoTileScheduler {
  struct FirstLoads;
};

template <typename Traits>
__device__ __forceinline__ void ComputeWholeTile(const DecodeArgs& args, WholeTilesStorage<Traits>& shared,
                                                 const WorkRange& range) {
  const typename Traits::Cta cta(args, /*cta=*/0);
  SplitKvCta<Traits, WholeTilesStorage<Traits>, NoTileScheduler>(args, shared, cta, NoTileScheduler{})
      .ComputeNarrowRange(range);
}

// Of a call for one sequence. By a warpgroup, behind the launch wait. CTA `cta` of `ctas` takes every `ctas`th work
// tile. `live`: the call has a sequence. `metadata`: its.
template <typename Traits>
__device__ inline void ComputeOneSequence(const DecodeArgs& args, WholeTilesStorage<Traits>& shared, bool live,
                                          const SequenceMetadata& metadata, int cta, int ctas) {
  using Shape = FixedTileShape<Traits::kBlockKeysLog2, Traits::kRowsLog2>;
  using Cta = typename Traits::Cta;
  const SequencePlan plan = MakeSequencePlan<Shape>(args, live && metadata.InOrder(args), metadata);
  const int tiles = plan.WorkTiles(args);  // 0 if it is not of the decode path
#pragma unroll 1
  for (int tile = cta; tile < tiles; tile += ctas) {
    if (tile > cta) Cta::Sync();  // shared memory is no longer read
    const WorkTile work_tile = WorkTile::Of(args, plan, tile, /*cta=*/0);
    if (plan.end_key == plan.first_key) {
      StoreEmptyRows<Traits>(args, plan, work_tile);
      continue;
    }
    WorkRange& range = shared.range[Cta::Warp()];
    range = {plan, 0, tile, work_tile, 0, 0, plan.splits, plan.first_key, plan.end_key};
    ComputeWholeTile<Traits>(args, shared, range);
  }
}

// The same of any number of sequences. Each warp plans by itself, a sequence to a lane.
template <typename Traits>
__device__ inline void ComputeWholeTiles(const DecodeArgs& args, WholeTilesStorage<Traits>& shared, unsigned cta,
                                         unsigned ctas) {
  using Shape = FixedTileShape<Traits::kBlockKeysLog2, Traits::kRowsLog2>;
  using Cta = typename Traits::Cta;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int live = max(LiveSequences(args.params), 0);
  bool ok = true;
  for (int sequence = lane; sequence < live; sequence += 32) {
    ok = ok && SequenceMetadata::Load(args, sequence).InOrder(args);
  }
  const bool in_order = __all_sync(~0u, ok);
  WorkRange& range = shared.range[Cta::Warp()];
  unsigned next = cta;  // work tile, counted from the slice's first
  bool is_first = true;
#pragma unroll 1
  for (int slice = 0; slice < live; slice += 32) {
    const int sequence = slice + lane;
    bool owned = sequence < live;
    if (!in_order) owned = owned && LoadSequence(args.params, sequence, false).owned;
    const SequencePlan plan = MakeSequencePlan<Shape>(args, owned, SequenceMetadata::Load(args, sequence));
    const auto tiles = static_cast<unsigned>(plan.WorkTiles(args));  // 0 if it is not of the decode path
    unsigned end = tiles;
    for (int i = 1; i < 32; i *= 2) {
      const unsigned before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end += before;
    }
    const unsigned total = __shfl_sync(~0u, end, 31);
#pragma unroll 1
    for (; next < total; next += ctas) {
      if (!is_first) Cta::Sync();  // shared memory is no longer read
      is_first = false;
      if (lane == __popc(__ballot_sync(~0u, end <= next))) {
        const auto tile = static_cast<int>(next - (end - tiles));
        const WorkTile work_tile = WorkTile::Of(args, plan, tile, /*cta=*/0);
        range = {plan, 0, tile, work_tile, sequence, 0, plan.splits, plan.first_key, plan.end_key};
      }
      __syncwarp();
      if (range.plan.end_key == range.plan.first_key) {
        StoreEmptyRows<Traits>(args, range.plan, range.work_tile);
      } else {
        ComputeWholeTile<Traits>(args, shared, range);
      }
    }
    next -= total;
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WHOLE_TILES_CUH_
