// The producer warps of the TMA prefill kernel (sm90_tma.cuh) that load: one each for K, V and Q.
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

// The page number of the first box of a lane, read before the work tile is known for certain.
struct EarlyPage {
  const int32_t* entry = nullptr;  // of the block table; null: not read
  int32_t page = -1;
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

  // early: of the first work tile's first key tile, probably.
  __device__ void Run(EarlyPage early) const {
    const CUtensorMap& map = kIsValues ? cta.params.v_map : cta.params.k_map;
    TileState work;
    State state;
    uint32_t unmasked_phase = 0;
    Box next;                // of the next key tile
    bool looked_up = false;  // `next` is of the next work tile
    for (;; work.Advance()) {
      cta.tiles.WaitFull(work);
      int left = cta.Tile(work).key_tiles;
      if (left == 0) break;
      int tile = cta.Tile(work).last_key_tile;
      if (!Traits::kAlternates || !looked_up) {
        if constexpr (Traits::kLooksUpEarly) {
          next = LookUp(work, tile, early);
          early.entry = nullptr;
          early.page = -1;
        } else {
          next = LookUp(work, tile);
        }
      }
      looked_up = false;
      const uint64_t l2_policy = L2Policy(work);
      for (; left > 0; --left, --tile) {
        const Box box = next;
        // The next page numbers arrive while this tile's loads are started; nothing may read them before.
        if (left > 1) {
          next = LookUp(work, tile - 1);
        } else if constexpr (Traits::kAlternates) {
          TileState following = work;
          following.Advance();
          looked_up = __all_sync(~0u, cta.tiles.IsFull(following)) && cta.Tile(following).key_tiles > 0;
          if (looked_up) next = LookUp(following, cta.Tile(following).last_key_tile);
        }
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

  // Where the page number of this lane's box of a key tile is; null if it is not read.
  __device__ const int32_t* Entry(TileState work, int tile) const {
    int begin, end;
    SeenRows(work, tile, &begin, &end);
    const int row = cta.lane * cta.params.box_slots;
    if (row >= end || row + cta.params.box_slots <= begin) return nullptr;
    const unsigned index = cta.params.page.Divide(static_cast<unsigned>(tile) * kTileKeys + row);
    return cta.attention.block_tables + cta.Tile(work).rows.seq * cta.attention.pages_per_seq + index;
  }

 protected:
  // Some row of the work tile sees the rows [*begin, *end) of a key tile.
  __device__ void SeenRows(TileState work, int tile, int* begin, int* end) const {
    *begin = max(cta.Tile(work).rows.key_begin - tile * kTileKeys, 0);
    *end = min(cta.Tile(work).rows.key_end - tile * kTileKeys, kTileKeys);
  }

  // The same as below where `early` may have been read.
  __device__ Box LookUp(TileState work, int tile, const EarlyPage& early) const {
    int begin, end;
    SeenRows(work, tile, &begin, &end);
    const int row = cta.lane * cta.params.box_slots;
    const int row_end = row + cta.params.box_slots;
    const unsigned position = static_cast<unsigned>(tile) * kTileKeys + row;
    const unsigned slot = position - cta.params.page.Divide(position) * cta.params.page.divisor;
    const bool partial = (begin > row && begin < row_end) || (end > row && end < row_end);
    const int32_t* const entry = Entry(work, tile);
    int page = early.page;
    if (entry != early.entry) page = entry == nullptr ? -1 : __ldg(entry);
    return {page, static_cast<int>(slot), partial};
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
    for (int warpgroup = 0; warpgroup < Traits::kRowWarpgroups; ++warpgroup) {
      const uint32_t full = cta.query.Full(state, warpgroup);
      const int first = warpgroup * 64;
      cta.query.WaitEmpty(state, warpgroup);
      if (Traits::kAlternates && first > 0 && rows.count <= first) {  // nothing reads this part
        ArriveBarrier(full);
        continue;
      }
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
