// The scheduler warp of the TMA prefill kernel (sm90_tma.cuh), one of its producer warps: finds the CTA's work tiles,
// describes them to the other warps, and checks the page table.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_SCHEDULER_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

template <typename Traits>
struct TmaSchedulerWarp {
  using T = typename Traits::Element;
  using Rows = typename Traits::Rows;
  using TileStage = typename Traits::TileStage;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kWarpgroups = Traits::kRowWarpgroups;

  const TmaCta<Traits>& cta;

  // A work tile that has been described in a stage of TmaCta::tiles.
  struct Planned {
    WorkTile tile;
    int packed_splits;  // with kCarriesSplits: KvSplits::Packed of its sequence
    bool found;         // false: the CTA has no work tile, or it was not looked for
    bool computed;      // by the other warps; false: some row is written without them
    SplitMode mode;
    int next_split;  // of the same work tile, where this CTA takes several; else 0
  };

  // Finds the CTA's first work tile and describes it in the first stage, but does not tell the other warps.
  template <typename Find>
  __device__ Planned PlanFirst(Find find) const {
    Planned planned{};
    planned.found = find(0, &planned.tile, &planned.packed_splits);
    if (planned.found) Plan({}, &planned);
    return planned;
  }

  // `find`: as PersistentTileScheduler::Find. `described()` is called once the other warps know a work tile. `first`:
  // of PlanFirst, where `has_first`.
  template <typename Find, typename Described>
  __device__ void Run(Find find, Described described, bool has_first, const Planned& first) const {
    const TmaParams& params = cta.params;
    const int lane = cta.lane;
    typename Traits::TileState state;
    int known_seq = -1;  // a sequence whose page table has been checked; each lane remembers one of its own
    bool known_invalid = false;
    Planned planned = first;
#pragma unroll 1
    for (unsigned n = 0;; has_first = false) {
      if (!has_first) {
        planned.found = find(n, &planned.tile, &planned.packed_splits);
        if (planned.found) {
          cta.tiles.WaitEmpty(state);
          Plan(state, &planned);
        }
      }
      if (!planned.found) break;
      const WorkTile& tile = planned.tile;
      TileStage& stage = cta.Tile(state);
      if (planned.next_split == 0) ++n;

      // ---- The other warps start, and the page table is checked meanwhile
      if (planned.computed) cta.Arrive(cta.tiles.Full(state));
      if (tile.valid && __shfl_sync(~0u, known_seq, tile.seq % 32) != tile.seq) {
        const bool invalid = __any_sync(~0u, FindsInvalid(tile));
        if (lane == tile.seq % 32) {
          known_seq = tile.seq;
          known_invalid = invalid;
        }
      }
      const bool invalid_page = __shfl_sync(~0u, static_cast<int>(known_invalid), tile.seq % 32) != 0;
      if (planned.computed) {
        if (lane == 0) stage.invalid_page = invalid_page;
        cta.Arrive(cta.checked.Full(state));
        described();
        state.Advance();
      } else if (planned.mode != 0) {  // no row sees a key of this split: an empty accumulator
        for (int row = lane; row < stage.rows.count; row += 32) {
          params.accumulators.max_sum_accum[stage.accum_row + stage.rows.HeadRow(row)] = make_float2(-INFINITY, 0.0f);
        }
        __syncwarp();
      } else {  // no row sees a key, or the metadata is invalid: the rows are written here
        const bool nan = !tile.valid || invalid_page;
        FillTileRows<T>(stage.rows, cta.attention, 0, 1, nan ? CUDART_NAN_F : 0.0f, nan ? CUDART_NAN_F : -CUDART_INF_F);
        __syncwarp();
      }
    }
    cta.tiles.WaitEmpty(state);
    if (lane == 0) cta.Tile(state).key_tiles = 0;
    cta.Arrive(cta.tiles.Full(state));
  }

 protected:
  // Whether this lane finds an invalid page number, as all lanes together.
  __device__ bool FindsInvalid(const WorkTile& tile) const {
    if constexpr (Traits::kAnyPages) {
      return FindsInvalidSmallPage<(Traits::kConsumerWarpgroups == 3 ? 2 : 4)>(cta.attention, tile, cta.lane);
    } else {
      return FindsInvalidPage<(Traits::kAlternates ? 8 : 2)>(cta.attention, tile, cta.lane, 32);
    }
  }

  // With kLongestFirst: the first row of the accumulators of a work tile of which this CTA takes all splits.
  __device__ int64_t OwnRow(const WorkTile& tile) const {
    if (tile.accum_begin < -1) return -2 - tile.accum_begin;
    return cta.params.accumulators.part_rows - (blockIdx.x + 1) * Traits::kRows;  // the CTA's, at the end
  }

  // Describes `planned->tile` in a stage, but for `invalid_page`, and fills in the rest of `*planned`. next_split: of
  // the work tile, or of the one before.
  __device__ void Plan(typename Traits::TileState state, Planned* planned) const {
    const TmaParams& params = cta.params;
    const int lane = cta.lane;
    const WorkTile& tile = planned->tile;
    TileStage& stage = cta.Tile(state);
    Rows rows(cta.attention, tile, params.group);
    if constexpr (Traits::kTreeMask) {
      if (params.tree_words > 0) {
        rows.tree_mask = params.tree_mask + static_cast<int64_t>(tile.q_begin) * params.tree_words;
        rows.tree_words = params.tree_words;
      }
    }

    // ---- Split-KV
    SplitMode mode = 0;
    int first_tile = 0, split_tiles = 0;  // of the KV split
    if (params.split_kv.enabled) {
      KvSplits splits;
      if constexpr (Traits::kCarriesSplits) {
        splits = KvSplits::Unpacked(planned->packed_splits);
      } else {
        splits = params.split_kv.template Of<typename Traits::Division>(tile.q_len, tile.context_len);
      }
      if (Traits::kCarriesSplits ? splits.tiles > 0 : splits.count > 1) {
        int64_t accum_row;
        const int64_t part = blockIdx.y * params.accumulators.part_rows;
        const auto cross_row = [&] {
          return part + tile.accum_begin + (tile.split * tile.q_len - tile.q_begin) * rows.num_heads;
        };
        const bool crosses = tile.accum_begin >= 0;
        const int first_splits = Traits::kTakesSomeSplits ? tile.first_splits : 1;
        int split = tile.split;
        if (crosses && (first_splits == 1 || split > 0)) {
          mode = kCrossCta | kSpill;
          accum_row = cross_row();
          if (split > 0) split += first_splits - 1;
        } else {  // this CTA takes all splits, or the first ones: the work tile comes back for each
          int first_key, last_key;
          rows.VisibleKeys(rows.count - 1, &first_key, &last_key);
          if (Traits::kTreeMask && params.tree_words > 0) last_key = tile.context_len - 1;
          int& next_split = planned->next_split;
          split = next_split;
          if (next_split > 0) mode = kAccumulate;
          const bool all_taken = crosses && next_split + 1 == first_splits;
          if (!all_taken && last_key / kTileKeys >= splits.Begin(next_split + 1)) mode |= kSpill;
          next_split = (mode & kSpill) != 0 ? next_split + 1 : 0;
          if (crosses && next_split == 0) mode |= kCrossCta | kSpill;
          accum_row = crosses ? cross_row() : part + blockIdx.x * Traits::kRows;
          if constexpr (Traits::kLongestFirst) {
            if (!crosses) accum_row = part + OwnRow(tile);
          }
        }
        if (lane == 0) stage.accum_row = accum_row;
        first_tile = splits.Begin(split);
        split_tiles = splits.Begin(split + 1) - first_tile;
      }
    }
    if (lane == 0) stage.mode = mode;
    planned->mode = mode;
    planned->computed = Describe(rows, first_tile, split_tiles, &stage) > 0 && tile.valid;
  }

  // Writes a stage, but for `invalid_page` and the KV split, and returns the number of its key tiles: `most` tiles from
  // `from` on, or all that its rows see where `most` is 0. Lane i below kWarpgroups describes the keys of warpgroup i's
  // rows, the next lane those of all rows.
  __device__ int Describe(Rows rows, int from, int most, TileStage* stage) const {
    const int lane = cta.lane;
    const bool one_warpgroup = lane < kWarpgroups;
    const int begin = one_warpgroup ? lane * 64 : 0;
    const int end = one_warpgroup ? min(begin + 64, rows.count) : rows.count;
    int seen_begin, seen_last, all_begin, all_last;
    rows.KeysOf(begin, end, &seen_begin, &seen_last, &all_begin, &all_last);
    if (Traits::kTreeMask && rows.tree_mask != nullptr && begin < end) rows.KeysOfTree(&seen_last, &all_last);
    int first = seen_begin / kTileKeys;
    int last = (seen_last + kTileKeys) / kTileKeys - 1;
    if (most > 0) {
      // Sequences that are split have no window: all rows see the keys from 0 up to their own.
      first = from;
      last = max(min(last, from + most - 1), from - 1);
      seen_begin = from * kTileKeys;
      seen_last = min(seen_last, (from + most) * kTileKeys - 1);
    }
    const int first_of_all = __shfl_sync(~0u, first, kWarpgroups);
    const int tiles = __shfl_sync(~0u, last, kWarpgroups) + 1 - first_of_all;
    if (one_warpgroup) {
      using Range = typename Traits::KeyTileRange;
      stage->warpgroups[lane] =
          begin < end ? Range{first, last, (all_begin + kTileKeys - 1) / kTileKeys, (all_last + 1) / kTileKeys - 1}
                      : Range{first_of_all, first_of_all - 1, 0, 0};
    } else if (lane == kWarpgroups) {
      rows.key_begin = seen_begin;
      rows.key_end = seen_last + 1;
      rows.last_row_first_key = all_begin;
      rows.first_row_last_key = all_last;
      stage->rows = rows;
      stage->first_key_tile = first;
      stage->last_key_tile = last;
      stage->key_tiles = tiles;
    }
    __syncwarp();
    return tiles;
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_SCHEDULER_CUH_
