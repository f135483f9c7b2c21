// Which work a CTA of the sm_90a kernels takes. Units, the row tiles of a sequence that a CTA group takes at a time,
// lie behind each other in a linearised space of key tiles, sequence by sequence; a unit is as long as its key tiles
// and unit_cost. Each CTA group takes an equal share of the space, so that a unit may belong to several, which then
// share its keys; or as many whole units as any other, where sharing keys would cost more than it saves; or one of as
// many equal parts of a unit as there are CTA groups for, where units are about equally long.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_SCHEDULE_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_SCHEDULE_CUH_

#include <cstdint>

#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::mla {

// In the time of a key tile: to begin and to end a unit (unit_cost), and to share its keys.
inline constexpr int kUnitCost = 3, kFewRowsUnitCost = 1;
inline constexpr int kSplitCost = 5;
// And for a CTA to take the end of a unit and the begin of another instead of one part.
inline constexpr int kSecondUnitCost = 2;
// The least key tiles of equal parts. With fewer the parts would be more, and merging them dearer, than with shares.
inline constexpr int kMinEqualPart = 2;

// How a unit's length follows from its key tiles.
struct UnitLength {
  int per_key_tile;  // 0 or 1; 0: the unit is `constant` equal parts, or whole
  int constant;

  __device__ int Of(int key_tiles) const { return per_key_tile * key_tiles + constant; }
};

__device__ inline int KeyTilesOf(int keys) {
  return static_cast<int>((static_cast<unsigned>(keys) + kTileKeys - 1) / kTileKeys);
}

// The units of a sequence. Unit u has the rows [u * rows, (u + 1) * rows) of `rows` = tile_rows * group_ctas rows, and
// key tiles up to the one with the key that its last row sees. For all but the last unit these are
// ⌊(u + base) / units_per_tile⌋, units_per_tile = num_heads * kTileKeys / rows, but no less than 0.
class SequenceUnits {
 public:
  int count;
  int last_key_tiles;  // of the last unit, which has the most

  __device__ SequenceUnits(const Sm90Params& params, const SequenceInfo& sequence) {
    const int unit_rows = params.tile_rows * params.group_ctas;
    const int64_t num_heads = params.attention.num_heads;
    // There are fewer than 2^31 rows.
    count = static_cast<int>((static_cast<unsigned>(sequence.q_len * num_heads) + unit_rows - 1) /
                             static_cast<unsigned>(unit_rows));
    last_key_tiles = KeyTilesOf(sequence.context_len);
    units_per_tile_ = 1;
    base_ = 0;
    if (count <= 1) return;  // the rest takes many slow divisions
    units_per_tile_ = static_cast<int>(num_heads * kTileKeys / unit_rows);
    const int64_t ahead = unit_rows - 1 + num_heads * (int64_t{sequence.context_len} - sequence.q_len + kTileKeys);
    base_ = ahead >= 0 ? ahead / unit_rows : -((unit_rows - 1 - ahead) / unit_rows);
    if (!sequence.valid) base_ = -int64_t{count};  // no key tiles at all
  }

  __device__ int KeyTiles(int unit) const {
    if (unit == count - 1) return last_key_tiles;
    return unit + base_ > 0 ? static_cast<int>((unit + base_) / units_per_tile_) : 0;
  }
  // Of all units before `unit`.
  __device__ int64_t LengthBefore(int unit, UnitLength length) const {
    const int64_t constant = int64_t{unit} * length.constant;
    return unit == 0 || length.per_key_tile == 0 ? constant : constant + SumBelow(unit + base_) - SumBelow(base_);
  }
  __device__ int64_t Length(UnitLength length) const {
    return count == 0 ? 0 : LengthBefore(count - 1, length) + length.Of(last_key_tiles);
  }
  // The unit in which `position` lies, counted from the first unit's begin.
  __device__ int Find(int64_t position, UnitLength length) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (LengthBefore(middle, length) <= position) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 private:
  // The sum of ⌊i / units_per_tile⌋ over 0 <= i < n.
  __device__ int64_t SumBelow(int64_t n) const {
    if (n <= 0) return 0;
    const int64_t quotient = n / units_per_tile_;
    return units_per_tile_ * (quotient * (quotient - 1) / 2) + quotient * (n - quotient * units_per_tile_);
  }

  int units_per_tile_;  // units after which there is a key tile more
  int64_t base_;
};

template <typename Int>
__device__ inline Int InclusiveWarpSum(Int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Int before = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// As LoadSequence, but inlined where metadata is wrong, too: behind setmaxnreg there is no calling of functions.
__device__ inline SequenceInfo LoadSequenceInline(const PagedAttentionParams& params, int s, bool in_order) {
  SequenceInfo info = LoadSequence(params, s, /*in_order=*/true);
  if (in_order) return info;
#pragma unroll 1
  for (int i = 0; i < s; ++i) {
    const int earlier = __ldg(params.query_start_loc + i);
    if (earlier > info.q_begin && earlier <= params.num_tokens) {
      info.q_len = 0;
      info.owned = false;
    }
  }
  return info;
}

// Asks for the page numbers of sequence s to come to L2. Each CTA does so for other sequences.
__device__ inline void PrefetchPages(const Sm90Params& params, int s, int context_len) {
  constexpr int kLine = 128, kMaxLines = 16;
  if (static_cast<unsigned>(s) % gridDim.x != blockIdx.x) return;
  const int64_t slots = params.attention.pages_per_seq * params.attention.page_size;
  if (context_len <= 0 || context_len > slots) return;
  const int pages = static_cast<int>(params.page.Divide(static_cast<uint32_t>(context_len - 1))) + 1;
  const auto* const table =
      reinterpret_cast<const char*>(params.attention.block_tables + s * params.attention.pages_per_seq);
  const int bytes = min(pages * 4, kMaxLines * kLine);
#pragma unroll 1
  for (int at = 0; at < bytes; at += kLine) asm volatile("prefetch.global.L2 [%0];" ::"l"(table + at));
}

// What follows from the metadata as such. A thread's first sequence is read before it is known how many are live, so
// that what follows finds all of it in L1, and does not wait for memory several times. By all threads of the CTA.
struct LiveMetadata {
  int num_live;  // -1: no sequence is live, since num_seqs is wrong
  bool in_order;

  __device__ explicit LiveMetadata(const Sm90Params& params) {
    const PagedAttentionParams& attention = params.attention;
    auto s = static_cast<int>(threadIdx.x);
    int begin = 0, end = 0, context_len = 0;
    if (s < attention.max_seqs) {
      begin = LoadBehindWait(attention.query_start_loc + s);
      end = LoadBehindWait(attention.query_start_loc + s + 1);
      context_len = LoadBehindWait(attention.context_lens + s);
    }
    num_live = LiveSequences(attention);
    bool ok = true;
    if (s < num_live) {
      ok = 0 <= begin && begin <= end && end <= attention.num_tokens;
      PrefetchPages(params, s, context_len);
    }
    for (s += static_cast<int>(blockDim.x); s < num_live; s += static_cast<int>(blockDim.x)) {
      begin = __ldg(attention.query_start_loc + s);
      end = __ldg(attention.query_start_loc + s + 1);
      ok = ok && 0 <= begin && begin <= end && end <= attention.num_tokens;
    }
    in_order = __syncthreads_and(ok);
  }
};

class Schedule : public LiveMetadata {
 public:
  UnitLength length;
  int64_t share;       // of a CTA group
  int64_t begin, end;  // this CTA group's; nothing to do where begin >= end
  int sequence;        // in which `begin` lies
  int64_t start;       // of that sequence

  // By all threads of the CTA. Contains barriers of all of them.
  __device__ Schedule(const Sm90Params& params, ScheduleStorage& shared)
      : LiveMetadata(params), length{1, params.unit_cost} {
    const int threads = static_cast<int>(blockDim.x), warps = threads / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;

    // ---- How much there is
    int64_t cost = 0, units = 0;  // of this thread's sequences, then up to them in the warp
    int longest = 0;
    for (int s = static_cast<int>(threadIdx.x); s < num_live; s += threads) {
      const SequenceUnits mine(params, LoadSequenceInline(params.attention, s, in_order));
      if (mine.count == 0) continue;
      cost += mine.Length(length);
      units += mine.count;
      longest = max(longest, length.Of(mine.last_key_tiles));
    }
    const int64_t own_cost = cost, own_units = units;
    cost = InclusiveWarpSum(cost, lane);
    units = InclusiveWarpSum(units, lane);
    longest = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(longest)));
    if (lane == 31) {
      shared.warp_costs[warp] = cost;
      shared.warp_units[warp] = units;
      shared.warp_longest[warp] = longest;
    }
    __syncthreads();
    int64_t total = 0, all_units = 0;
    int64_t cost_before = 0, units_before = 0;  // of the warps before this one
    longest = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      const bool there = w < warps, before = w < warp;
      const int64_t warp_cost = shared.warp_costs[w], warp_units = shared.warp_units[w];
      total += there ? warp_cost : 0;
      all_units += there ? warp_units : 0;
      cost_before += before ? warp_cost : 0;
      units_before += before ? warp_units : 0;
      longest = max(longest, there ? shared.warp_longest[w] : 0);
    }

    // ---- This CTA group's share
    const int groups = static_cast<int>(gridDim.x) / params.group_ctas;
    const int group = static_cast<int>(blockIdx.x) / params.group_ctas;
    share = (total + groups - 1) / groups;
    const int64_t whole_units = (all_units + groups - 1) / groups;
    if (whole_units * longest <= share + kSplitCost) {
      length = {0, 1};
      total = all_units;
      share = whole_units;
    } else if (all_units > 0 && all_units <= groups) {
      const int parts = groups / static_cast<int>(all_units);
      const int longest_part = (longest - params.unit_cost + parts - 1) / parts;  // key tiles
      if (parts > 1 && longest_part >= kMinEqualPart && longest_part + params.unit_cost <= share + kSecondUnitCost) {
        length = {0, parts};
        total = all_units * parts;
        share = 1;
      }
    }
    begin = group * share;
    end = min(begin + share, total);
    sequence = 0;
    start = 0;
    if (begin >= end) return;

    // ---- The sequence in which it begins
    if (num_live <= threads) {
      const bool by_cost = length.per_key_tile != 0;
      const int64_t up_to = by_cost ? cost_before + cost : (units_before + units) * length.constant;
      const int64_t mine = by_cost ? own_cost : own_units * length.constant;
      FindHere(static_cast<int>(threadIdx.x), up_to - mine, up_to, shared);
    } else {
      FindInBatches(params, threads, shared);
    }
    __syncthreads();
    sequence = shared.found_sequence;
    start = shared.found_start;
  }

 private:
  // Sequence s lies at [first, end).
  __device__ void FindHere(int s, int64_t first, int64_t end, ScheduleStorage& shared) const {
    if (begin < first || begin >= end) return;
    shared.found_sequence = s;
    shared.found_start = first;
  }

  // Where there are more sequences than threads. By all threads of the CTA.
  __device__ void FindInBatches(const Sm90Params& params, int threads, ScheduleStorage& shared) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int64_t before = 0;
    for (int first = 0; first < num_live; first += threads) {
      const int s = first + static_cast<int>(threadIdx.x);
      int64_t mine = 0;
      if (s < num_live) mine = SequenceUnits(params, LoadSequenceInline(params.attention, s, in_order)).Length(length);
      const int64_t up_to = InclusiveWarpSum(mine, lane);
      __syncthreads();
      if (lane == 31) shared.warp_costs[warp] = up_to;
      __syncthreads();
      int64_t base = before;
      for (int w = 0; w < threads / 32; ++w) {
        if (w < warp) base += shared.warp_costs[w];
        before += shared.warp_costs[w];
      }
      FindHere(s, base + up_to - mine, base + up_to, shared);
      if (begin < before) return;  // the same in all threads
    }
  }
};

// Walks over a CTA's work tiles. By one warp.
class TileCursor {
 public:
  __device__ TileCursor(const Sm90Params& params, const Schedule& schedule)
      : params_(params),
        schedule_(schedule),
        info_(LoadInfo(schedule.sequence)),
        units_(params, info_),
        sequence_(schedule.sequence),
        unit_(units_.Find(schedule.begin - schedule.start, schedule.length)),
        start_(schedule.start + units_.LengthBefore(unit_, schedule.length)) {}

  // The next work tile; false if there are no more. *split is set if its keys are shared and this CTA has the first.
  __device__ bool Next(WorkTile* tile, SplitTile* split) {
    while (start_ < schedule_.end && sequence_ < schedule_.num_live) {
      const bool found = MakeTile(tile, split);
      Advance();
      if (found) return true;
    }
    return false;
  }

 private:
  __device__ SequenceInfo LoadInfo(int s) const { return LoadSequenceInline(params_.attention, s, schedule_.in_order); }

  __device__ void Advance() {
    start_ += schedule_.length.Of(units_.KeyTiles(unit_));
    if (++unit_ < units_.count) return;
    unit_ = 0;
    while (++sequence_ < schedule_.num_live) {
      info_ = LoadInfo(sequence_);
      units_ = SequenceUnits(params_, info_);
      if (units_.count > 0) return;
    }
  }

  // This CTA's work tile of the current unit; false if it has none.
  __device__ bool MakeTile(WorkTile* tile, SplitTile* split) const {
    const Sm90Params& params = params_;
    const int num_heads = static_cast<int>(params.attention.num_heads);
    const int unit_tiles = units_.KeyTiles(unit_);
    int key_begin = 0, key_end = unit_tiles;  // key tiles of the unit that are this CTA group's
    int unit_parts = 0;                       // where they are equal
    if (schedule_.length.per_key_tile != 0) {
      const int64_t low = max(schedule_.begin - start_, int64_t{0});
      const int64_t high = min(schedule_.end - start_, int64_t{unit_tiles + params.unit_cost});
      key_begin = max(static_cast<int>(low) - params.unit_cost, 0);
      key_end = max(static_cast<int>(high) - params.unit_cost, 0);
      if (key_begin == key_end && (unit_tiles > 0 || low > 0)) return false;
    } else if (schedule_.length.constant > 1) {
      const int parts = schedule_.length.constant, part_tiles = max((unit_tiles + parts - 1) / parts, 1);
      const int part = static_cast<int>(schedule_.begin - start_);
      key_begin = part * part_tiles;
      key_end = min(key_begin + part_tiles, unit_tiles);
      if (key_begin >= unit_tiles && part > 0) return false;
      unit_parts = (unit_tiles + part_tiles - 1) / part_tiles;
    }
    const int group_cta = static_cast<int>(blockIdx.x) % params.group_ctas;
    tile->sequence_row = (unit_ * params.group_ctas + group_cta) * params.tile_rows;
    const int sequence_rows = info_.q_len * num_heads;
    if (tile->sequence_row >= sequence_rows) return false;
    tile->rows = min(params.tile_rows, sequence_rows - tile->sequence_row);
    tile->first_row = info_.q_begin * num_heads + tile->sequence_row;
    tile->kind = info_.valid ? WorkTile::kAttention : WorkTile::kNan;
    tile->offset = info_.context_len - info_.q_len;
    const auto last_row = static_cast<uint32_t>(tile->sequence_row + tile->rows - 1);
    tile->key_end = max(tile->offset + static_cast<int>(params.heads.Divide(last_row)) + 1, 0);
    tile->first_key_tile = key_begin;
    tile->key_tiles = info_.valid ? max(min(KeyTilesOf(tile->key_end), key_end) - key_begin, 0) : 0;
    tile->block_table = sequence_;
    const auto context = static_cast<uint32_t>(info_.context_len);
    tile->first_page = 0;
    tile->pages = context == 0 ? 0 : static_cast<int>(params.page.Divide(context - 1)) + 1;
    const bool begins_here = key_begin == 0, ends_here = key_end == unit_tiles;
    // The parts of a sequence's only unit have all its pages together, and a row is NaN if one of its parts is.
    if (units_.count == 1) {
      tile->first_page = static_cast<int>(params.page.Divide(static_cast<uint32_t>(key_begin * kTileKeys)));
      if (!ends_here)
        tile->pages = static_cast<int>(params.page.Divide(static_cast<uint32_t>(key_end * kTileKeys - 1))) + 1;
    }
    tile->slot = begins_here && ends_here ? -1 : static_cast<int>(blockIdx.x) * 2 + (begins_here ? 1 : 0);
    if (begins_here && !ends_here) {
      const int64_t unit_end = start_ + schedule_.length.Of(unit_tiles);
      const int group = static_cast<int>(blockIdx.x) / params.group_ctas;
      split->first_row = tile->first_row;
      split->rows = tile->rows;
      split->parts = unit_parts > 0 ? unit_parts : static_cast<int>((unit_end - 1) / schedule_.share) - group + 1;
      split->cta_step = params.group_ctas;
    }
    return true;
  }

  const Sm90Params& params_;
  const Schedule& schedule_;
  SequenceInfo info_;
  SequenceUnits units_;
  int sequence_;
  int unit_;
  int64_t start_;  // of the unit
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_SCHEDULE_CUH_
