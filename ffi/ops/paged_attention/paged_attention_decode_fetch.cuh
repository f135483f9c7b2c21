// How a warp of the decode kernel gets its keys and values: look-ups of pages, and loads straight into registers.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_FETCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_FETCH_CUH_

#include <cstdint>

#include "ffi/device/stream_load.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"

namespace xla_gpu::decode {

// What a warp needs to know of the unit at hand. What is seldom needed is left in shared memory, for want of registers.
struct UnitView {
  const char* keys;  // of the kv head, at this lane's first columns
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

  // The tile's first key is `left` keys before unit.end_key, or past it.
  __device__ void Start(const DecodeArgs& args, const UnitView& unit, int left, int keys) {
    key = unit.end_key - 1 - max(left - 1 - static_cast<int>(threadIdx.x) % keys, 0);
    index = args.PageOf(key);
    page = __ldg(unit.pages + index);
  }

  // The place in the cache, counted in slots. `bad` is set for a page that is not in it, and the first one taken.
  __device__ uint32_t Slot(const DecodeArgs& args, bool* bad) const {
    const bool in_cache = static_cast<unsigned>(page) < args.num_pages;
    *bad = *bad || !in_cache;
    const unsigned pages = (in_cache ? page : 0) - index;
    return static_cast<unsigned>(key) + pages * args.page_size;
  }
};

// Where this lane's columns stand in a row of the cache, in bytes from its first. Chunks that may lie past head_dim are
// fetched from the row's beginning if they do.
template <typename S>
struct Columns {
  static constexpr int kKeyTail = S::kKeyChunks - S::kFixedKeyChunks;
  int key[kKeyTail];       // from lane % 4 * 16
  int key_high[kKeyTail];  // its second half, where halves are fetched apart
  int value;               // from lane / 4 * kValueBytes
  int value_high;

  __device__ explicit Columns(const DecodeArgs& args) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int bytes = static_cast<int>(args.params.head_dim) * S::kElementBytes;
    const int key_at = lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < kKeyTail; ++i) {
      const int at = S::kFixedBytes + 64 * i;
      key[i] = key_at + at < bytes ? at : -key_at;
      key_high[i] = key_at + at + 8 < bytes ? at + 8 : -key_at;
    }
    constexpr int kLast = S::kFixedValueChunks * 8 * S::kValueBytes;
    const int value_at = lane / 4 * S::kValueBytes;
    value = value_at + kLast < bytes ? kLast : -value_at;
    value_high = value_at + kLast + 8 < bytes ? kLast + 8 : -value_at;
  }
};

// True iff 8 bytes of this lane's keys, `at` bytes from its first column, lie past head_dim.
template <typename S>
__device__ inline bool PastHeadDim(const DecodeArgs& args, int at) {
  return static_cast<int>(threadIdx.x) % 4 * 16 + at >= static_cast<int>(args.params.head_dim) * S::kElementBytes;
}

// The keys and values of a tile, in flight or at hand.
template <typename S>
struct KeyTile {
  uint4 at[S::kKeyTiles * 2][S::kKeyChunks];  // of keys g and g + 8 of each matrix tile (g = lane / 4)

  __device__ void Load(const DecodeArgs& args, const char* keys, uint32_t slot, const Columns<S>& columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < S::kKeyTiles * 2; ++i) {
      const char* const key =
          keys + static_cast<uint64_t>(__shfl_sync(0xffffffffu, slot, i * 8 + lane / 4)) * args.slot_bytes;
#pragma unroll
      for (int j = 0; j < S::kKeyChunks; ++j) {
        const char* const from = key + (j < S::kFixedKeyChunks ? 64 * j : columns.key[j - S::kFixedKeyChunks]);
        if constexpr (S::kNarrow) {
          const uint2 low = LoadStream8(args.stream_policy, from);
          const uint2 high =
              LoadStream8(args.stream_policy,
                          key + (j < S::kFixedKeyChunks ? 64 * j + 8 : columns.key_high[j - S::kFixedKeyChunks]));
          at[i][j] = {low.x, low.y, high.x, high.y};
        } else {
          at[i][j] = LoadStream16(args.stream_policy, from);
        }
      }
    }
  }
};

template <typename S>
struct ValueTile {
  static constexpr int kVectors = S::kValueChunks;
  uint4 at[S::kKeyTiles * 4][kVectors];  // of keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each matrix tile (t = lane % 4)

  __device__ void Load(const DecodeArgs& args, const char* values, uint32_t slot, const Columns<S>& columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < S::kKeyTiles * 4; ++i) {
      const int key = i / 4 * 16 + i % 2 + i / 2 % 2 * 8 + lane % 4 * 2;
      const char* const value = values + static_cast<uint64_t>(__shfl_sync(0xffffffffu, slot, key)) * args.slot_bytes;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const char* const from = value + (j < S::kFixedValueChunks ? 128 * j : columns.value);
        if constexpr (S::kValueBytes == 8) {
          const uint2 eight = LoadStream8(args.stream_policy, from);
          at[i][j] = {eight.x, eight.y, 0, 0};
        } else if constexpr (S::kNarrow) {
          const uint2 low = LoadStream8(args.stream_policy, from);
          const uint2 high =
              LoadStream8(args.stream_policy, value + (j < S::kFixedValueChunks ? 128 * j + 8 : columns.value_high));
          at[i][j] = {low.x, low.y, high.x, high.y};
        } else {
          at[i][j] = LoadStream16(args.stream_policy, from);
        }
      }
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_FETCH_CUH_
