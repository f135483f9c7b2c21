// The producer warps of the TMA prefill kernel (sm90_tma.cuh) that load K and V of pages that are no multiple of 8
// slots: by cp.async, key by key, to where TMA would put them.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ANY_PAGES_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ANY_PAGES_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_producer.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

// The copies of a warp: the keys [kBegin, kEnd) of each key tile.
template <typename Traits, int kBegin, int kEnd>
struct KeyCopies {
  static constexpr int kKeys = kEnd - kBegin;
  using TileState = typename Traits::TileState;
  static constexpr int kLookUps = (kKeys + 31) / 32;                 // of a lane for a key tile
  static constexpr unsigned kRowVectors = Traits::kHeadDim / 8;      // 16-byte vectors of a row
  static constexpr unsigned kBatch = 4;                              // copies of a lane whose slots it reads together
  static constexpr unsigned kBatchRows = kBatch * 32 / kRowVectors;  // that the warp copies with them
  static constexpr unsigned kBatches = kKeys / kBatchRows;
  static_assert(kBegin % 8 == 0 && kKeys % kBatchRows == 0 && kRowVectors <= 32);
  // Where the slots of these keys lie meanwhile, from the tile's beginning on: in rows of the last batch.
  static constexpr int kSlots = kEnd / 8 * Traits::kAtomRowBytes - 512;
  static_assert(kKeys * sizeof(uint32_t) <= 512 && kEnd % 8 == 0);
  static constexpr uint32_t kNoSlot = ~uint32_t{0};  // a cache has fewer than 2^32 slots: CheckSlotCounts

  // Of keys kBegin + lane, kBegin + lane + 32, ... of a key tile.
  struct Pages {
    int32_t numbers[kLookUps];  // as the block table has them; -1: not read
  };

  const TmaCta<Traits>& cta;

  // What CopyTile takes of K or V: the lane's vector of the kv head's slot 0.
  __device__ const char* Source(const void* cache, int kv_head) const {
    const char* source = HeadStart(cta.attention, cache, kv_head) + cta.lane % kRowVectors * 16;
    asm volatile("" : "+l"(source));  // else the compiler adds the cache's address again for each copy
    return source;
  }

  __device__ Pages LookUp(TileState work, int tile) const {
    const typename Traits::Rows& rows = cta.Tile(work).rows;
    const int32_t* const table = cta.attention.block_tables + rows.seq * cta.attention.pages_per_seq;
    const int begin = rows.key_begin, end = rows.key_end;
    Pages pages;
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int row = i * 32 + cta.lane;
      const int position = tile * Traits::kTileKeys + kBegin + row;
      const bool read = row < kKeys && position >= begin && position < end;
      pages.numbers[i] = read ? __ldg(table + cta.params.page.Divide(static_cast<unsigned>(position))) : -1;
    }
    return pages;
  }

  // Starts the copies of a key tile to `target`, an empty stage.
  __device__ void Copy(const char* source, const Pages& pages, int tile, uint32_t target) const {
    if (StoreSlots(pages, tile, target + kSlots)) {
      CopyKeys</*kWhole=*/true>(source, target);
    } else {
      CopyKeys</*kWhole=*/false>(source, target);
    }
  }

 private:
  // Writes the slots of the keys to `slots`, for all lanes. Returns whether all of them are read.
  __device__ bool StoreSlots(const Pages& pages, int tile, uint32_t slots) const {
    const auto num_pages = static_cast<unsigned>(min(cta.attention.num_pages, int64_t{1} << 31));
    const unsigned page_size = cta.params.page.divisor;
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int row = i * 32 + cta.lane;
      const auto position = static_cast<unsigned>(tile * Traits::kTileKeys + kBegin + row);
      const auto page = static_cast<unsigned>(pages.numbers[i]);
      const bool read = page < num_pages;  // negative numbers are 2^31 and above
      const uint32_t slot = position + (page - cta.params.page.Divide(position)) * page_size;
      if (row < kKeys) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(slots + row * 4), "r"(read ? slot : kNoSlot) : "memory");
        all = all && read;
      }
    }
    __syncwarp();
    return __all_sync(~0u, all);
  }

  // Keys that are not read become zeros: unused slots may hold infinity or NaN, which a probability of zero does not
  // mask.
  template <bool kWhole>
  __device__ void CopyKeys(const char* source, uint32_t target) const {
    const auto slot_bytes = static_cast<uint32_t>(cta.attention.slot_stride * 2);
    const unsigned vec = cta.lane % kRowVectors;
    const unsigned first = cta.lane / kRowVectors * kBatch;  // this lane's first row of a batch
    const uint32_t slots = target + kSlots + first * 4;
    const uint32_t row = target + kBegin / 8 * Traits::kAtomRowBytes + first / 8 * Traits::kAtomRowBytes +
                         vec / 8 * Traits::kAtomBytes + first % 8 * 128 + ((vec ^ first) & 7) * 16;
    uint4 next = LoadSlots(slots);
#pragma unroll(kWhole ? 2 : 1)
    for (unsigned batch = 0; batch < kBatches; ++batch) {
      const uint32_t now[kBatch] = {next.x, next.y, next.z, next.w};
      if (batch + 1 < kBatches) next = LoadSlots(slots + (batch + 1) * kBatchRows * 4);
      if (batch + 1 == kBatches) __syncwarp();  // all lanes have read the slots that these copies overwrite
      // The swizzle depends on the row's lowest three bits, of which `first`, `further` and i have none in common.
      const unsigned further = batch * kBatchRows;
      const uint32_t there = (row ^ (further % 8 * 16)) + further / 8 * Traits::kAtomRowBytes + further % 8 * 128;
      const char* sources[kBatch];
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        const uint32_t slot = kWhole || now[i] != kNoSlot ? now[i] : 0;
        asm volatile("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sources[i]) : "r"(slot), "r"(slot_bytes), "l"(source));
      }
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        CopyAsync16((there ^ (i * 16)) + i * 128, sources[i], kWhole || now[i] != kNoSlot);
      }
    }
  }

  static __device__ uint4 LoadSlots(uint32_t address) {
    uint4 slots;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(slots.x), "=r"(slots.y), "=r"(slots.z), "=r"(slots.w)
                 : "r"(address)
                 : "memory");
    return slots;
  }
};

// The warp that copies K or V, or most of it: see CpAsyncQueryWarp.
template <typename Traits, bool kIsValues>
struct CpAsyncKvWarp {
  using TileState = typename Traits::TileState;
  using State = std::conditional_t<kIsValues, typename Traits::ValueState, typename Traits::KeyState>;
  using Copies = KeyCopies<Traits, 0, Traits::kKvWarpKeys>;

  const TmaCta<Traits>& cta;

  __device__ void Run() const {
    const Copies copies{cta};
    TileState work;
    State state;
    typename Copies::Pages next;  // of the next key tile
    bool looked_up = false;       // `next` is of the next work tile
    for (;; work.Advance()) {
      cta.tiles.WaitFull(work);
      int left = cta.Tile(work).key_tiles;
      if (left == 0) break;
      int tile = cta.Tile(work).last_key_tile;
      if (!Traits::kAlternates || !looked_up) next = copies.LookUp(work, tile);
      looked_up = false;
      const void* const cache = kIsValues ? cta.attention.v_cache : cta.attention.k_cache;
      const char* const source = copies.Source(cache, cta.Tile(work).rows.kv_head);
      for (; left > 0; --left, --tile) {
        const typename Copies::Pages now = next;
        // The next page numbers arrive while this tile's copies are started; nothing may read them before.
        if (left > 1) {
          next = copies.LookUp(work, tile - 1);
        } else if constexpr (Traits::kAlternates) {
          TileState following = work;
          following.Advance();
          looked_up = __all_sync(~0u, cta.tiles.IsFull(following)) && cta.Tile(following).key_tiles > 0;
          if (looked_up) next = copies.LookUp(following, cta.Tile(following).last_key_tile);
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
        copies.Copy(source, now, tile, target);
        ArriveOnCpAsync(full);
        state.Advance();
      }
      cta.Arrive(cta.tiles.Empty(work));
    }
    // A thread must not exit before its copies have completed.
    CommitAsync();
    WaitAsync<0>();
  }
};

// The warp that loads Q, and the last keys of K and V where it has the time: the other two take longer than the
// products with a small work tile. With one stage of Q it would wait for the end of the work tile before.
template <typename Traits>
struct CpAsyncQueryWarp {
  using TileState = typename Traits::TileState;
  using Copies = KeyCopies<Traits, Traits::kKvWarpKeys, Traits::kTileKeys>;
  using Pages = typename Copies::Pages;

  const TmaCta<Traits>& cta;

  __device__ void Run() const {
    const Copies copies{cta};
    const TmaQueryWarp<Traits> query{cta};
    TileState work;
    typename Traits::QueryState query_state;
    typename Traits::KeyState key;
    typename Traits::ValueState value;
    for (;; work.Advance(), query_state.Advance()) {
      cta.tiles.WaitFull(work);
      const int tiles = cta.Tile(work).key_tiles;
      if (tiles == 0) break;
      const int last = cta.Tile(work).last_key_tile;
      Pages next = copies.LookUp(work, last), before = next;
      query.Load(work, query_state);
      const int kv_head = cta.Tile(work).rows.kv_head;
      // K of a tile, then V of the one before: the order in which they are used.
#pragma unroll 1
      for (int i = 0; i <= tiles; ++i) {
        const Pages now = next;
        if (i + 1 < tiles) next = copies.LookUp(work, last - i - 1);
        if (i < tiles) {
          cta.keys.WaitEmpty(key);
          copies.Copy(copies.Source(cta.attention.k_cache, kv_head), now, last - i, cta.Keys(key.stage));
          ArriveOnCpAsync(cta.keys.Full(key));
          key.Advance();
        }
        if (i > 0) {
          cta.values.WaitEmpty(value);
          copies.Copy(copies.Source(cta.attention.v_cache, kv_head), before, last - i + 1, cta.Values(value.stage));
          ArriveOnCpAsync(cta.values.Full(value));
          value.Advance();
        }
        before = now;
      }
      cta.Arrive(cta.tiles.Empty(work));
    }
    query.Finish();
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ANY_PAGES_CUH_
