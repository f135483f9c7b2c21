// How a host call of paged_attention is cut into tiles.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_CPU_PLAN_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_CPU_PLAN_H_

#include <cstdint>
#include <vector>

#include "ffi/ops/paged_attention/cpu/tile.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Consecutive queries of one sequence, for the same kv heads and all keys that they see. Its keys may be cut into
// chunks; whoever finishes the last of them merges all, in the order of the keys.
struct AttentionBlock {
  AttentionTile tile;
  int64_t chunk_keys;
  int64_t num_chunks;   // at least 1
  int64_t first_state;  // where the states of its chunks begin, in rows; -1: one chunk, whose state lives on its thread
};

struct AttentionJob {
  int64_t block;
  int64_t chunk;
};

struct AttentionPlan {
  std::vector<AttentionBlock> blocks;
  std::vector<AttentionJob> jobs;  // longest first
  int64_t state_rows = 0;          // of all blocks with several chunks
  int64_t max_tile_rows = 0;       // heads times rows, of blocks with one chunk
  int64_t workspace_floats = 0;    // of the most demanding tile
};

inline int64_t RowsOf(const PagedAttentionParams& params, const AttentionTile& tile) {
  return tile.num_queries * (params.num_heads / params.num_kv_heads);
}

// Where the keys of a sequence are cut depends on that sequence alone, so that its bits do too; how many heads share a
// tile, which changes no bit, also on the number of threads that want work. Expects checked metadata.
AttentionPlan PlanAttention(const PagedAttentionParams& params, int64_t num_threads);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_CPU_PLAN_H_
