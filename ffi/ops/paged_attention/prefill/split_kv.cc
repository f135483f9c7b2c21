// Room for split accumulators: from shapes alone.
#include "ffi/ops/paged_attention/prefill/split_kv.h"

#include <algorithm>
#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/sequences.h"

namespace xla_gpu::prefill {

namespace {

// How sequences of so many tokens, behind a context of so many keys, are split wherever the prefill path computes them.
unsigned SplitsOfAlike(const PagedAttentionParams& shapes, int64_t tokens, int64_t context) {
  SplitKvPolicy policy{};
  policy.enabled = true;
  policy.window = static_cast<int>(shapes.sliding_window >> 31 != 0 ? 0 : shapes.sliding_window);
  policy.group = static_cast<int>(shapes.num_heads / shapes.num_kv_heads);
  policy.kv_heads = static_cast<int>(shapes.num_kv_heads);
  policy.large_tile_rows = SplitKvPolicy::LargeTileRows(shapes.head_dim);
  policy.one_tile_splits = SplitKvPolicy::SplitsFor(1, policy.kv_heads);
  policy.max_tokens = INT32_MAX;
  context = std::min<int64_t>(context, INT32_MAX);
  const int64_t tile_keys = SplitKvPolicy::TileKeys(shapes.head_dim);
  const auto key_tiles = static_cast<unsigned>((context + tile_keys - 1) / tile_keys);
  return policy.CountOf(static_cast<int>(tokens), static_cast<int>(context), key_tiles);
}

}  // namespace

int64_t AlikeSplitRows(const PagedAttentionParams& shapes) {
  using Policy = SplitKvPolicy;
  const Sequences sequences(shapes);
  if (!sequences.AlikeAndFewTokens() || shapes.num_kv_heads == 0 || !MaySplitKeys(shapes) || DecodeComesFirst(shapes)) {
    return 0;
  }
  // More rows than a small work tile has, in work tiles enough for all SMs: one CTA may as well take all splits.
  const int64_t rows = sequences.tokens * (shapes.num_heads / shapes.num_kv_heads);
  const int64_t tiles = sequences.count * ((rows + 127) / 128) * shapes.num_kv_heads;
  if (rows > Policy::kSmallTileRows && tiles >= Policy::kTargetWorkTiles) return 0;
  const unsigned splits = SplitsOfAlike(shapes, sequences.tokens, sequences.context);
  return splits < 2 ? 0 : sequences.count * splits * sequences.tokens * shapes.num_heads;
}

bool SuitsLongestFirst(const PagedAttentionCall& shapes) {
  constexpr int64_t kLongContext = 32768;
  const int64_t room_for_keys = shapes.pages_per_seq * shapes.page_size;
  const bool has_window = shapes.sliding_window > 0 && shapes.sliding_window < room_for_keys;
  return shapes.max_seqs > 1 && shapes.max_seqs <= kWarpPlannedSequences && shapes.tree_words == 0 &&
         SuitsTma(shapes.page_size) && !SuggestFewTokens(shapes) && !has_window && room_for_keys >= kLongContext;
}

bool WantsSplitAccumulators(const PagedAttentionCall& shapes) {
  using Policy = SplitKvPolicy;
  const int64_t dim = shapes.head_dim;
  // Where work tiles are enough for all SMs, or contexts are short and the shapes speak against few tokens of a
  // sequence, cross-CTA splits are not worth their writes and the combine kernel.
  const bool short_contexts =
      shapes.pages_per_seq * shapes.page_size <= (2 * Policy::kMinTilesPerSplit - 1) * Policy::TileKeys(dim);
  const bool few_tokens = shapes.tree_words > 0 || (shapes.num_tokens > shapes.max_seqs && SuggestFewTokens(shapes));
  // One token for each of a few sequences, and no room for a long one: the combine kernel would cost more than is
  // gained where there is a longer one after all. Not where contexts may be long: the new tokens of a conversation
  // come in such calls too, and one CTA of each kv head would read all that was said before.
  constexpr int64_t kFewSequences = 32, kMaxKeysOfOneCta = 8192;
  const int64_t few_sequences =
      shapes.pages_per_seq * shapes.page_size <= kMaxKeysOfOneCta ? kFewSequences : kMaxDecodeRows;
  const bool decode_alone =
      shapes.tree_words == 0 && shapes.num_tokens <= shapes.max_seqs && shapes.num_tokens <= few_sequences;
  // One sequence, or a chunk beside decode rows, is split where it has up to half as many work tiles as SMs; a few
  // sequences may be short of work tiles together. Elsewhere the combine kernel only keeps the decode path waiting.
  constexpr int64_t kFewChunks = 4;
  const bool several = shapes.max_seqs > 1 && shapes.max_seqs <= kFewChunks && shapes.num_tokens > shapes.max_seqs;
  const int64_t tiles = several ? Policy::kTargetWorkTiles : Policy::kTargetWorkTiles / 2;
  const int64_t rows = shapes.num_tokens * shapes.num_heads;
  // Of a few sequences, mostly of few tokens, one may have most of the keys, and be short of work tiles by itself:
  // where contexts may be that long, up to four times as many rows are not enough.
  // A window that hides keys leaves nothing to split.
  constexpr int64_t kLongContext = 16384;
  const int64_t room_for_keys = shapes.pages_per_seq * shapes.page_size;
  const bool has_window = shapes.sliding_window > 0 && shapes.sliding_window < room_for_keys;
  const bool longest_first = shapes.max_seqs > kFewChunks && SuitsLongestFirst(shapes);
  const int64_t tokens = (longest_first ? 4 : 1) * Policy::kSmallTileTokens;  // on average
  const bool uneven = shapes.max_seqs <= kWarpPlannedSequences && !few_tokens && !has_window &&
                      shapes.num_tokens <= shapes.max_seqs * tokens && room_for_keys >= kLongContext;
  const int64_t enough_rows = (uneven ? 4 : 1) * tiles * Policy::LargeTileRows(dim);
  const int64_t decode_rows = shapes.max_seqs > kFewChunks && shapes.num_tokens > shapes.max_seqs
                                  ? (shapes.max_seqs - 1) * shapes.num_heads
                                  : 0;
  // Of many sequences of few rows each, the instances with turns keep accumulators for those that leave CTAs idle.
  const bool many_alike = shapes.max_seqs > kWarpPlannedSequences && dim <= 128 && room_for_keys >= kLongContext &&
                          rows <= shapes.max_seqs * shapes.num_kv_heads * Policy::kSmallTileRows &&
                          AlikeSplitRows(shapes) > 0;
  // Many sequences of unequal few tokens, in row tiles for nearly all CTAs: those left idle would have done less of the
  // others' work than the combine kernel costs.
  constexpr int64_t kIdleKeyTiles = 7;  // of a CTA, on average
  const int64_t row_tiles = Sequences(shapes).SmallTiles(shapes);
  const int64_t idle_ctas = Policy::kTargetWorkTiles - row_tiles;
  const bool nearly_a_round =
      shapes.max_seqs > kWarpPlannedSequences && dim <= 128 && shapes.tree_words == 0 && few_tokens &&
      shapes.num_tokens % shapes.max_seqs != 0 && idle_ctas >= 0 &&
      idle_ctas * (room_for_keys / Policy::TileKeys(dim)) <= kIdleKeyTiles * Policy::kTargetWorkTiles;
  const bool enough = (rows - decode_rows > enough_rows && !many_alike) || (short_contexts && !few_tokens) ||
                      decode_alone || nearly_a_round;
  return !enough;
}

SplitKvPolicy SplitKvPolicy::Make(const PagedAttentionCall& shapes) {
  const SplitAccumulatorLayout layout = SplitAccumulatorLayout::Of(shapes);
  SplitKvPolicy policy{};
  policy.enabled = layout.enabled;
  policy.always_fits = layout.always_fits;
  policy.pool_rows = static_cast<unsigned>(layout.pool_rows);
  // A window of 2^31 or more hides nothing.
  policy.window = static_cast<int>(shapes.sliding_window >> 31 != 0 ? 0 : shapes.sliding_window);
  policy.group = static_cast<int>(shapes.num_heads / shapes.num_kv_heads);
  policy.kv_heads = static_cast<int>(shapes.num_kv_heads);
  policy.large_tile_rows = LargeTileRows(shapes.head_dim);
  policy.tile_keys = FastDivisor::Make(TileKeys(shapes.head_dim));
  policy.one_tile_splits = SplitsFor(1, policy.kv_heads);
  policy.max_decode_tokens = shapes.max_decode_tokens;
  policy.max_tokens = shapes.tree_mask != nullptr ? static_cast<int>(shapes.MaxTreeTokens()) : INT32_MAX;
  return policy;
}

SplitAccumulatorLayout SplitAccumulatorLayout::Of(const PagedAttentionCall& shapes) {
  SplitAccumulatorLayout layout{};
  layout.kernels = shapes.prefill_kernels;
  layout.decode_work = shapes.decode_work;
  layout.rare_decode_rows = shapes.rare_decode_rows;
  const int64_t dim = shapes.head_dim;
  using Policy = SplitKvPolicy;
  const int64_t max_decode_tokens = shapes.tree_words > 0 ? 0 : MaxDecodeTokens(shapes, true);
  const int64_t min_tiles =
      max_decode_tokens < kMaxDecodeRows ? Policy::kMinTilesOfFewTokens : Policy::kMinTilesPerSplit;
  const bool enabled = shapes.dtype != DType::kF32 && shapes.num_kv_heads > 0 &&
                       (dim == 64 || dim == 128 || dim == 256) &&
                       (SuitsTma(shapes.page_size) || !IsFloat8(shapes.cache_dtype)) &&
                       shapes.num_tokens > max_decode_tokens && shapes.num_kv_heads * 2 <= Policy::kTargetWorkTiles &&
                       shapes.pages_per_seq * shapes.page_size > (2 * min_tiles - 1) * Policy::TileKeys(dim);
  if (!enabled) return layout;
  layout.enabled = true;
  // The splits that the policy may make of a context: of few tokens up to eight, or a sixteenth of the key tiles.
  const int64_t max_tiles =
      (shapes.pages_per_seq * shapes.page_size + Policy::TileKeys(dim) - 1) / Policy::TileKeys(dim);
  const int64_t rounds = max_tiles >= Policy::kManyKeyTiles ? 2 : 1;  // see SplitKvPolicy::CountOf
  const int64_t of_context = std::max<int64_t>(Policy::kSplitsOfFewTokens, max_tiles / Policy::kMinTilesPerSplit);
  const int64_t wanted =
      std::min({int64_t{Policy::kMaxSplits}, rounds * Policy::kTargetWorkTiles / shapes.num_kv_heads, of_context});
  const int64_t sequences = SequencesPerGridRow(dim);
  const int64_t grid_rows = std::max<int64_t>(1, (shapes.max_seqs + sequences - 1) / sequences);
  const int64_t room = WantsSplitAccumulators(shapes) ? PrefillScratchLimit(shapes) / RowBytes(dim) / grid_rows : 0;
  const int64_t most = std::min(wanted * shapes.num_tokens * shapes.num_heads,
                                std::max<int64_t>(shapes.max_seqs, 1) * Policy::MostRows(dim) * rounds);
  layout.begin_bytes = PrefillScratchBegin(shapes);
  layout.always_fits = most <= room;
  layout.pool_rows = std::min(most, room);
  layout.part_rows = layout.always_fits ? most : std::max(room, kMaxCtas * MaxTileRows(dim));
  layout.longest_first = room > 0 && !layout.always_fits && SuitsLongestFirst(shapes);
  if (layout.longest_first) {
    const int64_t bytes = dim * int64_t{sizeof(float)};
    const int64_t decode_rows = (layout.begin_bytes + bytes - 1) / bytes;
    layout.begin_bytes = 0;
    layout.part_rows = kScratchLimit / RowBytes(dim);
    layout.pool_rows = layout.part_rows - decode_rows;
  }
  layout.total_rows = layout.part_rows * grid_rows;
  return layout;
}

}  // namespace xla_gpu::prefill
