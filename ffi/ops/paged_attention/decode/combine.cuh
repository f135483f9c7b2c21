// The combine kernel of the decode path: merges the split accumulators of the work tiles that several CTA groups
// computed.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/decode/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/output_rows.cuh"
#include "ffi/ops/paged_attention/decode/split_accumulators.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineThreads = 32 * kCombineWarps;
inline constexpr int kMaxCtaGroups = kMaxSms * kCtasPerSm;
// One kernel serves the split-KV kernels of all cache formats and tile shapes.
template <typename Cta = WholeCta>
using CombineTileScheduler = TileScheduler<AnyTileShape, Cta>;
inline constexpr int kCombineBatch = MergeChain::kMaxPartials;  // rows that a warp loads at once

template <typename Cta = WholeCta>
struct CombineSharedStorage {
  uint16_t split_tiles[kMaxCtaGroups];
  int warp_split_tiles[kCombineWarps];
  int warp_rows[kCombineWarps];
  // The offsets of the partial rows that a warp merges, in order. The highest bit: the row begins a segment.
  uint32_t partials[kCombineWarps][kMaxSplits];
  OutputRow output[kCombineWarps];  // of a warp; here because registers are short
  typename CombineTileScheduler<Cta>::SharedStorage scheduler[kCombineWarps];
  typename CombineTileScheduler<Cta>::BatchStorage batch;
};

// The programmatic-launch wait of CTAs without work. One CTA waits, so that the kernel before has ended when this one
// has. The others make room.
__device__ inline void ProgrammaticLaunchWait() {
  if (blockIdx.x == 0) WaitForPreviousKernel();
}

// A CTA of the combine kernel. Each of its warps merges row after row. A split tile is a work tile that several CTA
// groups computed, for all KV heads of its KV-head group. Its number is that of the second of those CTA groups.
template <int kHeadDim, typename Cta = WholeCta>
class CombineCta {
 public:
  using Scheduler = CombineTileScheduler<Cta>;

  // ctas: of the kernel, the first ones. cta_groups: where Cta::kGroupsVary.
  __device__ CombineCta(const DecodeArgs& args, CombineSharedStorage<Cta>& shared, unsigned ctas, int cta_groups = 0)
      : args_(args), shared_(shared), ctas_(ctas), cta_groups_(cta_groups) {}

  __device__ void Run() {
    const typename Scheduler::FirstLoads loads(args_);
    Scheduler scheduler(args_, shared_.scheduler[Warp()], shared_.batch, loads, cta_groups_);
    int split_tiles, rows;
    ListSplitTiles(scheduler, &split_tiles, &rows);
    const unsigned tile_heads = static_cast<unsigned>(split_tiles * args_.cta_group_size);
    const unsigned tasks = tile_heads * static_cast<unsigned>(rows);
    // Instruction-cache warm-up: memory is busy with K and V, and instructions come through it too. So what is to run
    // once the kernel before has ended is executed once while it still runs, with nothing read or written.
    bool warm_up = true;
    for (unsigned i = Warp() * ctas_ + blockIdx.x; i < tasks; i += ctas_ * kCombineWarps) {
      const unsigned row = i / tile_heads;
      const unsigned rest = i - row * tile_heads;
      const unsigned tile = rest / static_cast<unsigned>(args_.cta_group_size);
      const int partials = ListPartials(scheduler, SplitTile(static_cast<int>(tile)),
                                        static_cast<int>(rest - tile * args_.cta_group_size), static_cast<int>(row));
      if (partials == 0) continue;
      const Batch first(shared_.partials[Warp()], 0, partials);
#pragma unroll 1
      while (true) {
        CombineRow(first, partials, warm_up);
        if (!warm_up) break;
        WaitForPreviousKernel();
        warm_up = false;
      }
    }
    if (warm_up) ProgrammaticLaunchWait();
  }

 private:
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int CtaGroups() const { return Cta::kGroupsVary ? cta_groups_ : args_.num_cta_groups; }

  // ---- What there is to merge
  // ------------------------------------------------------------------------------------------

  // CTA groups whose intervals' beginnings a warp looks at.
  __device__ int WarpCtaGroups() const { return (CtaGroups() - 1 + kCombineWarps - 1) / kCombineWarps; }

  // Lists the split tiles. Each warp looks at the beginnings of neighbouring CTA groups' intervals, which few slices of
  // the batch hold, and lists what it finds from its first CTA group's place on. *rows: the most rows that a split tile
  // has.
  __device__ void ListSplitTiles(Scheduler& scheduler, int* split_tiles, int* rows) {
    int next = 1 + Warp() * WarpCtaGroups();
    const int end = min(next + WarpCtaGroups(), CtaGroups());
    uint16_t* const list = shared_.split_tiles + Warp() * WarpCtaGroups();
    int found = 0, most_rows = 0;
    while (next < end && scheduler.IntervalBegin(next) < scheduler.Total()) {
      scheduler.Find(scheduler.IntervalBegin(next));
      const int cta_group = next + Lane();
      const uint32_t begin = scheduler.IntervalBegin(cta_group);
      const bool held = cta_group < end && scheduler.Holds(begin);  // the first lanes'
      const int my_rows = held ? SplitTileRows(scheduler, cta_group, begin) : 0;
      const unsigned mine = __ballot_sync(0xffffffffu, my_rows > 0);
      if (my_rows > 0) list[found + __popc(mine & ((1u << Lane()) - 1))] = static_cast<uint16_t>(cta_group);
      found += __popc(mine);
      most_rows = max(most_rows, my_rows);
      next += __popc(__ballot_sync(0xffffffffu, held));
    }
    most_rows = __reduce_max_sync(0xffffffffu, most_rows);
    if (Lane() == 0) {
      shared_.warp_split_tiles[Warp()] = found;
      shared_.warp_rows[Warp()] = most_rows;
    }
    __syncthreads();
    *split_tiles = 0;
    *rows = 0;
#pragma unroll
    for (int warp = 0; warp < kCombineWarps; ++warp) {
      *split_tiles += shared_.warp_split_tiles[warp];
      *rows = max(*rows, shared_.warp_rows[warp]);
    }
  }
  // Number `index` of them.
  __device__ int SplitTile(int index) const {
    int warp = 0;
    for (; index >= shared_.warp_split_tiles[warp]; ++warp) index -= shared_.warp_split_tiles[warp];
    return shared_.split_tiles[warp * WarpCtaGroups() + index];
  }

  // The rows of split tile `cta_group`, whose interval begins in the slice; 0 if it is not the second of a work tile.
  __device__ int SplitTileRows(const Scheduler& scheduler, int cta_group, uint32_t begin) const {
    const SequencePlan& plan = scheduler.Search(begin);
    const uint32_t tile_begin = begin - (begin - plan.begin) % plan.length;
    const bool is_second = tile_begin != begin && tile_begin >= scheduler.IntervalBegin(cta_group - 1);
    if (!is_second || plan.FirstSplitFrom<AnyTileShape>(args_, begin - tile_begin) == plan.splits) return 0;
    return min(plan.q_len * args_.group_size, 1 << args_.tile_rows_log2);
  }

  // By a warp: lists the partials of a split tile's row for KV head `head` of its KV-head group. Returns how many there
  // are; 0 if there is no such row.
  __device__ int ListPartials(Scheduler& scheduler, int second_cta_group, int head, int row) {
    const uint32_t begin = scheduler.IntervalBegin(second_cta_group);
    const int in_slice = scheduler.Find(begin);
    const SequencePlan& plan = scheduler.At(in_slice);
    const WorkTile work_tile = WorkTile::Of(args_, plan, static_cast<int>((begin - plan.begin) / plan.length), head);
    const unsigned tile_index = SequenceTileIndex(args_, scheduler.SequenceOf(in_slice), work_tile);
    const int sequence_row = (work_tile.row_tile << args_.tile_rows_log2) + row;
    if (sequence_row >= plan.q_len * args_.group_size) return 0;
    const auto owner_of = [&](int split) {
      return scheduler.OwnerOf(work_tile.begin + plan.SplitOffset(args_, split));
    };
    // The splits whose segments the first CTA group has merged.
    const int first_owner_splits = plan.FirstSplitFrom<AnyTileShape>(args_, begin - work_tile.begin);
    const int merged = first_owner_splits == 0 ? 0 : plan.SegmentOf(first_owner_splits) * plan.segment_splits;
    int partials = 0;
    __syncwarp();  // the last row's list is no longer read
    shared_.output[Warp()] = OutputRow::Of(args_, RowIndex::Of(args_, plan.q_begin, work_tile.kv_head, sequence_row));
#pragma unroll 1
    for (int base = 0; base < plan.splits; base += 32) {
      const int split = base + Lane();
      const int segment = plan.SegmentOf(split);
      const int first = segment * plan.segment_splits;
      const unsigned owner = owner_of(args_.whole_segments ? first : split);
      const bool has_segment_begin = owner == owner_of(first);
      // Each split has an accumulator, unless its CTA group has merged it with the first one of its segment.
      const bool begins = split < plan.splits && (split < merged ? split == 0 : split == first || !has_segment_begin);
      const unsigned cta = owner * static_cast<unsigned>(args_.cta_group_size) + static_cast<unsigned>(head);
      const bool has_tile_begin = static_cast<int>(owner) == second_cta_group - 1;
      const unsigned index =
          args_.whole_segments ? SplitAccumulators::IndexOfSegment(cta, has_tile_begin, segment)
          : args_.by_split     ? SplitAccumulators::IndexOfSplit(tile_index, split)
                               : SplitAccumulators::IndexOf(cta, cta + args_.cta_group_size, split == 0, has_tile_begin,
                                                            has_segment_begin, segment, split - first);
      const unsigned found = __ballot_sync(0xffffffffu, begins);
      if (begins) {
        shared_.partials[Warp()][partials + __popc(found & ((1u << Lane()) - 1))] =
            SplitAccumulators::RowOffset(args_, index, row) | (split == first ? 1u << 31 : 0);
      }
      partials += __popc(found);
    }
    __syncwarp();
    return partials;
  }

  // ---- Merging
  // ---------------------------------------------------------------------------------------------------------

  // Partials that are loaded at once.
  struct Batch {
    uint32_t offset;                 // of this lane's partial row: lane i has the i-th
    uint32_t column[kCombineBatch];  // of this lane's first columns of each
    unsigned segment_begins;         // a bit for each that begins a segment
    bool one_level;                  // these are all, and each is a whole segment

    // Those of the warp's list from `begin` on. Past its end the last one again.
    __device__ Batch(const uint32_t* list, int begin, int partials) {
      const uint32_t mine = list[min(begin + Lane() % kCombineBatch, partials - 1)];
      offset = mine & ~(1u << 31);
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        column[i] = __shfl_sync(0xffffffffu, offset, i) + static_cast<unsigned>(Lane());
      }
      segment_begins = __ballot_sync(0xffffffffu, mine >> 31 != 0);
      one_level = segment_begins == 0xffffffffu && partials <= kCombineBatch;
    }
  };

  // By a warp: merges a row's partials, of which `batch` are the first, and writes the row. Nothing is read or written
  // in a warm-up.
  __device__ void CombineRow(Batch batch, int partials, bool warm_up) const {
    const int head_dim = static_cast<int>(args_.params.head_dim);
    const uint32_t* const list = shared_.partials[Warp()];
#pragma unroll 1
    for (int base = 0; base < kHeadDim; base += 128) {
      const int column = base + Lane() * 4;
      const bool read = column < head_dim && !warm_up;
      if (base > 0) batch = Batch(list, 0, partials);
      SegmentedMerge merge;
#pragma unroll 1
      for (int left = partials;;) {
        const AttentionState state = LoadState(SplitAccumulators::State(args_, batch.offset), !warm_up);
        float4 o[kCombineBatch];
#pragma unroll
        for (int i = 0; i < kCombineBatch; ++i) {
          o[i] = LoadColumns(SplitAccumulators::O(args_, batch.column[i] + static_cast<unsigned>(base / 4)), read);
        }
        if (batch.one_level) {
          merge.row = MergeChain(state).Merge(o, partials);
          break;
        }
#pragma unroll
        for (int i = 0; i < kCombineBatch; ++i) {
          const PartialState partial = {
              {__shfl_sync(0xffffffffu, state.max, i), __shfl_sync(0xffffffffu, state.sum, i)}, o[i]};
          if (i < left) merge.Add(partial, (batch.segment_begins >> i & 1) != 0);
        }
        left -= kCombineBatch;
        if (left <= 0 || warm_up) break;
        batch = Batch(list, partials - left, partials);
      }
      merge.CloseSegment();
      if (column < head_dim) StoreColumns(args_, shared_.output[Warp()], column, merge.row, !warm_up);
    }
  }

  const DecodeArgs& args_;
  CombineSharedStorage<Cta>& shared_;
  const unsigned ctas_;
  const int cta_groups_;
};

// Writes the rows that no sequence owns, where the decode path has to.
__device__ inline void FillPaddingRowsIfAlone(const DecodeArgs& args) {
  if (!args.fill_padding_rows || blockIdx.x != 0) return;
  FillOtherRows16Bit(args);
}

// One or two CTAs for each SM. They become resident beside those of the split-KV kernel, and have found out what to
// merge when it ends.
// kHeadDim: the largest head_dim.
template <int kHeadDim>
__global__ void __maxnreg__(kCombineRegisters) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(16) char dynamic_shared[];
  AllowDependentLaunch();  // of the prefill path
  FillPaddingRowsIfAlone(args);
  if (args.tree_mask == nullptr && !MayHaveDecodeRows(args)) return ProgrammaticLaunchWait();
  CombineCta<kHeadDim>(args, *reinterpret_cast<CombineSharedStorage<>*>(dynamic_shared), gridDim.x).Run();
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_CUH_
