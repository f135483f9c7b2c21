// The combine kernel of the decode path for few work tiles: every split has stored its own accumulator, unless it is
// the only one of its work tile.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_SMALL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_SMALL_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/combine.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineSmallThreads = 32 * kMaxSegments;  // a warp for each segment
static_assert(kMaxSegments == MergeChain::kMaxPartials && kSegmentSplits == MergeChain::kMaxPartials);

template <int kHeadDim>
struct CombineSmallSharedStorage {
  // Of each segment, merged:
  float4 o[kMaxSegments][kHeadDim / 4];
  AttentionState state[kMaxSegments];
  SequencePlan plan[kMaxSegments];  // of the row's sequence, for each warp
};

// A CTA that merges one row.
template <int kHeadDim>
class CombineSmallCta {
 public:
  using SharedStorage = CombineSmallSharedStorage<kHeadDim>;

  __device__ CombineSmallCta(const DecodeArgs& args, SharedStorage& shared) : args_(args), shared_(shared) {}

  // CTA i merges row i % accum_rows of the work tile whose WorkTileIndex is i / accum_rows.
  __device__ void Run() {
    const unsigned rows = static_cast<unsigned>(args_.accum_rows);
    const unsigned work_tile = blockIdx.x / rows;
    const int row = static_cast<int>(blockIdx.x - work_tile * rows);
    const unsigned row_tile = work_tile / static_cast<unsigned>(args_.params.num_kv_heads);
    const int kv_head = static_cast<int>(work_tile - row_tile * static_cast<unsigned>(args_.params.num_kv_heads));
    // All warps find the same.
    if (!FindSequence(static_cast<int>(row_tile))) return ProgrammaticLaunchWait();
    const SequencePlan& plan = shared_.plan[Warp()];
    const int sequence_row =
        ((static_cast<int>(row_tile) - plan.q_begin * args_.row_tiles_per_token) << args_.tile_rows_log2) + row;
    if (sequence_row >= plan.q_len * args_.group_size) return ProgrammaticLaunchWait();
    output_ = OutputRow::Of(args_, RowIndex::Of(args_, plan.q_begin, kv_head, sequence_row));
    segments_ = plan.Segments();
    const int first = Warp() * plan.segment_splits;
    splits_ = min(plan.splits - first, int{plan.segment_splits});
    offset_ = SplitAccumulators::RowOffset(args_, SplitAccumulators::IndexOfSplit(work_tile, first), row);
    // The first turn is an instruction-cache warm-up: see CombineCta::Run.
#pragma unroll 1
    for (bool warm_up = true;; warm_up = false) {
      CombineRow(warm_up);
      if (!warm_up) break;
      WaitForPreviousKernel();
    }
  }

 private:
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }

  // By each warp: finds the sequence of row tile `tile` among those of all tokens. False if it has no more than one
  // split.
  __device__ bool FindSequence(int tile) {
    const CombineTileScheduler<>::FirstLoads loads(args_);
    const int live = loads.num_seqs <= args_.max_seqs ? loads.num_seqs : 0;
    bool ok = true;
    for (int s = Lane(); s < live; s += 32) {
      ok = ok && (s < 32 ? loads.metadata : SequenceMetadata::Load(args_, s)).InOrder(args_);
    }
    const bool in_order = __all_sync(0xffffffffu, ok);
    bool found = false;
    for (int first = 0; first < live; first += 32) {
      const int s = first + Lane();
      const SequenceMetadata metadata = first == 0 ? loads.metadata : SequenceMetadata::Load(args_, s);
      bool owned = s < live;
      if (!in_order) owned = owned && LoadSequence(args_.params, s, false).owned;
      const SequencePlan plan = MakeSequencePlan<AnyTileShape>(args_, owned, metadata);
      const int row_tile = tile - plan.q_begin * args_.row_tiles_per_token;
      const bool mine = plan.splits > 1 && 0 <= row_tile && row_tile < plan.row_tiles;
      if (mine) shared_.plan[Warp()] = plan;
      found = found || __any_sync(0xffffffffu, mine);
    }
    __syncwarp();
    return found;
  }

  // Merges the row's partials and writes it. Nothing is read or written in a warm-up.
  __device__ void CombineRow(bool warm_up) {
    const int head_dim = static_cast<int>(args_.params.head_dim);
    // A warp for each segment. Lane i has the state of the i-th split.
    if (Warp() < segments_) {
      const unsigned stride = static_cast<unsigned>(args_.accum_rows) * args_.accum_row_stride;
      const uint32_t mine = offset_ + static_cast<unsigned>(Lane()) * stride;
      const AttentionState state = LoadState(SplitAccumulators::State(args_, mine), Lane() < splits_ && !warm_up);
#pragma unroll 1
      for (int base = 0; base < kHeadDim; base += 128) {
        const int column = base + Lane() * 4;
        float4 o[kSegmentSplits];
#pragma unroll
        for (int i = 0; i < kSegmentSplits; ++i) {
          const uint32_t offset = offset_ + static_cast<unsigned>(i) * stride + static_cast<unsigned>(column / 4);
          o[i] = LoadColumns(SplitAccumulators::O(args_, offset), i < splits_ && column < head_dim && !warm_up);
        }
        const PartialState segment = MergeChain(state).Merge(o, splits_);
        if (column < kHeadDim) shared_.o[Warp()][column / 4] = segment.o;
        if (column == 0) shared_.state[Warp()] = segment.state;
      }
    }
    __syncthreads();
    // A warp for each 128 columns. Lane i has the state of the i-th segment.
    const int column = static_cast<int>(threadIdx.x) * 4;
    if (Warp() * 128 < kHeadDim) {
      AttentionState state = {-INFINITY, 0.0f};
      if (Lane() < segments_) state = shared_.state[Lane()];
      float4 o[kMaxSegments];
#pragma unroll
      for (int i = 0; i < kMaxSegments; ++i) o[i] = shared_.o[i][min(column, kHeadDim - 4) / 4];
      const PartialState result = MergeChain(state).Merge(o, segments_);
      if (column < head_dim) StoreColumns(args_, output_, column, result, !warm_up);
    }
    __syncthreads();
  }

  const DecodeArgs& args_;
  SharedStorage& shared_;
  OutputRow output_;
  int segments_;     // of the work tile
  int splits_;       // of this warp's segment
  uint32_t offset_;  // of the row in the segment's first split accumulator
};

template <int kHeadDim>
__global__ void __maxnreg__(kCombineRegisters) DecodeCombineSmallKernel(const __grid_constant__ DecodeArgs args) {
  __shared__ CombineSmallSharedStorage<kHeadDim> shared;
  AllowDependentLaunch();  // of the prefill path
  FillPaddingRowsIfAlone(args);
  CombineSmallCta<kHeadDim>(args, shared).Run();
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_SMALL_CUH_
