// Which instance of the TMA prefill kernels a call takes at head_dim 64 and 128.
#include "ffi/ops/paged_attention/prefill/heuristics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/sequences.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {
namespace {

// What a work tile of PrefillTmaKernel costs, in microseconds of an H200.
struct TmaTileCost {
  TmaInstance instance;
  int rows;
  double fixed;         // of a work tile
  double per_key_tile;  // of SplitKvPolicy::TileKeys
};
constexpr TmaTileCost kTmaTileCosts[] = {{TmaInstance::kRows192, 192, 4.8, 2.0},
                                         {TmaInstance::kRows128, 128, 3.5, 1.5},
                                         {TmaInstance::kRows64, 64, 2.5, 1.1}};

// KV splits of a sequence of so many tokens, whose context takes all the room.
int64_t SplitsOf(const SplitKvPolicy& policy, int64_t tokens, int64_t context) {
  const auto clamped = [](int64_t x) { return static_cast<int>(std::min<int64_t>(x, 1 << 30)); };
  const int64_t tile_keys = policy.tile_keys.divisor;
  const auto tiles = static_cast<unsigned>(clamped((context + tile_keys - 1) / tile_keys));
  return policy.CountOf(clamped(tokens), clamped(context), tiles);
}

// Those with CTAs of their own, of each of `sequences`.
int CrossCtaSplits(const SplitKvPolicy& policy, int64_t sequences, int64_t tokens, int64_t context) {
  const auto count = static_cast<int>(SplitsOf(policy, tokens, context));
  const auto few = static_cast<int>(std::min<int64_t>(tokens, 1 << 30));
  return count < 2 || sequences * policy.RowsOf(count, few) > policy.pool_rows ? 1 : count;
}

// For several sequences of more tokens than SuggestFewTokens says, but few rows behind long contexts: an instance whose
// warpgroups alternate, where large work tiles would be nearly empty, or where too few CTAs would take all KV splits of
// their rows. A chunk of a prompt beside decode rows may have the same shapes: its work tiles have room at once.
bool SuitsAlternating(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, int64_t sms,
                      TmaInstance* instance) {
  const Sequences sequences(shapes);
  if (IsFloat8(shapes.cache_dtype) || sequences.count == 1 || 2 * sequences.tokens >= sequences.context) return false;
  const int64_t group = shapes.num_heads / shapes.num_kv_heads;
  const bool fits = CrossCtaSplits(policy, sequences.count, sequences.tokens, sequences.context) > 1;
  const bool crosses = fits || CrossCtaSplits(policy, 1, sequences.tokens, sequences.context) > 1;
  if (crosses && !fits && sequences.SmallTiles(shapes) <= sms) {
    *instance = TmaInstance::kRows64Alternating;
    return true;
  }
  const int64_t large_tiles = (shapes.num_tokens * group + 127) / 128 * shapes.num_kv_heads;
  const bool many = sequences.count > kWarpPlannedSequences;
  const bool alike = many && sequences.AlikeAndShort();
  *instance = (crosses && !many) || alike ? TmaInstance::kRows64Alternating : TmaInstance::kRows128Alternating;
  // Without cross-CTA splits, one CTA takes all splits of its rows.
  const bool splits = crosses || (policy.pool_rows == 0 && SplitsOf(policy, sequences.tokens, sequences.context) > 1);
  return splits && sequences.tokens * group <= 64 && (large_tiles <= sms || alike);
}

// The instance of PrefillTmaKernel of which an estimate takes the least time. Small work tiles, of which there are
// more, where large ones would leave SMs idle.
TmaInstance TmaInstanceForFullTiles(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, int64_t sms) {
  constexpr double kTileKeys = SplitKvPolicy::TileKeys(128);
  constexpr double kEnough = 0.9;  // of the larger work tiles' time; for less, they read K and V less often
  const int64_t rows = shapes.num_tokens * (shapes.num_heads / shapes.num_kv_heads);
  const int64_t context = shapes.pages_per_seq * shapes.page_size;
  const int64_t sequences = std::max<int64_t>(shapes.max_seqs, 1);
  const int64_t tokens = std::min((shapes.num_tokens + sequences - 1) / sequences, context);
  // Of sequences of one length, or of a chunk beside decode rows.
  const bool alike = Sequences(shapes).AlikeAndShort();
  int splits = CrossCtaSplits(policy, sequences, tokens, context);
  if (splits == 1 && !alike) splits = CrossCtaSplits(policy, 1, shapes.num_tokens - sequences + 1, context);
  const double longest = std::ceil(static_cast<double>(context) / kTileKeys / splits);
  const double average =
      std::ceil((static_cast<double>(context) - static_cast<double>(tokens) / 2) / kTileKeys / splits);
  // Where no sequence can have much more tokens than the average, each has a last work tile that is not full.
  const int64_t prompts = 2 * tokens >= context || alike ? sequences : 1;
  const int64_t prompt_rows = (rows + prompts - 1) / prompts;
  const TmaTileCost* best = nullptr;
  double best_time = 0;
  for (const TmaTileCost& cost : kTmaTileCosts) {
    const int64_t tiles = prompts * ((prompt_rows + cost.rows - 1) / cost.rows) * shapes.num_kv_heads * splits;
    double rounds = static_cast<double>(tiles) / static_cast<double>(sms);
    // Work tiles of one length run in whole rounds. Shorter ones fill the gaps of several rounds.
    rounds = average > 0.75 * longest || rounds < 2 ? std::ceil(rounds) : rounds + 0.25;
    const double time =
        std::max(cost.fixed + longest * cost.per_key_tile, rounds * (cost.fixed + average * cost.per_key_tile));
    if (best == nullptr || time < kEnough * best_time) {
      best = &cost;
      best_time = time;
    }
  }
  // Rows of up to 128, of one work tile, read their keys once, for which the other instance has another cache policy;
  // and sequences of up to 64 rows among others take turns.
  const bool one_tile =
      sequences > 1 && 2 * tokens < context && tokens * (shapes.num_heads / shapes.num_kv_heads) <= 128;
  if (one_tile && best->instance == TmaInstance::kRows128 && !IsFloat8(shapes.cache_dtype)) {
    return TmaInstance::kRows128Alternating;
  }
  return best->instance;
}

// Whether a few sequences of unequal numbers of tokens are behind long contexts: those of more than 64 rows, up to 128,
// read their keys once, and the others take turns.
bool MayHaveUnequalRows(const PagedAttentionParams& shapes) {
  constexpr int64_t kFewSequences = 8, kLongContext = 8192;
  const Sequences sequences(shapes);
  const int64_t group = shapes.num_heads / shapes.num_kv_heads;
  const int64_t longest = shapes.num_tokens - sequences.count + 1;
  return !IsFloat8(shapes.cache_dtype) && sequences.count > 1 && sequences.count <= kFewSequences &&
         shapes.num_tokens % sequences.count != 0 && sequences.context >= kLongContext &&
         sequences.tokens * group <= 128 && longest * group > 64;
}

// Whether PrefillTmaOneWarpgroupKernel takes less time: where all contexts fit into a key tile, or of many sequences
// into two. With more it reads K and V too often, and the work tiles of a few sequences all run at once.
bool SuitsOneWarpgroup(const PagedAttentionParams& shapes) {
  constexpr int64_t kFewSequences = 4;
  const int64_t key_tiles = shapes.max_seqs > kFewSequences ? 2 : 1;
  return shapes.pages_per_seq * shapes.page_size <= key_tiles * SplitKvPolicy::TileKeys(128);
}

}  // namespace

// Work tiles of 64 rows where sequences have few rows behind contexts, or where all of these run at about the same time
// and see few keys. A work tile of 192 takes 1.6 times as long as one of 64, and reads its keys once.
TmaInstance TmaInstanceDim64(const PagedAttentionParams& shapes, int64_t sms) {
  constexpr int64_t kFewTokens = 56, kFewSequences = 24, kFewKeys = 2048;
  if (shapes.max_seqs == 0) return TmaInstance::kRows192;
  const Sequences sequences(shapes);
  const int64_t group = shapes.num_heads / shapes.num_kv_heads;
  const int64_t tiles = (shapes.num_tokens * group + 63) / 64 * shapes.num_kv_heads;
  if (sequences.count > 1 && sequences.context <= kFewKeys && 3 * tiles <= 4 * sms) {
    return TmaInstance::kRows64Alternating;
  }
  // Among many sequences of unequal numbers of tokens there may be a chunk of a prompt.
  const int64_t few_rows = sequences.alike ? 96 : sequences.count <= kFewSequences ? 128 : 64;
  const bool few = sequences.tokens <= kFewTokens && 2 * sequences.tokens < sequences.context &&
                   sequences.tokens * group <= few_rows;
  return few ? TmaInstance::kRows64Alternating : TmaInstance::kRows192;
}

// As SuitsAlternating and TmaInstanceForFullTiles say, or where sequences have few tokens, 64 or 128 rows: a work tile
// that is not full takes as long as a full one. Of several tokens for each sequence, and a chunk of a prompt beside
// decode rows, the shapes do not tell. The first wants 64 rows in turns where SplitKvPolicy::FirstSplits applies, or
// numbers of tokens are equal; the second 64 rows as long as all work tiles are resident at once, else 128, or 192
// beside many decode sequences: fewer work tiles leave SMs to the decode path. NOTE: with more tokens the average says
// little. Chunks of prompts beside many decode sequences want large work tiles.
TmaInstance TmaInstanceDim128(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, bool one_warpgroup,
                              int64_t sms) {
  if (MayHaveUnequalRows(shapes)) return TmaInstance::kRows128Alternating;
  if (one_warpgroup && SuitsOneWarpgroup(shapes)) return TmaInstance::kOneWarpgroup;
  if (shapes.max_seqs == 0 || !SuggestFewTokens(shapes)) {
    TmaInstance instance;
    if (SuitsAlternating(shapes, policy, sms, &instance)) return instance;
    return TmaInstanceForFullTiles(shapes, policy, sms);
  }
  const int64_t chunk = std::max<int64_t>(shapes.num_tokens - shapes.max_seqs + 1, 1);
  const int64_t rows = chunk * (shapes.num_heads / shapes.num_kv_heads);
  const int64_t small_tiles = (rows + 63) / 64 * shapes.num_kv_heads;
  const int splits = CrossCtaSplits(policy, /*sequences=*/1, chunk, shapes.pages_per_seq * shapes.page_size);
  const bool float8 = IsFloat8(shapes.cache_dtype);
  const Sequences sequences(shapes);
  const bool several = sequences.tokens > shapes.max_decode_tokens && !float8;
  if (small_tiles * 2 > sms && small_tiles * splits > sms) {
    const bool many = sequences.count > kWarpPlannedSequences;
    const bool first_splits = !many && policy.pool_rows > 0;
    // Among many sequences of as many tokens each there is probably no chunk of a prompt, among others there is.
    const bool fits_one_tile = sequences.tokens * (shapes.num_heads / shapes.num_kv_heads) <= 64;
    if (several && (first_splits || (many && sequences.alike && fits_one_tile))) return TmaInstance::kRows64Alternating;
    if (several && many && !sequences.alike) return TmaInstance::kRows192;
    return float8 ? TmaInstance::kRows128 : TmaInstance::kRows128Alternating;
  }
  // Several KV splits for each CTA, if sequences are of one length. With one or two, PrefillCombineKernel's CTAs that
  // fit beside the smaller ones of kRows64 gain more, but not with many sequences.
  constexpr int64_t kSeveral = 3;
  const int64_t tiles =
      sequences.SmallTiles(shapes) * CrossCtaSplits(policy, /*sequences=*/1, sequences.tokens, sequences.context);
  const bool many = sequences.count > kWarpPlannedSequences && sequences.tokens > 1;
  const bool alternates = many || (several && tiles >= kSeveral * sms);
  return alternates && !float8 ? TmaInstance::kRows64Alternating : TmaInstance::kRows64;
}

bool SuitsDecodeRows(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, int64_t ctas) {
  const Sequences sequences(shapes);
  return sequences.SmallTiles(shapes) * CrossCtaSplits(policy, /*sequences=*/1, sequences.tokens, sequences.context) <=
         ctas;
}

}  // namespace xla_gpu::prefill
