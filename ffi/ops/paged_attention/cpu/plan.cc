#include "ffi/ops/paged_attention/cpu/plan.h"

#include <algorithm>

namespace xla_gpu {
namespace {

// Rows that share a rearranged tile of K and V: enough to pay for the rearranging, and their accumulators stay in the
// second-level cache.
constexpr int64_t kBlockRows = 64;
// Rows, over all heads of a tile, whose accumulators stay in the first-level cache while K and V stream by.
constexpr int64_t kStreamingRows = 32;
// Work tiles per thread, so that their different lengths even out.
constexpr int64_t kWorkTilesPerThread = 4;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Keys of one KV split. Partial results stay small beside the bytes of K and V that they come from.
int64_t SplitKeys(int64_t rows) { return std::max<int64_t>(256, CeilDiv(rows * 32, kTileKeys) * kTileKeys); }

// Adds the blocks of sequence `s`, each for all kv heads; the caller divides those.
void AddSequence(const PagedAttentionCall& params, int64_t s, std::vector<AttentionBlock>* blocks) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t queries_per_block = std::max<int64_t>(1, kBlockRows / group);
  const int64_t first_token = params.query_start_loc[s];
  const int64_t num_queries = params.query_start_loc[s + 1] - first_token;
  const int64_t first_position = params.context_lens[s] - num_queries;
  for (int64_t query = 0; query < num_queries; query += queries_per_block) {
    AttentionBlock block{};
    AttentionTile& tile = block.tile;
    tile.pages = params.block_tables + s * params.pages_per_seq;
    tile.token = first_token + query;
    tile.position = first_position + query;
    tile.num_queries = std::min(queries_per_block, num_queries - query);
    tile.head_begin = 0;
    tile.head_end = params.num_kv_heads;
    tile.keys_behind = params.keys_behind;
    tile.value_dim = params.ValueDim();
    tile.key_end = std::max<int64_t>(0, tile.position + tile.num_queries);
    if (params.keys_behind > 0) {
      tile.key_end = std::min<int64_t>(tile.key_end + params.keys_behind, params.context_lens[s]);
    }
    if (params.tree_mask != nullptr) {
      tile.tree_mask = params.tree_mask + tile.token * params.tree_words;
      tile.tree_words = params.tree_words;
      tile.first_new = first_position;
      tile.key_end = params.context_lens[s];
    }
    if (params.sliding_window > 0) {
      tile.key_begin = std::clamp<int64_t>(tile.position + 1 - params.sliding_window, 0, tile.key_end);
    }
    const int64_t num_keys = tile.key_end - tile.key_begin;
    // With more queries than one block there is work for many threads already.
    const bool split = num_queries <= queries_per_block;
    block.split_keys = split ? SplitKeys(RowsOf(params, tile)) : std::max<int64_t>(1, num_keys);
    block.num_splits = std::max<int64_t>(1, CeilDiv(num_keys, block.split_keys));
    blocks->push_back(block);
  }
}

}  // namespace

AttentionPlan PlanAttention(const PagedAttentionCall& params, int64_t num_threads) {
  std::vector<AttentionBlock> all_heads;
  for (int64_t s = 0; s < params.num_seqs[0]; ++s) AddSequence(params, s, &all_heads);

  const auto heads_per_tile = [&params](const AttentionBlock& block) {
    return std::clamp<int64_t>(kStreamingRows / RowsOf(params, block.tile), 1, params.num_kv_heads);
  };
  int64_t coarse_work_tiles = 0;
  for (const AttentionBlock& block : all_heads) {
    coarse_work_tiles += block.num_splits * CeilDiv(params.num_kv_heads, heads_per_tile(block));
  }
  const int64_t finer =
      std::max<int64_t>(1, CeilDiv(num_threads * kWorkTilesPerThread, std::max<int64_t>(1, coarse_work_tiles)));

  AttentionPlan plan;
  for (const AttentionBlock& block : all_heads) {
    const int64_t rows = RowsOf(params, block.tile);
    const int64_t heads = num_threads > 1 ? CeilDiv(heads_per_tile(block), finer) : heads_per_tile(block);
    for (int64_t head = 0; head < params.num_kv_heads; head += heads) {
      AttentionBlock part = block;
      part.tile.head_begin = head;
      part.tile.head_end = std::min(head + heads, params.num_kv_heads);
      const int64_t part_heads = part.tile.head_end - head;
      const int64_t tile_rows = part_heads * rows;
      part.first_state = -1;
      if (part.num_splits > 1) {
        part.first_state = plan.state_rows;
        plan.state_rows += part.num_splits * tile_rows;
      } else {
        plan.max_tile_rows = std::max(plan.max_tile_rows, tile_rows);
      }
      plan.workspace_floats = std::max(plan.workspace_floats, TileWorkspaceFloats(part_heads, rows, params.head_dim));
      for (int64_t split = 0; split < part.num_splits; ++split) {
        plan.work_tiles.push_back({static_cast<int64_t>(plan.blocks.size()), split});
      }
      plan.blocks.push_back(part);
    }
  }

  const auto work = [&](const WorkTile& work_tile) {
    const AttentionTile& tile = plan.blocks[work_tile.block].tile;
    const int64_t keys = std::min(plan.blocks[work_tile.block].split_keys, tile.key_end - tile.key_begin);
    return (tile.head_end - tile.head_begin) * RowsOf(params, tile) * keys;
  };
  std::stable_sort(plan.work_tiles.begin(), plan.work_tiles.end(),
                   [&](const WorkTile& a, const WorkTile& b) { return work(a) > work(b); });
  return plan;
}

}  // namespace xla_gpu
