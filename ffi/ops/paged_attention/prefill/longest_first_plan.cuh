// Which KV splits of a few sequences are cross-CTA splits where the accumulators of all do not fit: those of the
// longest contexts first.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LONGEST_FIRST_PLAN_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LONGEST_FIRST_PLAN_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/prefill/prompt_tiles.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// Whether a sequence belongs to the decode path, as that path says: also of metadata that are out of order.
__device__ inline bool HasDecodeRows(int begin, int end, int max_decode_tokens) {
  const unsigned tokens = static_cast<unsigned>(end) - static_cast<unsigned>(begin);
  return tokens - 1 < static_cast<unsigned>(max_decode_tokens);
}

// What becomes of a sequence's KV splits.
struct SplitPlacement {
  int first;  // splits of each row tile that one CTA takes, the first ones; if all, none is a cross-CTA split
  // First row of the cross-CTA splits' accumulators. Where there are none: of those that its row tiles have, each its
  // own; -1: each CTA has a place.
  int accum_begin;
};

// By a warp, of up to kWarpPlannedSequences: a sequence of the prefill path to a lane, with q_len 0 where it has none.
// The prefill kernel and the combine kernel find the same. It changes no bits: the splits merge in the same order.
template <typename Division = PlainDivision>
class LongestFirstPlan {
 public:
  // part_rows: of the split accumulators. The first ones, which `policy.pool_rows` do not count, are the decode path's.
  __device__ LongestFirstPlan(const SplitKvPolicy& policy, int64_t part_rows, int q_len, int context_len)
      : LongestFirstPlan(policy, part_rows, q_len, context_len, policy.Of(q_len, context_len),
                         PlainDivision{policy.tile_rows, policy.ctas}) {}
  // `splits`: the sequence's.
  __device__ LongestFirstPlan(const SplitKvPolicy& policy, int64_t part_rows, int q_len, int context_len,
                              const KvSplits& splits, const Division& division)
      : policy_(policy),
        division_(division),
        part_rows_(static_cast<unsigned>(part_rows)),
        q_len_(q_len),
        context_len_(context_len),
        splits_(splits),
        splits_keys_(splits_.count > 1),
        rows_(static_cast<unsigned>(q_len * policy.group)),
        of_split_(splits_keys_ ? rows_ * static_cast<unsigned>(policy.kv_heads) : 0) {}

  // `has_decode_rows`: some sequence belongs to the decode path. Else that path's part of the scratch may be used too.
  __device__ SplitPlacement Place(bool has_decode_rows) {
    const unsigned decode_rows = part_rows_ - policy_.pool_rows;
    if (Fit(1, policy_.pool_rows)) {
      int first = 1;
      if (policy_.asks_first_splits) first = policy_.FirstSplits(q_len_, context_len_, splits_, division_);
      return PlaceBehind(first, decode_rows);
    }
    const SplitPlacement none = {splits_.count, -1};
    if (!Sum()) return none;
    const unsigned begin = has_decode_rows ? decode_rows : 0;
    const unsigned room = part_rows_ - begin;
    if (policy_.asks_first_splits) {
      if (IsBusyWithoutCrossing()) return none;
      if (policy_.takes_first_splits && all_ < policy_.ctas) {
        const unsigned chain = LeastChain(room);
        return LongestFirst(PlaceBehind(FirstOf(chain), begin), chain, begin, room);
      }
    }
    return LongestFirst(none, WithoutCrossing(), begin, room);
  }

 private:
  static constexpr unsigned kMost = 1u << 18, kMostTiles = 1u << 13;  // no overflow

  // Sums over the sequences. False if they are too large for that.
  __device__ bool Sum() {
    const bool has_keys = q_len_ > 0 && context_len_ > 0 && q_len_ <= policy_.max_tokens;
    tiles_ = has_keys ? policy_.tile_keys.Divide(static_cast<unsigned>(context_len_) - 1) + 1 : 0;
    row_tiles_ = division_.ByTileRows(rows_ + policy_.tile_rows - 1) * static_cast<unsigned>(policy_.kv_heads);
    all_ = __reduce_add_sync(~0u, min(row_tiles_, kMost));
    longest_ = __reduce_max_sync(~0u, tiles_);
    if (longest_ >= kMostTiles || all_ >= kMostTiles) return false;
    work_ = __reduce_add_sync(~0u, row_tiles_ * tiles_);
    share_ = division_.ByCtas(work_);
    return true;
  }

  // Rows of the accumulators where one CTA takes the `first` first splits.
  __device__ unsigned RowsBehind(int first) const {
    const int count = splits_.count - first + 1;
    return count > 1 ? static_cast<unsigned>(count) * of_split_ : 0;
  }
  __device__ bool Fit(int first, unsigned room) const {
    return __reduce_add_sync(~0u, min(RowsBehind(first), kMost)) <= room;
  }
  __device__ SplitPlacement PlaceBehind(int first, unsigned begin) const {
    return {first, BeginOf(RowsBehind(first), begin)};
  }
  __device__ static int BeginOf(unsigned rows, unsigned begin) {
    const unsigned up_to = SumUpToLane(rows);
    return rows == 0 ? -1 : static_cast<int>(begin + up_to - rows);
  }
  // The first splits of so many key tiles, about.
  __device__ int FirstOf(unsigned key_tiles) const {
    if (!splits_keys_) return 1;
    const int nearest = static_cast<int>(key_tiles) + splits_.tiles / 2;
    int first = min(Division::Quotient(nearest, splits_.tiles), splits_.count);
    if (splits_.Begin(first) > nearest) --first;
    return max(first, 1);
  }
  // Whether the CTAs without first splits have about as much to do with the others as those that take so many key
  // tiles.
  __device__ bool Balances(int first, unsigned key_tiles) const {
    const unsigned others = __reduce_add_sync(~0u, splits_keys_ ? row_tiles_ * (tiles_ - splits_.Begin(first)) : 0);
    return others * 4 <= (policy_.ctas - all_) * (key_tiles + 1) * 5;
  }
  __device__ unsigned Rounds() const { return division_.ByCtas(all_ + policy_.ctas - 1); }
  // As SplitKvPolicy::FirstSplits: whether work tiles that are not split keep all CTAs busy nearly to the end.
  __device__ bool IsBusyWithoutCrossing() const {
    return uint64_t{Rounds() * longest_} * policy_.ctas * 7 <= uint64_t{work_} * 8;
  }

  // Where a CTA may take some splits: the fewest key tiles, of the first splits, for which the other splits'
  // accumulators have room, and the other CTAs have no more to do.
  __device__ unsigned LeastChain(unsigned room) const {
    unsigned low = share_, high = longest_;
    while (low < high) {
      const unsigned middle = (low + high) / 2;
      const int first = FirstOf(middle);
      if (Fit(first, room) && Balances(first, middle)) {
        high = middle;
      } else {
        low = middle + 1 + middle / 32;  // near enough
      }
    }
    return high;
  }

  // Key tiles that a CTA has to take if no split is a cross-CTA split, about: whole rounds where row tiles are alike.
  __device__ unsigned WithoutCrossing() const {
    const bool alike = work_ * 4 >= all_ * longest_ * 3;
    return alike ? Rounds() * longest_ : max(longest_, share_);
  }

  // The sequences of the longest contexts have cross-CTA splits, and of the others one CTA takes all, if that leaves
  // less to a CTA than `otherwise`, with which it takes `most` key tiles. The row tiles of the others have rows of
  // their own, or, where these would be more, each CTA has.
  __device__ SplitPlacement LongestFirst(const SplitPlacement& otherwise, unsigned most, unsigned begin,
                                         unsigned room) const {
    const unsigned tile_rows = policy_.tile_rows, lane = threadIdx.x % 32;
    const unsigned shared_rows = policy_.shares_small_tiles ? 64 : 0;
    const unsigned own = splits_keys_ && min(rows_, tile_rows) > shared_rows ? row_tiles_ * tile_rows : 0;
    const unsigned all_own = __reduce_add_sync(~0u, min(own, kMost));
    const bool by_cta = all_own > policy_.ctas * tile_rows;
    const unsigned taken = by_cta ? policy_.ctas * tile_rows : all_own;
    if (taken > room) return otherwise;

    unsigned left = room - taken;
    const unsigned cross_rows = RowsBehind(1);
    const unsigned more = by_cta ? cross_rows : max(cross_rows, own) - own;
    bool crosses = false;
    unsigned waiting = splits_keys_ ? tiles_ * 32 + 31 - lane : 0;
    while (const unsigned next = __reduce_max_sync(~0u, waiting)) {
      const unsigned wanted = __shfl_sync(~0u, more, static_cast<int>(31 - next % 32));
      const bool fits = wanted <= left;
      if (fits) left -= wanted;
      if (waiting == next) {
        crosses = fits;
        waiting = 0;
      }
    }
    // Until the last CTA ends: some have half a cross-CTA split more than others.
    const unsigned longest = __reduce_max_sync(~0u, crosses ? 0 : tiles_);
    const unsigned uneven = __reduce_max_sync(~0u, crosses ? splits_.tiles / 2u : 0);
    if (max(longest, share_ + uneven) * 9 >= most * 8) return otherwise;
    const unsigned rows = crosses ? cross_rows : by_cta ? 0 : own;
    return {crosses ? 1 : splits_.count, BeginOf(rows, begin)};
  }

  const SplitKvPolicy& policy_;
  const Division division_;
  const unsigned part_rows_;
  const int q_len_, context_len_;
  const KvSplits splits_;
  const bool splits_keys_;
  const unsigned rows_;      // of a kv head
  const unsigned of_split_;  // rows of a split's accumulators; 0 where keys are not split
  unsigned row_tiles_ = 0;   // of all kv heads
  unsigned tiles_ = 0;       // key tiles
  // Of all sequences.
  unsigned all_ = 0;  // row tiles
  unsigned longest_ = 0;
  unsigned work_ = 0;   // key tiles of all row tiles
  unsigned share_ = 0;  // of a CTA
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LONGEST_FIRST_PLAN_CUH_
