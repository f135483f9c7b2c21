// The warps of the prefill kernel of prefill/sm90_tma.cuh that compute nothing: one finds tiles of query
// rows, and one each has the copy engine bring Q, K and V.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_PRODUCER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_PRODUCER_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

// `Block`: a TmaTraits.
template <typename Block>
struct TmaProducer : Block {
  using Block::Block;

  using T = typename Block::Element;
  using typename Block::KeyState;
  using typename Block::QueryState;
  using typename Block::Rows;
  using typename Block::TileStage;
  using typename Block::TileState;
  using typename Block::ValueState;
  using typename Block::WarpgroupTiles;
  static constexpr int kDim = Block::kHeadDim;
  static constexpr int kKeys = Block::kTileKeys;
  static constexpr int kConsumers = Block::kConsumerWarpgroups;
  using Block::At;
  using Block::Checked;
  using Block::Empty;
  using Block::Full;
  using Block::FullQuery;
  using Block::kAtomRowBytes;
  using Block::kAtomsPerRow;
  using Block::kKeyStart;
  using Block::kQueryBytes;
  using Block::kQueryColumnBytes;
  using Block::kQueryWarpgroupBytes;
  using Block::kRows;
  using Block::kRowVectors;
  using Block::kTileBytes;
  using Block::kValueStart;
  using Block::lane;
  using Block::params;
  using Block::Release;
  using Block::shared_address;
  using Block::Single;
  using Block::SwizzledOffset;
  using Block::tma;

  // ---- the warp that finds tiles and looks at the sequences' pages
  // `find`: as PersistentTileScheduler::Find.
  template <typename Find>
  __device__ void FindTiles(Find find) const {
    TileState place;
    int known_seq = -1;  // a sequence whose pages have been looked at; each lane remembers one of its own
    bool known_outside = false;
    int next_split = 0;
    WorkTile tile;
#pragma unroll 1
    for (unsigned n = 0; find(n, &tile);) {
      WaitBarrier(Empty(place), place.phase ^ 1);
      TileStage& slot = At(place);
      const Rows rows(params, tile, kRows, tma.group);
      SplitMode mode = 0;
      KvSplits splits = {1, 0};
      if (tma.split_kv.enabled) splits = tma.split_kv.Of(tile.q_len, tile.context_len);
      if (splits.count > 1) {
        int64_t first_row;
        if (tma.split_kv.CrossCta(splits) > 1) {
          mode = kCrossCta | kSpill;
          first_row = tile.split * tma.accumulators.rows_per_split;
        } else {  // all for this block: the tile comes back for each
          int first_key, last_key;
          rows.VisibleKeys(rows.count - 1, &first_key, &last_key);
          tile.split = next_split;
          if (next_split > 0) mode = kAccumulate;
          if (last_key / (splits.tiles * kKeys) > next_split) mode |= kSpill;
          next_split = (mode & kSpill) != 0 ? next_split + 1 : 0;
          first_row = tma.accumulators.cta_rows_begin + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kRows;
        }
        if (lane == 0) slot.accumulators = first_row;
      }
      if (lane == 0) slot.mode = mode;
      if (next_split == 0) ++n;
      // Rows that see no key are written here.
      const bool computed = Describe(rows, tile.split * splits.tiles, splits.tiles, &slot) > 0 && tile.valid;
      if (computed) Release(Full(place));
      if (tile.valid && __shfl_sync(~0u, known_seq, tile.seq % 32) != tile.seq) {
        const bool invalid_page = __any_sync(~0u, FindsInvalidPage<2>(params, tile, lane, 32));
        if (lane == tile.seq % 32) {
          known_seq = tile.seq;
          known_outside = invalid_page;
        }
      }
      const bool invalid_page = __shfl_sync(~0u, static_cast<int>(known_outside), tile.seq % 32) != 0;
      if (computed) {
        if (lane == 0) slot.invalid_page = invalid_page;
        Release(Checked(place));
        place.Advance();
      } else if (mode != 0) {  // none of them sees a key of this part
        for (int row = lane; row < rows.count; row += 32) {
          tma.accumulators.max_sum_accum[tile.split * tma.accumulators.rows_per_split + rows.HeadRow(row)] =
              make_float2(-INFINITY, 0.0f);
        }
      } else {
        const bool wrong = !tile.valid || invalid_page;
        FillTileRows<T>(slot.rows, params, 0, 1, wrong ? CUDART_NAN_F : 0.0f, wrong ? CUDART_NAN_F : -CUDART_INF_F);
        __syncwarp();
      }
    }
    WaitBarrier(Empty(place), place.phase ^ 1);
    if (lane == 0) At(place).tiles = 0;
    Release(Full(place));
  }

  // Writes a slot, but for `invalid_page` and the parts; returns the number of tiles of keys, of which it takes `most`
  // from `from` on, or all where `most` is 0. Lanes below kConsumers look at the rows of their warpgroup, the others at
  // all.
  __device__ int Describe(Rows rows, int from, int most, TileStage* slot) const {
    const bool one_group = lane < kConsumers;
    const int begin = one_group ? lane * 64 : 0;
    const int end = one_group ? min(begin + 64, rows.count) : rows.count;
    int seen_begin, seen_last, all_begin, all_last;
    rows.KeysOf(begin, end, &seen_begin, &seen_last, &all_begin, &all_last);
    int first = seen_begin / kKeys;
    int last = (seen_last + kKeys) / kKeys - 1;
    if (most > 0) {
      // All see the keys from 0 on, up to their own.
      first = from;
      last = max(min(last, from + most - 1), from - 1);
      seen_begin = from * kKeys;
      seen_last = min(seen_last, (from + most) * kKeys - 1);
    }
    const int first_of_all = __shfl_sync(~0u, first, kConsumers);
    const int tiles = __shfl_sync(~0u, last, kConsumers) + 1 - first_of_all;
    if (one_group) {
      slot->groups[lane] =
          begin < end ? WarpgroupTiles{first, last, (all_begin + kKeys - 1) / kKeys, (all_last + 1) / kKeys - 1}
                      : WarpgroupTiles{first_of_all, first_of_all - 1, 0, 0};
    } else if (lane == kConsumers) {
      rows.key_begin = seen_begin;
      rows.key_end = seen_last + 1;
      rows.last_row_first_key = all_begin;
      rows.first_row_last_key = all_last;
      slot->rows = rows;
      slot->first_tile = first;
      slot->last_tile = last;
      slot->tiles = tiles;
    }
    __syncwarp();
    return tiles;
  }

  // ---- the warp that copies Q
  __device__ void CopyQueries() const {
    TileState slot;
    QueryState place;
    for (;; slot.Advance(), place.Advance()) {
      WaitBarrier(Full(slot), slot.phase);
      if (At(slot).tiles == 0) break;
      const Rows& rows = At(slot).rows;
      const uint32_t stage = shared_address + place.stage * kQueryBytes;
      const int token = static_cast<int>(rows.q_begin + tma.group.Divide(rows.first));
      const int head = rows.kv_head * static_cast<int>(rows.group.divisor);
#pragma unroll
      for (int group = 0; group < kConsumers; ++group) {
        const uint32_t full = FullQuery(place, group);
        WaitBarrier(full + 8, place.phase ^ 1);
        if (tma.query_by_tma) {
          if (ElectOne()) {
            ArriveExpectTx(full, kQueryWarpgroupBytes);
            TmaLoadQueryRows(stage + group * kQueryWarpgroupBytes, tma.q_map, full, head,
                             token + tma.group.Divide(group * 64));
          } else {
            ArriveBarrier(full);
          }
          __syncwarp();
        } else {
          CopyQuery(stage + group * kQueryWarpgroupBytes, rows, group * 64);
          ArriveOnCpAsync(full);
        }
      }
      Release(Empty(slot));
    }
    // A thread must not end before its copies.
    CommitAsync();
    WaitAsync<0>();
  }

  // The 64 rows from `first` on, to `target`.
  __device__ void CopyQuery(uint32_t target, const Rows& rows, int first) const {
    constexpr int kStepRows = 32 / kRowVectors;
    const T* const query = static_cast<const T*>(params.query) + lane % kRowVectors * 8;
#pragma unroll 1
    for (int half = 0; half < 64; half += 32) {
      // Of one row for each lane, passed on to those that copy it.
      const int mine = first + half + lane;
      const int head_row = mine < rows.count ? static_cast<int>(rows.HeadRow(mine)) : -1;
#pragma unroll 4
      for (int step = 0; step < 32; step += kStepRows) {
        const int row = step + lane / kRowVectors;
        const int source = __shfl_sync(~0u, head_row, row);
        CopyAsync16(target + SwizzledOffset(kQueryColumnBytes, half + row, lane % kRowVectors),
                    query + (source >= 0 ? static_cast<int64_t>(source) * kDim : 0), source >= 0);
      }
    }
  }

  // ---- the warps that have K and V copied
  // A tile of keys: what lane i knows of box i.
  struct Box {
    int page;  // as the table has it; -1: not read
    int row;   // slot of the page where the box begins
    bool cut;  // some of its rows are seen by a row of the block, and some are not
  };

  template <bool kValues>
  __device__ void CopyTiles() const {
    const CUtensorMap& map = kValues ? tma.v_map : tma.k_map;
    TileState slot;
    std::conditional_t<kValues, ValueState, KeyState> place;
    uint32_t single_phase = 0;
    for (;; slot.Advance()) {
      WaitBarrier(Full(slot), slot.phase);
      int left = At(slot).tiles;
      if (left == 0) break;
      int tile = At(slot).last_tile;
      Box next = LookUp(slot, tile);
      for (; left > 0; --left, --tile) {
        const Box box = next;
        // The next page numbers arrive while this tile's copies are under way; nothing may look at them before.
        if (left > 1) next = LookUp(slot, tile - 1);
        WaitBarrier(Empty(place), place.phase ^ 1);
        const uint32_t target = shared_address + (kValues ? kValueStart : kKeyStart) + place.stage * kTileBytes;
        if (kValues && __any_sync(~0u, box.cut)) {
          StartTile(map, target, Single(), slot, box);
          WaitBarrier(Single(), single_phase);
          single_phase ^= 1;
          ClearUnseen(target, slot, tile);
          Release(Full(place));
        } else {
          StartTile(map, target, Full(place), slot, box);
        }
        place.Advance();
      }
      Release(Empty(slot));
    }
  }

  // The rows [*begin, *end) of a tile of keys are seen by some row of the block.
  __device__ void SeenRows(TileState slot, int tile, int* begin, int* end) const {
    *begin = max(At(slot).rows.key_begin - tile * kKeys, 0);
    *end = min(At(slot).rows.key_end - tile * kKeys, kKeys);
  }

  __device__ Box LookUp(TileState slot, int tile) const {
    int begin, end;
    SeenRows(slot, tile, &begin, &end);
    const int row = lane * tma.box_rows;
    const int row_end = row + tma.box_rows;
    const unsigned position = static_cast<unsigned>(tile) * kKeys + row;
    const unsigned index = tma.page.Divide(position);
    int page = -1;
    if (row < end && row_end > begin) {
      page = __ldg(params.block_tables + At(slot).rows.seq * params.pages_per_seq + index);
    }
    const bool cut = (begin > row && begin < row_end) || (end > row && end < row_end);
    return {page, static_cast<int>(position - index * tma.page.divisor), cut};
  }

  // Starts the copies of a tile to `target`. Boxes that are not read, and wrong pages, lie invalid_page the tensor:
  // they become zeros.
  __device__ void StartTile(const CUtensorMap& map, uint32_t target, uint32_t barrier, TileState slot,
                            const Box& box) const {
    const int slab = At(slot).rows.kv_head * tma.head_atoms;
    const int page = box.page < params.num_pages ? box.page : -1;
    const int box_bytes = tma.box_rows * (kDim * 2);
    if (ElectOne()) ArriveExpectTx(barrier, kTileBytes);
    __syncwarp();
    constexpr int kBatch = 4;  // boxes, whose pages are passed on together
    for (int first = 0, offset = 0; offset < kTileBytes; first += kBatch, offset += kBatch * box_bytes) {
      int pages[kBatch], groups[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        pages[i] = __shfl_sync(~0u, page, first + i);
        groups[i] = __shfl_sync(~0u, box.row, first + i) / 8;
      }
      if (ElectOne()) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (offset + i * box_bytes < kTileBytes) {
            TmaLoadCacheBox(target + offset + i * box_bytes, map, barrier, slab, groups[i], pages[i]);
          }
        }
      }
      __syncwarp();
    }
  }

  // A probability of zero keeps out any value but infinity and NaN, which unused slots may hold: rows of V that no row
  // of the block sees become zeros. Those in boxes of their own are not read; the others are overwritten here.
  __device__ void ClearUnseen(uint32_t target, TileState slot, int tile) const {
    int begin, end;
    SeenRows(slot, tile, &begin, &end);
    const int box_rows = tma.box_rows;
    ClearRows(target, begin / box_rows * box_rows, begin);
    ClearRows(target, end, (end + box_rows - 1) / box_rows * box_rows);
    FenceProxyAsync();
  }

  __device__ void ClearRows(uint32_t tile, int begin, int end) const {
    for (int i = begin * 8 + lane; i < end * 8; i += 32) {
#pragma unroll
      for (int slab = 0; slab < kAtomsPerRow; ++slab) {
        const uint32_t chunk = tile + i / 64 * kAtomRowBytes + slab * 1024 + i % 64 * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(chunk), "r"(0) : "memory");
      }
    }
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_PRODUCER_CUH_
