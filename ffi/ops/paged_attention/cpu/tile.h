// A tile of attention on the host, and the versions of the function that computes it, one per ISA.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_CPU_TILE_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_CPU_TILE_H_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Some query rows of one sequence against a range of its keys, for some kv heads. All query heads of a kv head belong
// to the tile, so that K and V are read once for them. A row is one query of one head: row query * group + (head in
// group).
struct AttentionTile {
  const int32_t* pages;  // the sequence's row of block_tables
  int64_t token;         // the first query's row in `query`
  int64_t position;      // the first query's position in the sequence; negative where q_len > context_len
  int64_t num_queries;
  int64_t head_begin;  // kv heads
  int64_t head_end;
  int64_t key_begin;  // positions in the sequence; at least one query sees each of them
  int64_t key_end;
  const uint32_t* tree_mask;  // the first query's row of tree_mask; null: causal
  int64_t tree_words;
  int64_t first_new;    // with a tree_mask: the position of the sequence's new token 0
  int64_t keys_behind;  // keys behind its own that each query sees
  int64_t value_dim;    // elements of a value: at most head_dim
};

// The attention states of a tile's rows over the keys so far: out = acc / sum, lse = max + log(sum). Rows of a head lie
// together.
struct TileStates {
  float* acc;      // [heads of the tile, rows, AccStride(value_dim)]
  float* max_sum;  // [heads of the tile, rows, 2]; the largest score, then the sum of exp(score - largest)
};

// Keys that are scored at once.
inline constexpr int64_t kTileKeys = 64;
// With up to so many rows K and V are read straight from the cache; with more, transposing and packing them pays.
inline constexpr int64_t kMaxDirectRows = 8;

// Floats from one row of an accumulator to the next: a whole number of the widest vectors.
static inline int64_t AccStride(int64_t dim) { return (dim + 15) / 16 * 16; }

// Floats of working memory, 64-byte aligned, that a tile of so many heads and rows needs.
static inline int64_t TileWorkspaceFloats(int64_t heads, int64_t rows, int64_t head_dim) {
  const int64_t stride = AccStride(head_dim);
  const int64_t rearranged = rows > kMaxDirectRows ? 2 * kTileKeys * stride : 0;
  return heads * rows * stride + rows * kTileKeys + rearranged;
}

// Writes `state` from scratch. The bits of a row depend on its query, the key range and num_queries * group alone.
using AttendTileFunction = void(const PagedAttentionParams& params, const AttentionTile& tile, const TileStates& state,
                                float* workspace);

namespace simd_baseline {
AttendTileFunction AttendTile;
}
namespace simd_avx2 {
AttendTileFunction AttendTile;
}
namespace simd_avx512 {
AttendTileFunction AttendTile;
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_CPU_TILE_H_
