// The part of a work tile that a CTA of the split-KV kernel computes, and how it merges that part's splits.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WORK_RANGE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WORK_RANGE_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/ops/paged_attention/decode/epilogue.cuh"
#include "ffi/ops/paged_attention/decode/mainloop.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"

namespace xla_gpu::decode {

// Splits [split_begin, split_end) of a work tile, which are keys [key_begin, key_end).
struct WorkRange {
  SequencePlan plan;
  int index;  // of the sequence in the scheduler's slice
  int tile;   // of the sequence's work tiles
  WorkTile work_tile;
  int sequence;
  int split_begin;
  int split_end;
  int key_begin;
  int key_end;
};

template <typename Traits>
using SplitKvTileScheduler =
    TileScheduler<std::conditional_t<Traits::kWide, WideTileShape<Traits::kBlockKeysLog2, Traits::kRowsLog2>,
                                     FixedTileShape<Traits::kBlockKeysLog2, Traits::kRowsLog2>>,
                  typename Traits::Cta>;

template <typename Traits>
struct SplitKvSharedStorage;

// Merges a split with those before it: into `segment` those of its segment, into `tile` the segments of the work tile.
// What this CTA will not merge any further goes to a split accumulator, or to the output if it is the whole work tile.
// kHalves, half: `work_tile` is one of so many parts of the range's work tile, each with Traits::kRows rows.
template <typename Traits, int kHalves = 1>
__device__ inline void AccumulateSplit(const DecodeArgs& args, const typename Traits::Cta& threads,
                                       const WorkRange& range, const WorkTile& work_tile, int half,
                                       const Thread& thread, int split, const Accumulator<Traits>& accumulator,
                                       Accumulator<Traits>& segment, Accumulator<Traits>& tile) {
  const SequencePlan& plan = range.plan;
  const int index = plan.SegmentOf(split);
  const int first = index * plan.segment_splits;
  constexpr bool kWhole = Traits::kWholeTiles;
  const bool range_ends = !kWhole && split == range.split_end - 1;
  const bool has_segment_begin = kWhole || range.split_begin <= first;
  const bool has_tile_begin = kWhole || range.split_begin == 0;
  const bool store_each = !kWhole && kHalves == 1 && args.store_every_split && plan.splits > 1;
  const int rows = min(plan.q_len * args.group_size - work_tile.row_tile * Traits::kRows, Traits::kRows);
  Accumulator<Traits> partial = accumulator;  // what is stored, of the splits from `from` on
  int from = split;
  bool and_tile = false;  // `tile` is stored too
  if (has_segment_begin && !store_each) {
    if (split == first) {
      segment = accumulator;
    } else {
      segment.Merge(accumulator);
    }
    partial = segment;
    from = first;
    const int last = min(first + plan.segment_splits, int{plan.splits}) - 1;
    if (split != last) {
      if (!range_ends) return;
      and_tile = has_tile_begin && first > 0;
    } else if (has_tile_begin) {
      if (first == 0) {
        tile = segment;
      } else {
        tile.Merge(segment);
      }
      if (split == plan.splits - 1) return StoreOutput<Traits>(args, plan, work_tile, thread, rows, tile);
      if (!range_ends) return;
      partial = tile;
      from = 0;
    }
  }
#pragma unroll 1
  while (!kWhole) {
    unsigned accumulator_index;
    const unsigned group_size = threads.GroupSize(args);
    const unsigned cta = threads.Group() * group_size + threads.Number();
    if constexpr (kHalves > 1) {
      accumulator_index = args.whole_segments ? SplitAccumulators::IndexOfSegment(cta, has_tile_begin, index)
                                              : SplitAccumulators::IndexOfSplit(
                                                    SequenceTileIndex(args, range.sequence, range.work_tile), from);
    } else {
      accumulator_index = store_each
                              ? SplitAccumulators::IndexOfSplit(WorkTileIndex(args, plan.q_begin, work_tile), split)
                              : SplitAccumulators::IndexOf(cta, cta + group_size, from == 0, has_tile_begin,
                                                           has_segment_begin, index, split - first);
    }
    StorePartial<Traits>(args, accumulator_index, half * Traits::kRows, thread, rows, partial);
    if (!and_tile) return;
    and_tile = false;
    partial = tile;
    from = 0;
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WORK_RANGE_CUH_
