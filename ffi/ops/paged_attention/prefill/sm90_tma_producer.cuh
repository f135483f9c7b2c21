// The producer warps of the TMA prefill kernel (sm90_tma.cuh): one schedules work tiles, and one each loads K, V and Q.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_PRODUCER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_PRODUCER_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

// ---- The scheduler warp: finds the CTA's work tiles, describes them to the other warps, and checks the page table
template <typename Traits>
struct TmaSchedulerWarp {
  using T = typename Traits::Element;
  using Rows = typename Traits::Rows;
  using TileStage = typename Traits::TileStage;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kWarpgroups = Traits::kConsumerWarpgroups;

  const TmaCta<Traits>& cta;

  // A work tile that has been described in a stage of TmaCta::tiles.
  struct Planned {
    WorkTile tile;
    bool found;     // false: the CTA has no work tile, or it was not looked for
    bool computed;  // by the other warps; false: some row is written without them
    SplitMode mode;
    int next_split;  // of the same work tile, where this CTA takes all splits; else 0
  };

  // Finds the CTA's first work tile and describes it in the first stage, but does not tell the other warps.
  template <typename Find>
  __device__ Planned PlanFirst(Find find) const {
    Planned planned{};
    planned.found = find(0, &planned.tile);
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
        planned.found = find(n, &planned.tile);
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
        const bool invalid = __any_sync(~0u, FindsInvalidPage<2>(cta.attention, tile, lane, 32));
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
  // Describes `planned->tile` in a stage, but for `invalid_page`, and fills in the rest of `*planned`. next_split: of
  // the work tile, or of the one before.
  __device__ void Plan(typename Traits::TileState state, Planned* planned) const {
    const TmaParams& params = cta.params;
    const int lane = cta.lane;
    WorkTile& tile = planned->tile;
    TileStage& stage = cta.Tile(state);
    Rows rows(cta.attention, tile, Traits::kRows, params.group);
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
      const KvSplits splits = params.split_kv.Of(tile.q_len, tile.context_len);
      if (splits.count > 1) {
        int64_t accum_row;
        const int64_t part = blockIdx.y * params.accumulators.part_rows;
        if (tile.accum_begin >= 0) {
          mode = kCrossCta | kSpill;
          accum_row = part + tile.accum_begin + (tile.split * tile.q_len - tile.q_begin) * rows.num_heads;
        } else {  // this CTA takes all splits: the work tile comes back for each
          int first_key, last_key;
          rows.VisibleKeys(rows.count - 1, &first_key, &last_key);
          if (Traits::kTreeMask && params.tree_words > 0) last_key = tile.context_len - 1;
          int& next_split = planned->next_split;
          tile.split = next_split;
          if (next_split > 0) mode = kAccumulate;
          if (last_key / kTileKeys >= splits.Begin(next_split + 1)) mode |= kSpill;
          next_split = (mode & kSpill) != 0 ? next_split + 1 : 0;
          accum_row = part + blockIdx.x * Traits::kRows;
        }
        if (lane == 0) stage.accum_row = accum_row;
        first_tile = splits.Begin(tile.split);
        split_tiles = splits.Begin(tile.split + 1) - first_tile;
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

// ---- The warps that load K and V: page by page, a TMA box for each piece of a key tile that lies in one page
template <typename Traits, bool kIsValues>
struct TmaKvWarp {
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kTileBytes = Traits::kTileBytes;
  using TileState = typename Traits::TileState;
  using State = std::conditional_t<kIsValues, typename Traits::ValueState, typename Traits::KeyState>;

  // The boxes of a key tile: what lane i knows of box i.
  struct Box {
    int page;      // as the block table has it; -1: not read
    int slot;      // of the page where the box begins
    bool partial;  // some of its keys are seen by a row of the work tile, and some are not
  };

  const TmaCta<Traits>& cta;

  __device__ void Run() const {
    const CUtensorMap& map = kIsValues ? cta.params.v_map : cta.params.k_map;
    TileState work;
    State state;
    uint32_t unmasked_phase = 0;
    for (;; work.Advance()) {
      cta.tiles.WaitFull(work);
      int left = cta.Tile(work).key_tiles;
      if (left == 0) break;
      int tile = cta.Tile(work).last_key_tile;
      Box next = LookUp(work, tile);
      const uint64_t l2_policy = L2Policy(work);
      for (; left > 0; --left, --tile) {
        const Box box = next;
        // The next page numbers arrive while this tile's loads are started; nothing may read them before.
        if (left > 1) next = LookUp(work, tile - 1);
        uint32_t full, target;
        if constexpr (kIsValues) {
          cta.values.WaitEmpty(state);
          full = cta.values.Full(state);
          target = cta.Values(state.stage);
        } else {
          cta.keys.WaitEmpty(state);
          full = cta.keys.Full(state);
          target = cta.Keys(state.stage);
        }
        if (kIsValues && __any_sync(~0u, box.partial)) {
          const uint32_t unmasked = cta.Address(offsetof(typename Traits::SharedStorage, unmasked_values));
          LoadTile(map, target, unmasked, work, box, l2_policy);
          WaitBarrier(unmasked, unmasked_phase);
          unmasked_phase ^= 1;
          ClearUnseen(target, work, tile);
          cta.Arrive(full);
        } else {
          LoadTile(map, target, full, work, box, l2_policy);
        }
        state.Advance();
      }
      cta.Arrive(cta.tiles.Empty(work));
    }
  }

 protected:
  // Some row of the work tile sees the rows [*begin, *end) of a key tile.
  __device__ void SeenRows(TileState work, int tile, int* begin, int* end) const {
    *begin = max(cta.Tile(work).rows.key_begin - tile * kTileKeys, 0);
    *end = min(cta.Tile(work).rows.key_end - tile * kTileKeys, kTileKeys);
  }

  __device__ Box LookUp(TileState work, int tile) const {
    int begin, end;
    SeenRows(work, tile, &begin, &end);
    const int row = cta.lane * cta.params.box_slots;
    const int row_end = row + cta.params.box_slots;
    const unsigned position = static_cast<unsigned>(tile) * kTileKeys + row;
    const unsigned index = cta.params.page.Divide(position);
    int page = -1;
    if (row < end && row_end > begin) {
      page = __ldg(cta.attention.block_tables + cta.Tile(work).rows.seq * cta.attention.pages_per_seq + index);
    }
    const bool partial = (begin > row && begin < row_end) || (end > row && end < row_end);
    return {page, static_cast<int>(position - index * cta.params.page.divisor), partial};
  }

  // Small work tiles are taken where there are few rows. Only one work tile reads these keys where all rows of the
  // sequence and kv head fit into it.
  __device__ uint64_t L2Policy(TileState work) const {
    const typename Traits::Rows& rows = cta.Tile(work).rows;
    return rows.q_len * static_cast<int>(rows.group.divisor) <= Traits::kRows ? kEvictFirst : kEvictNormal;
  }

  // Starts the loads of a key tile to `target`. Boxes that are not read, and page numbers out of range, lie outside the
  // tensor: TMA fills them with zeros.
  __device__ void LoadTile(const CUtensorMap& map, uint32_t target, uint32_t barrier, TileState work, const Box& box,
                           uint64_t l2_policy) const {
    const int column = cta.Tile(work).rows.kv_head * cta.params.head_columns;
    const int page = box.page < cta.attention.num_pages ? box.page : -1;
    const int box_bytes = cta.params.box_slots * (Traits::kHeadDim * 2);
    if (ElectOne()) ArriveExpectTx(barrier, kTileBytes);
    __syncwarp();
    constexpr int kBatch = 4;  // boxes whose pages are broadcast together
    for (int first = 0, offset = 0; offset < kTileBytes; first += kBatch, offset += kBatch * box_bytes) {
      int pages[kBatch], atom_rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        pages[i] = __shfl_sync(~0u, page, first + i);
        atom_rows[i] = __shfl_sync(~0u, box.slot, first + i) / 8;
      }
      if (ElectOne()) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (offset + i * box_bytes < kTileBytes) {
            if constexpr (Traits::kHasL2Policy) {
              TmaLoadCacheBox(target + offset + i * box_bytes, map, barrier, column, atom_rows[i], pages[i], l2_policy);
            } else {
              TmaLoadCacheBox(target + offset + i * box_bytes, map, barrier, column, atom_rows[i], pages[i]);
            }
          }
        }
      }
      __syncwarp();
    }
  }

  // Unused slots may hold infinity or NaN, which a probability of zero does not mask: rows of V that no row of the work
  // tile sees become zeros. Boxes without a seen row are not read; the rest of partly seen boxes is overwritten here.
  __device__ void ClearUnseen(uint32_t target, TileState work, int tile) const {
    int begin, end;
    SeenRows(work, tile, &begin, &end);
    const int box_slots = cta.params.box_slots;
    ClearRows(target, begin / box_slots * box_slots, begin);
    ClearRows(target, end, (end + box_slots - 1) / box_slots * box_slots);
    FenceProxyAsync();
  }

  __device__ void ClearRows(uint32_t tile, int begin, int end) const {
    for (int i = begin * 8 + cta.lane; i < end * 8; i += 32) {
#pragma unroll
      for (int atom = 0; atom < Traits::kRowAtoms; ++atom) {
        const uint32_t vec = tile + i / 64 * Traits::kAtomRowBytes + atom * Traits::kAtomBytes + i % 64 * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(vec), "r"(0) : "memory");
      }
    }
  }
};

// ---- The warp that loads Q: by TMA where 64 rows are whole tokens, else by cp.async
template <typename Traits>
struct TmaQueryWarp {
  using T = typename Traits::Element;
  using Rows = typename Traits::Rows;

  const TmaCta<Traits>& cta;

  __device__ void Run() const {
    typename Traits::TileState work;
    typename Traits::QueryState state;
    for (;; work.Advance(), state.Advance()) {
      cta.tiles.WaitFull(work);
      if (cta.Tile(work).key_tiles == 0) break;
      Load(work, state);
      cta.Arrive(cta.tiles.Empty(work));
    }
    Finish();
  }

  // Starts the loads for a work tile.
  __device__ void Load(typename Traits::TileState work, typename Traits::QueryState state) const {
    const TmaParams& params = cta.params;
    const Rows& rows = cta.Tile(work).rows;
    const uint32_t target = cta.Query(state.stage);
    const int token = static_cast<int>(rows.q_begin + params.group.Divide(rows.first));
    const int head = rows.kv_head * static_cast<int>(rows.group.divisor);
#pragma unroll
    for (int warpgroup = 0; warpgroup < Traits::kConsumerWarpgroups; ++warpgroup) {
      const uint32_t full = cta.query.Full(state, warpgroup);
      const int first = warpgroup * 64;
      cta.query.WaitEmpty(state, warpgroup);
      if (params.query_by_tma) {
        if (ElectOne()) {
          ArriveExpectTx(full, Traits::kQueryWarpgroupBytes);
          TmaLoadQueryRows(target + warpgroup * Traits::kQueryWarpgroupBytes, params.q_map, full, head,
                           token + params.group.Divide(first));
        } else {
          ArriveBarrier(full);
        }
        __syncwarp();
      } else {
        CopyRows(target + warpgroup * Traits::kQueryWarpgroupBytes, rows, first);
        ArriveOnCpAsync(full);
      }
    }
  }

  // A thread must not exit before its copies have completed.
  __device__ void Finish() const {
    CommitAsync();
    WaitAsync<0>();
  }

 private:
  // Copies the 64 rows from `first` on to `target`.
  __device__ void CopyRows(uint32_t target, const Rows& rows, int first) const {
    constexpr int kRowVectors = Traits::kHeadDim / 8;
    constexpr int kStepRows = 32 / kRowVectors;
    const int lane = cta.lane;
    const T* const query = static_cast<const T*>(cta.attention.query) + lane % kRowVectors * 8;
#pragma unroll 1
    for (int half = 0; half < 64; half += 32) {
      // Each lane computes the address of one row, and passes it on to the lanes that copy it.
      const int mine = first + half + lane;
      const int head_row = mine < rows.count ? static_cast<int>(rows.HeadRow(mine)) : -1;
#pragma unroll 4
      for (int step = 0; step < 32; step += kStepRows) {
        const int row = step + lane / kRowVectors;
        const int source = __shfl_sync(~0u, head_row, row);
        CopyAsync16(target + SwizzledOffset(Traits::kQueryColumnBytes, half + row, lane % kRowVectors),
                    query + (source >= 0 ? static_cast<int64_t>(source) * Traits::kHeadDim : 0), source >= 0);
      }
    }
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_PRODUCER_CUH_
