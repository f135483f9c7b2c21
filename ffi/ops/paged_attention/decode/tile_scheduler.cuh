// The tile scheduler of the decode path: which CTA computes what. Every warp computes it for itself from the metadata.
//
// A work tile is a sequence, a KV-head group and a tile of query rows. Its keys are cut into at most kMaxSplits KV
// splits, whose length is a function of the number of keys alone. The splits of all work tiles, one after the other,
// form a linearised KV-block space, as in stream-K: each split is as long as its KV blocks, and a fixed overhead
// follows each work tile for the cost of starting the next. The space is divided into equal intervals, but for CTA
// groups that start earlier than others beside a prompt. A CTA group (one CTA for each KV head of a KV-head group, so
// that all heads of a page are read at about the same time) computes the splits that begin in its interval. So the load
// is balanced for any lengths, while a split's bits, and the order in which splits merge (up to eight to a segment,
// then the segments, from left to right), depend on the sequence alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/cta.cuh"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/decode/prompts.cuh"
#include "ffi/ops/paged_attention/decode/sequence_plan.cuh"
#include "ffi/ops/paged_attention/decode/tile_lengths.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::decode {

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

// The warps of a CTA build one each, at the same time. A warp calls its functions that are not const together. It holds
// the plans of 32 sequences at a time, a slice of the batch. In batches of several slices, the warps share the work of
// measuring them for the length of the KV-block space.
template <typename TileShape, typename Cta = WholeCta>
class TileScheduler {
  static constexpr int kMeasuredSlices = 32;  // whose lengths are kept
  static constexpr int kMaxWarps = 8;         // of a CTA
  static constexpr bool kMayTakeWholeTiles = TileShape::kMayTakeWholeTiles && !Cta::kGroupsVary;

  // The work tiles of a slice.
  struct SliceExtent {
    uint32_t work_tiles;
    uint32_t length;  // in the KV-block space, without the fixed overhead
  };
  // Of the slices that a warp has measured.
  struct WarpExtent {
    uint32_t longest;
    uint32_t shortest;
    SliceExtent others;  // of those past kMeasuredSlices
    PromptExtent prompts;
    bool in_order;
  };

 public:
  using Shape = TileShape;
  struct SharedStorage {  // of a warp
    SequencePlan plans[32];
  };
  // Of the CTA. What its warps find out about a batch of several slices.
  struct BatchStorage {
    SliceExtent slices[kMeasuredSlices];
    WarpExtent warps[kMaxWarps];
  };

  // The loads that depend on no other: the first slice, some of whose sequences may not be live, and where there may be
  // several the first ones that the warp measures.
  struct FirstLoads {
    SequenceMetadata metadata;
    SequenceMetadata measured[2];
    int num_seqs;

    __device__ explicit FirstLoads(const DecodeArgs& args)
        : metadata(SequenceMetadata::Load(args, Lane())),
          measured{metadata, {}},
          num_seqs(__ldg(args.params.num_seqs)) {
      if (args.max_seqs <= 32) return;
      if (Warp() > 0) measured[0] = SequenceMetadata::Load(args, 32 * Warp() + Lane());
      measured[1] = SequenceMetadata::Load(args, 32 * (Warp() + Warps()) + Lane());
    }
  };

  // cta_groups: where Cta::kGroupsVary.
  __device__ TileScheduler(const DecodeArgs& args, SharedStorage& shared, BatchStorage& batch_storage,
                           const FirstLoads& loads, int cta_groups)
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
      SetInterval(end_, lengths, cta_groups, {});
    } else {
      const BatchExtent batch = MeasureBatch(args, batch_storage, live_, loads.measured[0], loads.measured[1]);
      in_order_ = batch.in_order;
      overhead_ = batch.lengths.FixedOverhead();
      SetInterval(batch.length + overhead_ * batch.work_tiles, batch.lengths, cta_groups, batch.prompts);
      my_slice_end_ = batch.slice.length + overhead_ * batch.slice.work_tiles;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, my_slice_end_, i);
        if (Lane() >= i) my_slice_end_ += before;
      }
      slice_ = kNoSlice;
      begin_ = end_ = 0;
    }
  }

  // The length of the KV-block space, and where a CTA group's interval of it begins.
  __device__ uint32_t Total() const { return total_; }
  __device__ uint32_t IntervalBegin(int cta_group) const {
    const auto group = static_cast<unsigned>(cta_group);
    return group * interval_ + min(group, early_groups_) * lead_;
  }
  // The CTA group whose interval holds a coordinate.
  __device__ uint32_t OwnerOf(uint32_t position) const {
    const uint32_t early_end = early_groups_ * (interval_ + lead_);
    if (position < early_end) return position / (interval_ + lead_);
    return early_groups_ + (position - early_end) / interval_;
  }

  __device__ const SequencePlan& At(int index) const { return shared_.plans[index]; }
  // The index in the slice of the sequence that holds coordinate `position` < Total(). Changes the slice if need be.
  __device__ int Find(uint32_t position) {
    if (!Holds(position)) LoadSliceOf(position);
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
    if (slice_ != 0) LoadSlice(0, 0);
  }
  __device__ void NextSlice() { LoadSlice(slice_ + 32, end_); }

  __device__ int SequenceOf(int index) const { return slice_ + index; }

 private:
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int Warp() { return Cta::Warp(); }
  __device__ static int Warps() { return Cta::Warps(); }

  static constexpr int kNoSlice = -32;

  // The work tiles of all live sequences.
  struct BatchExtent {
    uint32_t work_tiles;
    uint32_t length;  // in the KV-block space, without the fixed overhead
    TileLengths lengths;
    PromptExtent prompts;
    bool in_order;
    SliceExtent slice;  // whose number is the lane's
  };

  // NOTE: this and BuildSlice are not inlined: only batches of more than 32 sequences and wrong metadata need them.
  // They are static: a member function that is not inlined would force the whole object into local memory.
  // By the CTA. first, second: of the first slices that the warp measures.
  __device__ __noinline__ static BatchExtent MeasureBatch(const DecodeArgs& args, BatchStorage& storage, int live,
                                                          SequenceMetadata first, SequenceMetadata second) {
    BatchExtent batch = {0, 0, {}, {0, 0, 0}, true, {0, 0}};
    while (true) {
      storage.warps[Warp()] = MeasureSlices(args, storage, live, first, second, batch.in_order);
      Cta::Sync();
      const WarpExtent warp = storage.warps[min(Lane(), Warps() - 1)];
      batch.lengths.longest = __reduce_max_sync(0xffffffffu, warp.longest);
      batch.lengths.shortest = __reduce_min_sync(0xffffffffu, warp.shortest);
      const bool is_slice = Lane() < kMeasuredSlices && 32 * Lane() < live;
      batch.slice = is_slice ? storage.slices[Lane()] : SliceExtent{0, 0};
      const SliceExtent others = Lane() < Warps() ? warp.others : SliceExtent{0, 0};
      batch.work_tiles = __reduce_add_sync(0xffffffffu, batch.slice.work_tiles + others.work_tiles);
      batch.length = __reduce_add_sync(0xffffffffu, batch.slice.length + others.length);
      batch.prompts = (Lane() < Warps() ? warp.prompts : PromptExtent{0, 0, 0}).OfWarp();
      if (__all_sync(0xffffffffu, warp.in_order) || !batch.in_order) {
        if constexpr (kMayTakeWholeTiles) TakeWholeTiles(args, storage, &batch);
        return batch;
      }
      // Once more, now with a look at the entries before each sequence's.
      batch.in_order = false;
      Cta::Sync();  // `storage` is no longer read
    }
  }
  // The slices whose numbers are the warp's, counted in steps of the number of warps. in_order: all sequences are, as
  // far as is known.
  __device__ static WarpExtent MeasureSlices(const DecodeArgs& args, BatchStorage& storage, int live,
                                             const SequenceMetadata& first, const SequenceMetadata& second,
                                             bool in_order) {
    bool ok = true;
    uint32_t longest = 0;
    uint32_t shortest = ~0u;
    SliceExtent others = {0, 0};
    PromptExtent prompts = {0, 0, 0};
    for (int slice = Warp(); 32 * slice < live; slice += Warps()) {
      const int sequence = 32 * slice + Lane();
      const SequenceMetadata metadata = slice == Warp()             ? first
                                        : slice == Warp() + Warps() ? second
                                                                    : SequenceMetadata::Load(args, sequence);
      bool owned = sequence < live;
      ok = ok && (!owned || metadata.InOrder(args));
      if (!in_order) owned = owned && LoadSequence(args.params, sequence, false).owned;
      const SequencePlan plan = MakeSequencePlan<TileShape>(args, owned, metadata);
      const unsigned mine = static_cast<unsigned>(plan.WorkTiles(args));
      const SliceExtent extent = {__reduce_add_sync(0xffffffffu, mine),
                                  __reduce_add_sync(0xffffffffu, mine * plan.length)};
      if (slice < kMeasuredSlices) {
        storage.slices[slice] = extent;
      } else {
        others = {others.work_tiles + extent.work_tiles, others.length + extent.length};
      }
      longest = max(longest, plan.length);
      if (plan.splits > 0) shortest = min(shortest, plan.length);
      if (args.prompt_sms > 0 && owned) prompts = prompts + PromptExtent::Of(args, metadata);
    }
    return {__reduce_max_sync(0xffffffffu, longest), __reduce_min_sync(0xffffffffu, shortest), others, prompts.OfWarp(),
            __all_sync(0xffffffffu, ok) != 0};
  }

  // Whether each CTA group takes no more than one work tile, a whole one: where there are as many CTA groups, and the
  // longest work tile is at most args.whole_tile_excess KV blocks longer than an equal share. The combine kernel costs
  // more.
  __device__ static bool SuitsWholeTiles(const DecodeArgs& args, const BatchExtent& batch) {
    if (batch.work_tiles > static_cast<unsigned>(args.num_cta_groups)) return false;
    const uint32_t total = batch.length + batch.lengths.FixedOverhead() * batch.work_tiles;
    const uint32_t share = args.cta_group_divisor.Divide(total + static_cast<unsigned>(args.num_cta_groups) - 1);
    return batch.lengths.longest <= share + args.whole_tile_excess;
  }
  // Has all work tiles stand in the KV-block space with a length of 1 where SuitsWholeTiles, so that the intervals have
  // it too. For the combine kernel there are none. All of this stands in functions that calls of up to 32 sequences do
  // not run: the code around them is the same.
  __device__ static void TakeWholeTiles(const DecodeArgs& args, BatchStorage& storage, BatchExtent* batch) {
    if (args.whole_tile_excess == 0) return;
    const bool suits = SuitsWholeTiles(args, *batch);
    if constexpr (!TileShape::kCombines) storage.slices[WholeTilesIndex()].work_tiles = suits ? 1 : 0;
    if (!suits) return;
    if constexpr (TileShape::kCombines) batch->work_tiles = 0;
    batch->length = batch->work_tiles;
    batch->slice.length = batch->slice.work_tiles;
    batch->lengths.longest = batch->lengths.shortest = 1;
  }
  // Whether TakeWholeTiles has. shared: of the warp; behind it and those of the warps after it stands BatchStorage.
  __device__ static bool HasWholeTiles(const DecodeArgs& args, const SharedStorage& shared) {
    if constexpr (!kMayTakeWholeTiles || TileShape::kCombines) return false;
    if (args.whole_tile_excess == 0) return false;
    const auto* const storage = reinterpret_cast<const BatchStorage*>(&shared + (Warps() - Warp()));
    return storage->slices[WholeTilesIndex()].work_tiles != 0;
  }
  // Where a warp stores that: in the place of a slice that batches of so few sequences do not have.
  __device__ static int WholeTilesIndex() { return kMeasuredSlices - 1 - Warp(); }
  static_assert(32 * (kMeasuredSlices - kMaxWarps) >= kMaxSms * kCtasPerSm, "see WholeTileExcess");

  __device__ __noinline__ static uint32_t BuildSlice(const DecodeArgs& args, SharedStorage& shared, int live,
                                                     bool in_order, int slice, uint32_t overhead, uint32_t begin) {
    SequencePlan plan = PlanOf(args, slice + Lane(), live, in_order);
    if (HasWholeTiles(args, shared)) plan.length = 1;
    return StoreSlice(args, shared, plan, min(live - slice, 32), overhead, begin);
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

  // The slice that holds a coordinate < Total().
  __device__ void LoadSliceOf(uint32_t position) {
    const int slice = __popc(__ballot_sync(0xffffffffu, my_slice_end_ <= position));
    const uint32_t begin = __shfl_sync(0xffffffffu, my_slice_end_, max(slice - 1, 0));
    if (slice < kMeasuredSlices) return LoadSlice(32 * slice, slice == 0 ? 0 : begin);
    if (position < begin_ || slice_ < 0) LoadSlice(0, 0);
    while (position >= end_) NextSlice();
  }
  __device__ void LoadSlice(int slice, uint32_t begin) {
    slice_ = slice;
    begin_ = begin;
    end_ = BuildSlice(args_, shared_, live_, in_order_, slice, overhead_, begin);
  }

  // prompts: beside which the first CTA groups start, with their last round of work tiles.
  __device__ void SetInterval(uint32_t total, const TileLengths& lengths, int cta_groups, const PromptExtent& prompts) {
    total_ = total;
    early_groups_ = lead_ = 0;
    // At least ceil(total / num_cta_groups). All kernels of a call find the same.
    if (Cta::kGroupsVary && cta_groups != args_.num_cta_groups) {
      interval_ = max((total + static_cast<unsigned>(cta_groups) - 1) / static_cast<unsigned>(cta_groups), 1u);
    } else {
      interval_ = max(args_.cta_group_divisor.Divide(total + args_.num_cta_groups - 1), 1u);
    }
    interval_ = RoundedUp(interval_, lengths);
    if (prompts.prompts == 1 && prompts.work_tiles > 0) SetLead(lengths, prompts);
  }

  // The prompt's last round of work tiles leaves SMs, where CTA groups start earlier than on the others, by the time of
  // a work tile. Their intervals become longer by what they do meanwhile, so that all end at the same time: where they
  // are not few, and all end earlier than with equal intervals.
  __device__ void SetLead(const TileLengths& lengths, const PromptExtent& prompt) {
    const auto sms = static_cast<unsigned>(args_.prompt_sms);
    const unsigned busy = prompt.work_tiles % sms;
    const auto all = static_cast<unsigned>(args_.num_cta_groups);
    const unsigned early =
        (sms - busy) * static_cast<unsigned>(kCtasPerSm) / static_cast<unsigned>(args_.cta_group_size);
    if (busy == 0 || early * 4 < all || early >= all) return;
    // In sixteenths of a microsecond of an H200.
    constexpr unsigned kWorkTile = 77, kKeyTile = 29, kBlock = 23;
    // From here on in KV blocks, from the start of the first CTA groups on: when the others start, and how long the
    // intervals of both would be.
    const uint32_t lead = (kWorkTile + prompt.key_tiles / prompt.work_tiles * kKeyTile) / kBlock;
    const uint32_t most = (total_ + early - 1) / early;
    uint32_t interval = 1;
    if (lead < most) {
      interval = max(args_.cta_group_divisor.Divide(total_ - early * lead + all - 1), 1u);
      interval = RoundedUp(interval, lengths);
    }
    const uint32_t longer = RoundedUp(interval + min(lead, most), lengths);
    // With equal intervals others start where the first ones have ended, if that is earlier.
    const bool starts_again = interval_ < lead;
    const bool two_rounds = starts_again && 2 * early >= all;
    const uint32_t equal_end = interval_ + (two_rounds ? interval_ : min(lead, starts_again ? 2 * interval_ : lead));
    const uint32_t end = lead < most ? max(longer, lead + interval) : longer;
    // What starting and combining cut work tiles costs.
    constexpr uint32_t kFew = 10, kMany = 20;
    if (end + (starts_again ? kMany : kFew) > equal_end) return;
    early_groups_ = early;
    interval_ = interval;
    lead_ = longer - interval;
  }

  const DecodeArgs& args_;
  SharedStorage& shared_;
  int live_;           // sequences
  uint32_t overhead_;  // fixed, behind each work tile
  int slice_;          // its first sequence
  uint32_t begin_;     // of the slice, in the KV-block space
  uint32_t end_;
  uint32_t my_slice_end_;  // in batches of several slices: of the slice whose number is the lane's
  bool in_order_;
  uint32_t total_;
  uint32_t interval_;      // of a CTA group
  uint32_t early_groups_;  // the first ones, whose intervals are longer by lead_
  uint32_t lead_;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_
