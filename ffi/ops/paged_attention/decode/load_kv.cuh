// How a warp of the decode kernel gets its keys and values: look-ups of pages, and copies into its ring.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_KV_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_KV_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/decode/traits.cuh"

namespace xla_gpu::decode {

// What a warp needs to know of the unit at hand. What is seldom needed is left in shared memory, for want of registers.
struct UnitView {
  const char* keys;  // of the kv head, at this lane's first column
  const char* values;
  const int32_t* pages;    // the sequence's row of block_tables
  const PlanEntry* entry;  // in shared memory
  int row_tile;
  int end_key;        // of those that are computed
  int hidden_by_end;  // keys before it that some query row does not see, negative
};

// Looks a tile's keys up: lane i the i-th, or the last one that there is. Hidden keys are not to be read, so that their
// place is taken by a visible one. Keys are counted from the end: sums of positions may pass 2^31.
struct Lookup {
  int page;
  int index;  // of the page in the sequence
  int key;

  // pages: the sequence's row of block_tables. The tile's first key is `left` keys before `end_key`, or past it.
  __device__ void Start(const DecodeArgs& args, const int32_t* pages, int end_key, int left, int keys) {
    key = end_key - 1 - max(left - 1 - static_cast<int>(threadIdx.x % keys), 0);
    index = args.PageOf(key);
    page = __ldg(pages + index);
  }

  // The place in the cache, counted in slots. `bad` is set for a page that is not in it, and the first one taken.
  __device__ uint32_t Slot(const DecodeArgs& args, bool* bad) const {
    const bool in_cache = static_cast<unsigned>(page) < args.num_pages;
    *bad = *bad || !in_cache;
    const unsigned pages = (in_cache ? page : 0) - index;
    return static_cast<unsigned>(key) + pages * args.page_size;
  }
};

// What a lane copies of a row: 16 bytes. Columns past head_dim become zeros: there the query has zeros too, but 0 * inf
// is not 0.
template <typename S>
struct LaneCopy {
  int column;   // in bytes; of what is not read another one that is there
  int bytes;    // 16, or 0 past head_dim; kNarrow: 8 too
  uint32_t to;  // from a tile's place on
  int row;      // of those that are copied at a time
  bool idle;    // has no part of a row

  __device__ LaneCopy(const DecodeArgs& args, const Thread& thread) {
    const int chunk = thread.lane % S::kRowLanes;
    row = thread.lane / S::kRowLanes;
    idle = chunk >= S::kRowChunks;
    const int left = static_cast<int>(args.params.head_dim) * S::kElementBytes - chunk * 16;
    bytes = min(max(left, 0), 16);
    column = bytes > 0 ? chunk * 16 : 0;
    to = row * S::kRowBytes + (chunk ^ S::Swizzle(row)) * 16;
  }

  // Starts the copy of a tile's rows: keys to `tile`, values `values_at` behind it. Lane i knows the slot of key i.
  __device__ void Start(const DecodeArgs& args, const UnitView& unit, uint32_t slot, uint32_t tile,
                        uint32_t values_at) const {
#pragma unroll
    for (int i = 0; i < S::kTileKeys / S::kCopyRows; ++i) {
      const uint64_t of_row = __shfl_sync(0xffffffffu, slot, i * S::kCopyRows + row);
      const char* const key = unit.keys + of_row * args.slot_bytes;
      const char* const value = unit.values + of_row * args.slot_bytes;
      const uint32_t at = ((tile + to) ^ (S::Swizzle(i * S::kCopyRows) * 16)) + i * S::kCopyRows * S::kRowBytes;
      if (idle) continue;  // but it shows its slots
      if constexpr (S::kNarrow) {
        CopyAsync8(at, key, bytes > 0);
        CopyAsync8(at + 8, key + (bytes > 8 ? 8 : 0), bytes > 8);
        CopyAsync8(at + values_at, value, bytes > 0);
        CopyAsync8(at + values_at + 8, value + (bytes > 8 ? 8 : 0), bytes > 8);
      } else {
        CopyAsync16(at, key, bytes > 0, args.stream_policy);
        CopyAsync16(at + values_at, value, bytes > 0, args.stream_policy);
      }
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_KV_CUH_
