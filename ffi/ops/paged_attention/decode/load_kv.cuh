// How a warp of the split-KV kernel loads K and V: page table look-ups, and cp.async copies into its pipeline stages.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_KV_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_KV_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/decode/traits.cuh"

namespace xla_gpu::decode {

// What a warp needs to know of a work range. The rest stays in shared memory, since registers are short.
struct KvView {
  const char* k;  // cache slot 0 of the KV head, at this lane's first column
  const char* v;
  const int32_t* page_table;  // [pages_per_seq], the sequence's row of block_tables
  const SequencePlan* plan;   // in shared memory
  int row_tile;
  int end_key;      // of the work range
  int causal_tail;  // minus the number of keys before end_key that the causal mask hides from some query row
};

// Looks up the cache slots of a KV tile: lane i that of key i. Past the last key it takes the last one again, whose
// scores are masked, since hidden keys must not be read.
struct PageLookup {
  int page;
  int page_index;  // in the sequence
  int key;

  // keys_left: keys from the tile's first key to end_key; negative for a tile past the end. Keys are counted from the
  // end, since positions past it may exceed 2^31.
  __device__ void Start(const DecodeArgs& args, const int32_t* page_table, int end_key, int keys_left, int tile_keys) {
    key = end_key - 1 - max(keys_left - 1 - static_cast<int>(threadIdx.x % tile_keys), 0);
    page_index = args.PageOf(key);
    page = __ldg(page_table + page_index);
  }

  // The cache slot. A page outside the cache sets `bad`, and the first page is taken instead.
  __device__ uint32_t Slot(const DecodeArgs& args, bool* bad) const {
    const bool in_cache = static_cast<unsigned>(page) < args.num_pages;
    *bad = *bad || !in_cache;
    const unsigned pages = (in_cache ? page : 0) - page_index;
    return static_cast<unsigned>(key) + pages * args.page.divisor;
  }
};

// A lane's part of the copies of a KV tile: 16 bytes of each of its rows. Columns past head_dim become zeros in K and
// V. The query has zeros there too, but 0 * inf is not 0.
template <typename Traits>
struct TileCopy {
  int column;          // in bytes; past head_dim an existing one, of which nothing is read
  int bytes;           // 16, or 0 past head_dim; with kNarrowCopies also 8
  uint32_t to_offset;  // from the tile's first byte, for the first of the lane's rows
  int row;             // the first of the lane's rows
  bool idle;           // the lane has no part of a row

  __device__ TileCopy(const DecodeArgs& args, const Thread& thread) {
    const int vector = thread.lane % Traits::kCopyLanes;
    row = thread.lane / Traits::kCopyLanes;
    idle = vector >= Traits::kRowVectors;
    const int left = static_cast<int>(args.params.head_dim) * Traits::kElementBytes - vector * 16;
    bytes = min(max(left, 0), 16);
    column = bytes > 0 ? vector * 16 : 0;
    to_offset = row * Traits::kRowBytes + (vector ^ Traits::Swizzle(row)) * 16;
  }

  // Starts the copies of a tile: K to `k_tile`, V `v_offset` bytes behind it. Lane i has the cache slot of key i.
  __device__ void Start(const DecodeArgs& args, const KvView& kv, uint32_t slot, uint32_t k_tile,
                        uint32_t v_offset) const {
#pragma unroll
    for (int i = 0; i < Traits::kTileKeys / Traits::kCopyRows; ++i) {
      const uint64_t row_slot = __shfl_sync(0xffffffffu, slot, i * Traits::kCopyRows + row);
      const char* const k = kv.k + row_slot * args.slot_stride_bytes;
      const char* const v = kv.v + row_slot * args.slot_stride_bytes;
      const uint32_t to = ((k_tile + to_offset) ^ (Traits::Swizzle(i * Traits::kCopyRows) * 16)) +
                          i * Traits::kCopyRows * Traits::kRowBytes;
      if (idle) continue;  // after the shuffle, which needs all lanes
      if constexpr (Traits::kNarrowCopies) {
        CopyAsync8(to, k, bytes > 0);
        CopyAsync8(to + 8, k + (bytes > 8 ? 8 : 0), bytes > 8);
        CopyAsync8(to + v_offset, v, bytes > 0);
        CopyAsync8(to + v_offset + 8, v + (bytes > 8 ? 8 : 0), bytes > 8);
      } else {
        CopyAsync16(to, k, bytes > 0, args.kv_l2_policy);
        CopyAsync16(to + v_offset, v, bytes > 0, args.kv_l2_policy);
      }
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_KV_CUH_
