// The tile scheduler of the decode path: which CTA computes what. Every warp computes it for itself from the metadata.
//
// A work tile is a sequence, a KV-head group and a tile of query rows. Its keys are cut into at most kMaxSplits KV
// splits, whose length is a function of the number of keys alone. The splits of all work tiles, one after the other,
// form a linearised KV-block space, as in stream-K: each split is as long as its KV blocks, and a fixed overhead
// follows each work tile for the cost of starting the next. The space is divided into equal intervals. A CTA group (one
// CTA for each KV head of a KV-head group, so that all heads of a page are read at about the same time) computes the
// splits that begin in its interval. So the load is balanced for any lengths, while a split's bits, and the order in
// which splits merge (up to eight to a segment, then the segments, from left to right), depend on the sequence alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::decode {

// About 1 / x, for x > 0.
__device__ inline float Reciprocal(unsigned x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(x)));
  return reciprocal;
}
// ceil(x / divisor), where that is below 128.
__device__ inline int CeilDivSmall(unsigned x, unsigned divisor) {
  // Too small by less than 2.
  int quotient = static_cast<int>(static_cast<float>(x) * Reciprocal(divisor));
  if (static_cast<unsigned>(quotient) * divisor < x) ++quotient;
  if (static_cast<unsigned>(quotient) * divisor < x) ++quotient;
  return quotient;
}

// How a sequence is cut into work tiles and splits. One without splits does not belong to the decode path.
struct SequencePlan {
  uint32_t begin;   // of its first work tile, in the KV-block space
  uint32_t length;  // of a work tile in the KV-block space, with the fixed overhead behind it
  int32_t q_begin;
  int32_t first_key;  // earlier keys are hidden from all of the sequence's queries
  int32_t end_key;
  int32_t split_blocks;  // KV blocks of a split
  int32_t row_tiles;     // of a KV head
  uint8_t q_len;
  uint8_t splits;          // of a work tile
  uint8_t segment_splits;  // of a segment; the last segment may have fewer
  bool valid;              // context_len is; if not, there are no keys

  __device__ int WorkTiles(const DecodeArgs& args) const { return row_tiles * args.num_kv_head_groups; }
  __device__ uint32_t End(const DecodeArgs& args) const {
    return begin + length * static_cast<unsigned>(WorkTiles(args));
  }
  // Where a split begins in its work tile, in the KV-block space.
  __device__ uint32_t SplitOffset(const DecodeArgs& args, int split) const {
    return static_cast<unsigned>(split * split_blocks) >> args.block_shift;
  }
  __device__ int SegmentOf(int split) const {  // exact for numbers as small as these
    return static_cast<int>((static_cast<float>(split) + 0.5f) * Reciprocal(segment_splits));
  }
  __device__ int Segments() const { return SegmentOf(splits - 1) + 1; }
  // The first split that begins at `offset` in its work tile or later; `splits` if none does. Where CTA groups take
  // whole segments or work tiles, the first one that begins such.
  template <typename TileShape>
  __device__ int FirstSplitFrom(const DecodeArgs& args, uint32_t offset) const {
    if (offset >= length || (args.whole_tiles && offset > 0)) return splits;
    const int split = CeilDivSmall(offset << args.block_shift, static_cast<unsigned>(split_blocks));
    if (!TileShape::WholeSegments(args)) return min(split, int{splits});
    return min(SegmentOf(split + segment_splits - 1) * segment_splits, int{splits});
  }
};
static_assert(sizeof(SequencePlan) == 32 && kMaxSplits < 127 && kMaxDecodeRows < 256);

// What the metadata says of a sequence.
struct SequenceMetadata {
  int q_begin;
  int q_end;
  int context_len;

  __device__ static SequenceMetadata Load(const DecodeArgs& args, int sequence) {
    if (sequence >= args.max_seqs) return {0, 0, 0};
    const int32_t* const starts = args.params.query_start_loc + sequence;
    return {__ldg(starts), __ldg(starts + 1), __ldg(args.params.context_lens + sequence)};
  }
  __device__ bool InOrder(const DecodeArgs& args) const {
    return 0 <= q_begin && q_begin <= q_end && q_end <= args.num_tokens;
  }
};

// Keys of a KV block and query rows of a work tile, which the kernel is compiled for.
template <int kBlockKeysLog2, int kRowsLog2>
struct FixedTileShape {
  __device__ static constexpr int BlockKeysLog2(const DecodeArgs&) { return kBlockKeysLog2; }
  __device__ static constexpr int RowsLog2(const DecodeArgs&) { return kRowsLog2; }
  __device__ static constexpr bool WholeSegments(const DecodeArgs&) { return false; }
};
template <int kBlockKeysLog2, int kRowsLog2>
struct WideTileShape : FixedTileShape<kBlockKeysLog2, kRowsLog2> {
  __device__ static bool WholeSegments(const DecodeArgs& args) { return args.whole_segments; }
};
// The same from the arguments, for kernels that serve every shape.
struct AnyTileShape {
  __device__ static int BlockKeysLog2(const DecodeArgs& args) { return args.block_keys_log2; }
  __device__ static int RowsLog2(const DecodeArgs& args) { return args.tile_rows_log2; }
  __device__ static bool WholeSegments(const DecodeArgs& args) { return args.whole_segments; }
};

// The plan of a sequence, with `begin` 0 and no fixed overhead. Without splits unless the sequence owns its rows and
// has at most max_tokens of them.
template <typename TileShape>
__device__ inline SequencePlan MakeSequencePlan(const DecodeArgs& args, bool owned, const SequenceMetadata& metadata) {
  SequencePlan plan = {};
  const unsigned q_len = static_cast<unsigned>(metadata.q_end) - static_cast<unsigned>(metadata.q_begin);
  if (!owned || q_len - 1 >= static_cast<unsigned>(args.max_tokens)) return plan;
  plan.valid = static_cast<unsigned>(metadata.context_len) <= args.max_context_len;
  plan.q_begin = metadata.q_begin;
  plan.q_len = static_cast<uint8_t>(q_len);
  plan.end_key = plan.valid ? metadata.context_len : 0;
  if (args.window > 0) {
    const int64_t hidden = int64_t{plan.end_key} - q_len - args.window + 1;
    plan.first_key = hidden > 0 ? static_cast<int>(hidden) : 0;
  }
  // A sequence without keys has one empty split: some CTA has to write its rows.
  const unsigned keys = static_cast<unsigned>(plan.end_key - plan.first_key);
  const unsigned block_keys = 1u << TileShape::BlockKeysLog2(args);
  const unsigned blocks = max((keys + block_keys - 1) >> TileShape::BlockKeysLog2(args), 1u);
  const unsigned split_blocks =
      max((blocks + kMaxSplits - 1) / kMaxSplits, blocks > 4095u >> TileShape::BlockKeysLog2(args) ? 2u : 1u);
  const int splits = CeilDivSmall(blocks, split_blocks);
  plan.split_blocks = static_cast<int>(split_blocks);
  plan.splits = static_cast<uint8_t>(splits);
  plan.segment_splits = static_cast<uint8_t>((splits + kMaxSegments - 1) / kMaxSegments);
  const unsigned tile_rows = 1u << TileShape::RowsLog2(args);
  plan.row_tiles = static_cast<int>((q_len * args.group_size + tile_rows - 1) >> TileShape::RowsLog2(args));
  plan.length = ((static_cast<unsigned>(splits) * split_blocks - 1) >> args.block_shift) + 1;
  return plan;
}

// A CTA's part of a work tile: one KV head.
struct WorkTile {
  int kv_head;
  int row_tile;
  uint32_t begin;  // in the KV-block space

  // Number `tile` of a sequence's work tiles, for CTA `cta` of the CTA group.
  __device__ static WorkTile Of(const DecodeArgs& args, const SequencePlan& plan, int tile, int cta) {
    // Row tiles vary fastest.
    const int kv_head_group = plan.row_tiles == 1 ? tile : tile / plan.row_tiles;
    return {kv_head_group * args.cta_group_size + cta, tile - kv_head_group * plan.row_tiles,
            plan.begin + static_cast<unsigned>(tile) * plan.length};
  }
};

// False if no sequence can belong to the decode path. Looks only where that is likely. Called by all threads of a CTA.
__device__ inline bool MayHaveDecodeRows(const DecodeArgs& args) {
  const PagedAttentionParams& params = args.params;
  if (!args.behind_prefill) return true;
  bool any = false;
  for (int64_t s = threadIdx.x; s < params.max_seqs; s += blockDim.x) {
    const int64_t rows = int64_t{__ldg(params.query_start_loc + s + 1)} - __ldg(params.query_start_loc + s);
    any = any || (1 <= rows && rows <= args.max_tokens);
  }
  return __syncthreads_or(any);
}

// A warp builds it, and calls its functions that are not const, together. It holds the plans of 32 sequences at a time,
// a slice of the batch, and goes through all slices once for the length of the KV-block space.
template <typename TileShape>
class TileScheduler {
 public:
  using Shape = TileShape;
  struct SharedStorage {  // of a warp
    SequencePlan plans[32];
  };

  // The loads that depend on no other: the first slice, some of whose sequences may not be live.
  struct FirstLoads {
    SequenceMetadata metadata;
    int num_seqs;

    __device__ explicit FirstLoads(const DecodeArgs& args)
        : metadata(SequenceMetadata::Load(args, Lane())), num_seqs(__ldg(args.params.num_seqs)) {}
  };

  __device__ TileScheduler(const DecodeArgs& args, SharedStorage& shared, const FirstLoads& loads)
      : args_(args), shared_(shared) {
    live_ = loads.num_seqs <= args.max_seqs ? max(loads.num_seqs, 0) : 0;
    in_order_ = __all_sync(0xffffffffu, Lane() >= live_ || loads.metadata.InOrder(args));
    if (live_ <= 32 && in_order_) {
      const SequencePlan plan = MakeSequencePlan<TileShape>(args, Lane() < live_, loads.metadata);
      const TileLengths lengths(plan);
      overhead_ = lengths.FixedOverhead();
      slice_ = 0;
      begin_ = 0;
      end_ = StoreSlice(args, shared, plan, live_, overhead_, 0);
      SetInterval(end_, lengths);
    } else {
      const BatchExtent batch = MeasureBatch(args, live_);
      in_order_ = batch.in_order;
      overhead_ = batch.lengths.FixedOverhead();
      SetInterval(batch.length + overhead_ * batch.work_tiles, batch.lengths);
      LoadSlice(0, 0);
    }
  }

  // The length of the KV-block space, and of a CTA group's interval of it.
  __device__ uint32_t Total() const { return total_; }
  __device__ uint32_t Interval() const { return interval_; }
  __device__ uint32_t IntervalBegin(int cta_group) const { return static_cast<unsigned>(cta_group) * interval_; }

  __device__ const SequencePlan& At(int index) const { return shared_.plans[index]; }
  // The index in the slice of the sequence that holds coordinate `position` < Total(). Changes the slice if need be.
  __device__ int Find(uint32_t position) {
    if (position < begin_) FirstSlice();
    while (position >= end_) NextSlice();
    const SequencePlan& mine = shared_.plans[Lane()];
    const unsigned before = __ballot_sync(0xffffffffu, mine.splits > 0 && mine.begin <= position);
    return 31 - __clz(static_cast<int>(before));
  }
  // As Find, by each lane for itself, of a coordinate in the slice.
  __device__ const SequencePlan& Search(uint32_t position) const {
    int low = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (shared_.plans[low + step].begin <= position) low += step;
    }
    return shared_.plans[low];
  }
  // The next sequence with splits, which must exist. Changes the slice if need be.
  __device__ int Next(int index) {
    unsigned behind = 0xfffffffeu << index;
    while (true) {
      const unsigned found = __ballot_sync(0xffffffffu, shared_.plans[Lane()].splits > 0) & behind;
      if (found != 0) return __ffs(static_cast<int>(found)) - 1;
      NextSlice();
      behind = 0xffffffffu;
    }
  }

  // Whether the slice holds a coordinate.
  __device__ bool Holds(uint32_t position) const { return begin_ <= position && position < end_; }
  __device__ bool IsLastSlice() const { return slice_ + 32 >= live_; }
  __device__ void FirstSlice() {
    if (slice_ > 0) LoadSlice(0, 0);
  }
  __device__ void NextSlice() { LoadSlice(slice_ + 32, end_); }

  __device__ int SequenceOf(int index) const { return slice_ + index; }

 private:
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }

  // Lengths of work tiles in the KV-block space, without the fixed overhead. The same in all lanes.
  struct TileLengths {
    uint32_t longest;
    uint32_t shortest;

    // plan: a lane's.
    __device__ explicit TileLengths(const SequencePlan& plan)
        : longest(__reduce_max_sync(0xffffffffu, plan.length)),
          shortest(__reduce_min_sync(0xffffffffu, plan.splits > 0 ? plan.length : ~0u)) {}

    __device__ bool Uniform() const { return longest == shortest; }
    // Work tiles of one length cost the same, overhead included, and need none.
    __device__ uint32_t FixedOverhead() const { return Uniform() ? 0 : kFixedOverheadBlocks; }
  };

  // The work tiles of all live sequences.
  struct BatchExtent {
    uint32_t work_tiles;
    uint32_t length;  // in the KV-block space, without the fixed overhead
    TileLengths lengths;
    bool in_order;
  };

  // NOTE: these two are not inlined, since only batches of more than 32 sequences and wrong metadata need them. They
  // are static: a member function that is not inlined would force the whole object into local memory.
  __device__ __noinline__ static BatchExtent MeasureBatch(const DecodeArgs& args, int live) {
    bool ok = true;
    for (int s = Lane(); s < live; s += 32) ok = ok && SequenceMetadata::Load(args, s).InOrder(args);
    const bool in_order = __all_sync(0xffffffffu, ok);
    BatchExtent batch = {0, 0, TileLengths({}), in_order};
    for (int first = 0; first < live; first += 32) {
      const SequencePlan plan = PlanOf(args, first + Lane(), live, in_order);
      const unsigned work_tiles = static_cast<unsigned>(plan.WorkTiles(args));
      batch.work_tiles += __reduce_add_sync(0xffffffffu, work_tiles);
      batch.length += __reduce_add_sync(0xffffffffu, work_tiles * plan.length);
      const TileLengths lengths(plan);
      batch.lengths.longest = max(batch.lengths.longest, lengths.longest);
      batch.lengths.shortest = min(batch.lengths.shortest, lengths.shortest);
    }
    return batch;
  }
  __device__ __noinline__ static uint32_t BuildSlice(const DecodeArgs& args, SharedStorage& shared, int live,
                                                     bool in_order, int slice, uint32_t overhead, uint32_t begin) {
    return StoreSlice(args, shared, PlanOf(args, slice + Lane(), live, in_order), min(live - slice, 32), overhead,
                      begin);
  }

  __device__ static SequencePlan PlanOf(const DecodeArgs& args, int sequence, int live, bool in_order) {
    bool owned = sequence < live;
    if (!in_order) owned = owned && LoadSequence(args.params, sequence, false).owned;
    return MakeSequencePlan<TileShape>(args, owned, SequenceMetadata::Load(args, sequence));
  }

  // Stores the slice's plans, one of each lane, of which the first `live` are live, with their coordinates in the
  // KV-block space from `begin` on. Returns where they end.
  __device__ static uint32_t StoreSlice(const DecodeArgs& args, SharedStorage& shared, SequencePlan plan, int live,
                                        uint32_t overhead, uint32_t begin) {
    plan.length += overhead;
    const uint32_t length = plan.End(args);  // plan.begin is 0
    uint32_t sum = length;
#pragma unroll 1
    for (int i = 1; i < live; i *= 2) {  // no iteration for a single sequence
      const uint32_t before = __shfl_up_sync(0xffffffffu, sum, i);
      if (Lane() >= i) sum += before;
    }
    plan.begin = Lane() < live ? begin + sum - length : ~0u;  // behind every coordinate that is searched for
    __syncwarp();                                             // the last slice is no longer read
    shared.plans[Lane()] = plan;
    __syncwarp();
    return begin + __shfl_sync(0xffffffffu, sum, max(live - 1, 0));
  }

  __device__ void LoadSlice(int slice, uint32_t begin) {
    slice_ = slice;
    begin_ = begin;
    end_ = BuildSlice(args_, shared_, live_, in_order_, slice, overhead_, begin);
  }

  // Where all work tiles have one length, a slightly longer interval may save much combining: whole work tiles, equal
  // parts of one, or a multiple of a power of two, as lengths often are.
  __device__ void SetInterval(uint32_t total, const TileLengths& lengths) {
    total_ = total;
    // At least ceil(total / num_cta_groups).
    interval_ = max(args_.cta_group_divisor.Divide(total + args_.num_cta_groups - 1), 1u);
    if (!lengths.Uniform()) return;
    const uint32_t length = lengths.longest;
    const uint32_t most = interval_ + interval_ / 16;
    if (most >= length && interval_ < 64 * length) {
      const uint32_t whole = static_cast<unsigned>(CeilDivSmall(interval_, length)) * length;
      if (whole <= most) {
        interval_ = whole;
        return;
      }
    }
    if (interval_ < 16) return;
    // As many CTA groups for each work tile: all are cut at the same places, and few.
    if (interval_ < length && length < 64 * interval_) {
      const uint32_t parts = static_cast<unsigned>(CeilDivSmall(length + 1, interval_)) - 1;
      const uint32_t part = (length + parts - 1) / parts;
      if (part <= interval_ + interval_ / 8) {
        interval_ = part;
        return;
      }
    }
    const uint32_t step = 1u << (27 - __clz(static_cast<int>(interval_)));
    interval_ = (interval_ + step - 1) & ~(step - 1);
  }

  const DecodeArgs& args_;
  SharedStorage& shared_;
  int live_;           // sequences
  uint32_t overhead_;  // fixed, behind each work tile
  int slice_;          // its first sequence
  uint32_t begin_;     // of the slice, in the KV-block space
  uint32_t end_;
  bool in_order_;
  uint32_t total_;
  uint32_t interval_;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_
