// Which instance of a prefill kernel a call takes, and with how many CTAs. From shapes alone, and the GPU's number of
// SMs: the same call always makes the same launches.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_HEURISTICS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_HEURISTICS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// CTAs of a single-tile kernel: one for each work tile that there can be, and one more for the padding rows. The grid
// is that large rather than as large as the GPU, since the hardware hands out CTAs as others end: the even load of a
// dynamic scheduler, without a counter in memory that must be reset.
inline int64_t SingleTileCtas(const PagedAttentionParams& shapes, int tile_rows) {
  const int64_t group = shapes.num_heads / shapes.num_kv_heads;
  const int64_t prompts = std::min(shapes.max_seqs, shapes.num_tokens / (shapes.max_decode_tokens + 1));
  // Only the last work tile of a prompt may be partly filled.
  const int64_t tiles = shapes.num_tokens * group / tile_rows + prompts;
  return tiles * shapes.num_kv_heads + 1;
}

// CTAs of the persistent kernel in x: as many as the GPU has SMs, or as there can be work tiles. Cross-CTA KV splits
// are as many work tiles more.
inline int64_t PersistentCtas(const PagedAttentionParams& shapes, const SplitAccumulatorLayout& layout, int tile_rows,
                              int64_t sms) {
  const int64_t ctas = std::min(sms, SplitAccumulatorLayout::kMaxCtas);
  return layout.pool_rows > 0 ? ctas : std::min(SingleTileCtas(shapes, tile_rows), ctas);
}

// In y: each row of the grid plans some of the sequences.
inline int64_t PersistentGridRows(const PagedAttentionParams& shapes) {
  const int64_t sequences = SplitAccumulatorLayout::SequencesPerGridRow(shapes.head_dim);
  return std::max<int64_t>(1, (shapes.max_seqs + sequences - 1) / sequences);
}

// CTAs of the combine kernel, whose warps take one row after the other.
inline int64_t CombineCtas(const PagedAttentionParams& shapes, int cta_warps, int64_t ctas_per_sm, int64_t sms) {
  return std::min((shapes.num_tokens * shapes.num_heads + cta_warps - 1) / cta_warps,
                  ctas_per_sm * std::min(sms, SplitAccumulatorLayout::kMaxCtas));
}

// What a work tile of the TMA kernel costs, in microseconds of an H200.
struct TmaTileCost {
  int rows;
  double fixed;         // of a work tile
  double per_key_tile;  // of SplitKvPolicy::TileKeys
};
inline constexpr TmaTileCost kTmaTileCosts[] = {{192, 4.8, 2.0}, {128, 3.5, 1.5}, {64, 2.5, 1.1}};  // at head_dim 128

// KV splits, with CTAs of their own, of each of `sequences` of so many tokens, whose contexts take all the room.
inline int CrossCtaSplits(const SplitKvPolicy& policy, int64_t sequences, int64_t tokens, int64_t context) {
  const auto clamped = [](int64_t x) { return static_cast<int>(std::min<int64_t>(x, 1 << 30)); };
  const int64_t tile_keys = policy.tile_keys.divisor;
  const auto tiles = static_cast<unsigned>(clamped((context + tile_keys - 1) / tile_keys));
  const auto count = static_cast<int>(policy.CountOf(clamped(tokens), clamped(context), tiles));
  return count < 2 || sequences * policy.RowsOf(count, clamped(tokens)) > policy.pool_rows ? 1 : count;
}

// Rows of a work tile of the TMA kernel at head_dim 128: 192, 128 or 64, of which an estimate takes the least time.
// Small work tiles, of which there are more, where large ones would leave SMs idle. All three give the same bits, so
// the shapes of a batch may decide.
inline int TmaTileRowsForFullTiles(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, int64_t sms) {
  constexpr double kTileKeys = SplitKvPolicy::TileKeys(128);
  constexpr double kEnough = 0.9;  // of the larger work tiles' time; for less, they read K and V less often
  const int64_t rows = shapes.num_tokens * (shapes.num_heads / shapes.num_kv_heads);
  const int64_t context = shapes.pages_per_seq * shapes.page_size;
  const int64_t sequences = std::max<int64_t>(shapes.max_seqs, 1);
  const int64_t tokens = std::min((shapes.num_tokens + sequences - 1) / sequences, context);
  // Of sequences of one length, or of a chunk beside decode rows.
  int splits = CrossCtaSplits(policy, sequences, tokens, context);
  if (splits == 1) splits = CrossCtaSplits(policy, 1, shapes.num_tokens - sequences + 1, context);
  const double longest = std::ceil(static_cast<double>(context) / kTileKeys / splits);
  const double average =
      std::ceil((static_cast<double>(context) - static_cast<double>(tokens) / 2) / kTileKeys / splits);
  // Where no sequence can have much more tokens than the average, each has a last work tile that is not full.
  const int64_t prompts = 2 * tokens >= context ? sequences : 1;
  const int64_t prompt_rows = (rows + prompts - 1) / prompts;
  int best = 0;
  double best_time = 0;
  for (const TmaTileCost& cost : kTmaTileCosts) {
    const int64_t tiles = prompts * ((prompt_rows + cost.rows - 1) / cost.rows) * shapes.num_kv_heads * splits;
    double rounds = static_cast<double>(tiles) / static_cast<double>(sms);
    // Work tiles of one length run in whole rounds. Shorter ones fill the gaps of several rounds.
    rounds = average > 0.75 * longest || rounds < 2 ? std::ceil(rounds) : rounds + 0.25;
    const double time =
        std::max(cost.fixed + longest * cost.per_key_tile, rounds * (cost.fixed + average * cost.per_key_tile));
    if (best == 0 || time < kEnough * best_time) {
      best = cost.rows;
      best_time = time;
    }
  }
  return best;
}

// The same, or where sequences have few tokens, 64 or 128 rows: a work tile that is not full takes as long as a full
// one. Of several tokens for each sequence, and a chunk of a prompt beside decode rows, the shapes do not tell. The
// first is bound by memory with either size; the second wants 64 rows as long as all work tiles are resident at once.
// NOTE: with more tokens the average says little. Chunks of prompts beside many decode sequences want large work tiles.
inline int TmaTileRowsDim128(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, int64_t sms) {
  if (shapes.max_seqs == 0 || !SuggestFewTokens(shapes)) return TmaTileRowsForFullTiles(shapes, policy, sms);
  const int64_t chunk = std::max<int64_t>(shapes.num_tokens - shapes.max_seqs + 1, 1);
  const int64_t rows = chunk * (shapes.num_heads / shapes.num_kv_heads);
  const int64_t small_tiles = (rows + 63) / 64 * shapes.num_kv_heads;
  const int splits = CrossCtaSplits(policy, /*sequences=*/1, chunk, shapes.pages_per_seq * shapes.page_size);
  return small_tiles * 2 <= sms || small_tiles * splits <= sms ? 64 : 128;
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_HEURISTICS_H_
