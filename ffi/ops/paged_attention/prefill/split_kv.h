// Few rows behind a long context: their keys are split into parts, which several blocks of the sm_90a prefill kernel
// sum up and a second kernel puts together. The parts follow from the sequence and from what is the same for all
// sequences of an operator, so that neighbours change no bits: where the scratch has no room for as many parts, one
// block sums them up one after the other and puts them together in the same way.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SPLIT_KV_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SPLIT_KV_H_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"

#ifdef __CUDACC__
#define XLA_GPU_HOST_DEVICE __host__ __device__
#else
#define XLA_GPU_HOST_DEVICE
#endif

namespace xla_gpu {

// Of a sequence's keys.
struct PrefillParts {
  int count;
  int tiles;  // of keys in a part; the last part may have fewer
};

// How sequences are split.
struct PrefillSplit {
  static constexpr int kMaxRows = 128;  // of a sequence, in tokens
  static constexpr int kMaxParts = 32;  // of a sequence
  static constexpr int kMinTiles = 16;  // of keys in a part
  static constexpr int kEnough = 128;   // parts of all kv heads and tiles of rows that are wanted

  // Keys of a tile.
  static constexpr int TileKeys(int64_t head_dim) { return head_dim == 64 ? 128 : head_dim == 128 ? 112 : 80; }

  bool on;        // whether there may be sequences that are split
  int max_apart;  // parts of a sequence that different blocks may sum up; 0: always one block
  int window;     // as the operator's, 0: none
  int group;
  int kv_heads;
  int keys;  // of a tile

  XLA_GPU_HOST_DEVICE PrefillParts Of(int q_len, int context_len) const {
    if (!on || q_len > kMaxRows || q_len <= kMaxDecodeRows || (window > 0 && window < context_len)) return {1, 0};
    const int tiles = (context_len + keys - 1) / keys;
    if (tiles < 2 * kMinTiles) return {1, 0};
    const int row_tiles = (q_len * group + 63) / 64;
    int count = kEnough / (row_tiles * kv_heads);
    if (count > kMaxParts) count = kMaxParts;
    if (count > tiles / kMinTiles) count = tiles / kMinTiles;
    if (count < 2) return {1, 0};
    const int part = (tiles + count - 1) / count;
    return {(tiles + part - 1) / part, part};
  }
  // The parts of a sequence that are tasks of their own.
  XLA_GPU_HOST_DEVICE int Apart(const PrefillParts& parts) const { return parts.count > max_apart ? 1 : parts.count; }
};

// Partial results in the scratch: rows of head_dim float32, and for each the largest score and the sum. Those of
// (part, row of out as [num_tokens * num_heads, head_dim]), then a row for each row of each block's tile.
struct PrefillScratch {
  static constexpr int64_t kBytesForParts = int64_t{64} << 20;
  static constexpr int64_t kMaxBlocks = 152;  // more are not launched
  static constexpr int64_t kMaxTileRows = 192;
  // For which one set of blocks is launched.
  static constexpr int64_t BlockSequences(int64_t head_dim) {
    return head_dim == 64 ? 1024 : head_dim == 128 ? 512 : 128;
  }

  bool splits;    // whether any sequence may be split
  int max_apart;  // see PrefillSplit
  int64_t rows;   // of a part
  int64_t all_rows;

  static PrefillScratch Of(const PagedAttentionParams& shapes) {
    PrefillScratch scratch{false, 0, shapes.num_tokens * shapes.num_heads, 0};
    const int64_t dim = shapes.head_dim;
    const bool splits =
        shapes.dtype != DType::kF32 && shapes.num_kv_heads > 0 && (dim == 64 || dim == 128 || dim == 256) &&
        shapes.page_size % 8 == 0 && shapes.num_tokens > kMaxDecodeRows &&
        shapes.num_kv_heads * 2 <= PrefillSplit::kEnough &&
        shapes.pages_per_seq * shapes.page_size > (2 * PrefillSplit::kMinTiles - 1) * PrefillSplit::TileKeys(dim);
    if (!splits) return scratch;
    scratch.splits = true;
    const int64_t wanted = std::min<int64_t>(PrefillSplit::kMaxParts, PrefillSplit::kEnough / shapes.num_kv_heads);
    // With tiles enough for all SMs parts would only cost the time to write them, and to put them together.
    const bool enough = scratch.rows >= PrefillSplit::kEnough * 64;
    const int64_t room = enough ? 0 : kBytesForParts / (scratch.rows * RowBytes(dim));
    scratch.max_apart = room < 2 ? 0 : static_cast<int>(std::min(wanted, room));
    scratch.all_rows = scratch.max_apart * scratch.rows;
    const int64_t sequences = BlockSequences(dim);
    if (scratch.max_apart < wanted) {
      scratch.all_rows +=
          kMaxBlocks * kMaxTileRows * std::max<int64_t>(1, (shapes.max_seqs + sequences - 1) / sequences);
    }
    return scratch;
  }
  static int64_t RowBytes(int64_t dim) { return (dim + 2) * int64_t{sizeof(float)}; }
  int64_t Bytes(int64_t dim) const { return all_rows * RowBytes(dim); }
};

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SPLIT_KV_H_
