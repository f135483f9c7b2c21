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

// The copies of a warp: K or V of a key tile.
template <typename Traits>
struct KeyCopies {
  static constexpr int kKeys = Traits::kTileKeys;
  using TileState = typename Traits::TileState;
  static constexpr int kLookUps = (kKeys + 31) / 32;       // of a lane for a key tile
  static constexpr unsigned kBatch = 4;                    // rows of a lane whose slots it reads together
  static constexpr unsigned kBatchRows = kBatch * 32 / 8;  // that the warp copies with them, eight lanes each
  static constexpr unsigned kBatches = kKeys / kBatchRows;
  static_assert(kKeys % kBatchRows == 0);
  // Where the slots of these keys lie meanwhile: in rows of the last batch.
  static constexpr int kSlotsBytes = 512;
  static constexpr int kSlots = Traits::kTileBytes - kSlotsBytes;
  static_assert(kKeys * sizeof(uint32_t) <= kSlotsBytes);
  static constexpr uint32_t kNoSlot = ~uint32_t{0};  // a cache has fewer than 2^32 slots: CheckSlotCounts

  // Of keys lane, lane + 32, ... of a key tile.
  struct Pages {
    int32_t numbers[kLookUps];  // as the block table has them; -1: not read
  };

  const TmaCta<Traits>& cta;

  // What CopyTile takes of K or V: the lane's first vector of the kv head's slot 0.
  __device__ const char* Source(const void* cache, int kv_head) const {
    const char* source = HeadStart(cta.attention, cache, kv_head) + cta.lane % 8 * 16;
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
      const int position = tile * kKeys + row;
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
      const auto position = static_cast<unsigned>(tile * kKeys + row);
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
    const unsigned vec = cta.lane % 8;
    const unsigned first = cta.lane / 8 * kBatch;  // this lane's first row of a batch
    const uint32_t slots = target + kSlots + first * 4;
    const uint32_t row = target + first / 8 * Traits::kAtomRowBytes + first % 8 * 128 + ((vec ^ first) & 7) * 16;
    uint4 next = LoadSlots(slots);
#pragma unroll(kWhole ? 2 : 1)
    for (unsigned batch = 0; batch < kBatches; ++batch) {
      const uint32_t now[kBatch] = {next.x, next.y, next.z, next.w};
      if (batch + 1 < kBatches) next = LoadSlots(slots + (batch + 1) * kBatchRows * 4);
      if (batch + 1 == kBatches) __syncwarp();  // all lanes have read the slots that these copies overwrite
      const uint32_t there = row + batch * (kBatchRows / 8 * Traits::kAtomRowBytes);
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        const bool read = kWhole || now[i] != kNoSlot;
        const char* from;
        asm volatile("mad.wide.u32 %0, %1, %2, %3;"
                     : "=l"(from)
                     : "r"(read ? now[i] : 0), "r"(slot_bytes), "l"(source));
        // The swizzle depends on the row's lowest three bits: those of `first` and of i, which have none in common.
        const uint32_t to = (there ^ (i * 16)) + i * 128;
#pragma unroll
        for (int atom = 0; atom < Traits::kRowAtoms; ++atom) {
          CopyAsync16(to + atom * Traits::kAtomBytes, from + atom * 128, read);
        }
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

// The warp that copies K or V.
template <typename Traits, bool kIsValues>
struct CpAsyncKvWarp {
  using TileState = typename Traits::TileState;
  using State = std::conditional_t<kIsValues, typename Traits::ValueState, typename Traits::KeyState>;
  using Copies = KeyCopies<Traits>;

  const TmaCta<Traits>& cta;

  __device__ void Run(EarlyPage /*early*/) const {
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

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ANY_PAGES_CUH_
