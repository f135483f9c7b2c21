// How a host call of paged_attention is divided into work tiles.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_CPU_PLAN_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_CPU_PLAN_H_

#include <cstdint>
#include <vector>

#include "ffi/ops/paged_attention/cpu/tile.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Consecutive queries of one sequence, for the same kv heads and all keys that they see. The keys may be divided into
// KV splits; the thread that finishes the last of them combines all, in the order of the keys.
struct AttentionBlock {
  AttentionTile tile;
  int64_t split_keys;
  int64_t num_splits;   // at least 1
  int64_t first_state;  // where the states of its splits begin, in rows; -1: one split, whose state lives on its thread
};

// One KV split of a block.
struct WorkTile {
  int64_t block;
  int64_t split;
};

struct AttentionPlan {
  std::vector<AttentionBlock> blocks;
  std::vector<WorkTile> work_tiles;  // longest first
  int64_t state_rows = 0;            // of all blocks with several splits
  int64_t max_tile_rows = 0;         // heads times rows, of blocks with one split
  int64_t workspace_floats = 0;      // of the most demanding tile
};

inline int64_t RowsOf(const PagedAttentionParams& params, const AttentionTile& tile) {
  return tile.num_queries * (params.num_heads / params.num_kv_heads);
}

// The KV splits of a sequence depend on that sequence alone, so that the bits of its rows do. How many heads share a
// tile changes no bit, and depends on the number of threads too. Expects checked metadata.
AttentionPlan PlanAttention(const PagedAttentionCall& params, int64_t num_threads);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_CPU_PLAN_H_
