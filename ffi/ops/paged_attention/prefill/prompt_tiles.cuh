// Work tiles of the prefill kernels: of a prompt, and how prompts learn of KV splits.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PROMPT_TILES_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PROMPT_TILES_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/fast_divisor.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// The query heads of one kv head share a pass over K and V (GQA packing): packed row r of a sequence is token r / group
// and query head r % group of the kv head. A work tile is kRows consecutive packed rows or fewer, or one KV split of
// them.
struct WorkTile {
  int seq;
  int q_begin;  // row of `query` where the sequence begins
  int q_len;
  int context_len;
  bool valid;          // false: the rows become NaN
  unsigned first_row;  // the tile covers packed rows [first_row, first_row + rows) of the sequence, where these exist
  unsigned rows;
  int kv_head;
  int split;  // KV split, where these are work tiles of their own (cross-CTA split); else 0
  // First row of the sequence's split accumulators; -1 where splits are no work tiles of their own, or with kOwnRows
  // -2 - (first row of the work tile's).
  int accum_begin;
  int first_splits = 1;  // of the row tile, which one CTA takes: `split` is 0, or one behind them
};

// A sequence with more rows than the decode path takes.
struct Prompt {
  int seq;
  int q_begin;
  int q_len;
  int context_len;       // -1 where it is out of range
  int splits;            // KV splits that are work tiles of their own; its row tiles are counted once for each
  int split_keys;        // keys of a split, where there are several
  int accum_begin;       // first row of its split accumulators, where there are several
  int first_splits = 1;  // KV splits that the first one of `splits` is made of

  // One past the position of the last row, or what stands for it; at least q_len, so that all tiles end at positive
  // positions.
  __device__ int End() const { return splits > 1 ? split_keys : max(context_len, q_len); }

  // `tiles`: a PromptTiles.
  template <typename Tiles>
  __device__ WorkTile Tile(const Tiles& tiles, unsigned index, unsigned kv_head) const {
    const bool valid = context_len >= 0;
    unsigned split = 0;
    if (splits > 1) {
      unsigned row_tile;
      if constexpr (Tiles::kShortPlan) {
        row_tile = SmallQuotient(index, static_cast<unsigned>(splits));
      } else {
        row_tile = index < static_cast<unsigned>(splits) ? 0 : index / splits;
      }
      split = index - row_tile * splits;
      index = row_tile;
    }
    WorkTile tile = {seq,
                     q_begin,
                     q_len,
                     valid ? context_len : 0,
                     valid,
                     tiles.FirstRow(index),
                     tiles.Rows(index),
                     static_cast<int>(kv_head),
                     static_cast<int>(split),
                     splits > 1 ? accum_begin : -1,
                     first_splits};
    if constexpr (Tiles::kHasOwnRows) {
      if (splits == 1 && accum_begin >= 0) tile.accum_begin = -2 - (accum_begin + tiles.OwnRow(*this, index, kv_head));
    }
    return tile;
  }
};

// How a PromptList learns of KV splits: from a SplitKvPolicy, or not at all.
// kSharesLastRound: SplitKvPolicy::last_round_ctas may be set. PlanDivision: how it divides.
template <bool kSharesLastRound, typename PlanDivision>
struct SplitPromptKv {
  static constexpr bool kSplits = true;
  static constexpr bool kSharesRound = kSharesLastRound;
  static constexpr bool kShortPlan = !std::is_same_v<PlanDivision, PlainDivision>;
  const SplitKvPolicy& policy;
  const PlanDivision division;
  __device__ KvSplits operator()(Prompt* prompt) const {
    if (prompt->q_len > policy.max_tokens) prompt->context_len = -1;
    if (!policy.enabled) return {1, 0, 0};
    const KvSplits splits = policy.template Of<PlanDivision>(prompt->q_len, prompt->context_len);
    prompt->splits = splits.count;
    prompt->split_keys = splits.Begin(1) * static_cast<int>(policy.tile_keys.divisor);
    return splits;
  }
};
struct WholePromptKv {
  static constexpr bool kSplits = false;
  static constexpr bool kSharesRound = false;
  static constexpr bool kShortPlan = false;
  __device__ void operator()(Prompt* /*prompt*/) const {}
};

// How many work tiles a prompt has, and where they end: one past the position of a tile's last row.
// kShrinksTail: the first row tiles of a prompt, which come last, may have fewer rows. kOwnRows: row tiles may have
// split accumulators of their own, of a prompt with one of Prompt::splits, from Prompt::accum_begin on where that is
// not -1. kIsShort: in few instructions, for a plan that CTAs wait for.
template <int kRows, bool kShrinksTail = false, bool kOwnRows = false, bool kIsShort = false>
struct PromptTiles {
  static constexpr bool kHasOwnRows = kOwnRows;
  static constexpr bool kShortPlan = kIsShort;
  unsigned group;
  unsigned tail_tiles = 0;  // with kShrinksTail: number of smaller row tiles at the beginning of a prompt
  unsigned tail_rows = kRows;

  __device__ unsigned Rows(unsigned index) const { return kShrinksTail && index < tail_tiles ? tail_rows : kRows; }
  __device__ unsigned FirstRow(unsigned index) const {
    if constexpr (!kShrinksTail) return index * kRows;
    return index < tail_tiles ? index * tail_rows : tail_tiles * tail_rows + (index - tail_tiles) * kRows;
  }

  // The first one of a row tile's own rows, of its prompt's. Not with tail tiles.
  __device__ int OwnRow(const Prompt& prompt, unsigned index, unsigned kv_head) const {
    const unsigned of_head = (static_cast<unsigned>(prompt.q_len) * group + kRows - 1) / kRows;
    return static_cast<int>((kv_head * of_head + index) * kRows);
  }

  __device__ unsigned Count(const Prompt& prompt) const {
    const unsigned rows = static_cast<unsigned>(prompt.q_len) * group;
    if (kShrinksTail && tail_tiles > 0) {
      const unsigned large = (rows - min(rows, tail_tiles * tail_rows) + kRows - 1) / kRows;
      return rows == 0 ? 0 : (tail_tiles + large) * prompt.splits;
    }
    return (rows + kRows - 1) / kRows * prompt.splits;
  }

  // The first tile that ends at `end` or later.
  __device__ unsigned FirstEndingAt(const Prompt& prompt, int end) const {
    if constexpr (kShortPlan) {  // without branches
      const int past = end - prompt.End();
      const int before = max(past + prompt.q_len - 1, 0);  // tokens
      const unsigned first = prompt.splits > 1 ? 0 : static_cast<unsigned>(before) * group / kRows;
      return past > 0 ? Count(prompt) : first;
    }
    if (prompt.splits > 1) return end > prompt.split_keys ? Count(prompt) : 0;
    const int tokens = end - (prompt.End() - prompt.q_len);
    if (tokens > prompt.q_len) return Count(prompt);
    return tokens <= 1 ? 0 : static_cast<unsigned>(tokens - 1) * group / kRows;
  }

  // For `prompts` chunks that are alike, of `rows` packed rows each: work tiles of equal length run in whole rounds
  // over the CTAs, and the last round often leaves most CTAs idle. Then the rows of that round are divided into work
  // tiles of 64 or 128 rows, if these are no more than the CTAs. FirstEndingAt does not know of them: see FindAlike.
  __device__ void ShrinkTail(unsigned prompts, unsigned rows, unsigned tiles_of_rows) {
    constexpr unsigned kMostRounds = 12;  // of more, the last one is a small part
    const unsigned columns = prompts * tiles_of_rows;
    const unsigned tiles = (rows + kRows - 1) / kRows * columns;
    const unsigned rounds = tiles / gridDim.x;
    tail_tiles = 0;
    if (rounds == 0 || rounds > kMostRounds || rounds * gridDim.x == tiles) return;
    const unsigned left = rows - rounds * gridDim.x / columns * kRows;  // of a prompt, for the last round
    for (tail_rows = 64; tail_rows < kRows; tail_rows += 64) {
      tail_tiles = (left + tail_rows - 1) / tail_rows;
      if (tail_tiles * columns <= gridDim.x) return;
    }
    tail_tiles = 0;
  }
  // Of such prompts, with `count` tiles of a kv head each, in `splits` KV splits: the owner and index of tile number
  // `tile`, large ones first.
  __device__ void FindAlike(unsigned tile, unsigned prompts, unsigned splits, unsigned count, unsigned* owner,
                            unsigned* index) const {
    const unsigned small = tail_tiles * splits;  // of a prompt
    const unsigned large = (count - small) * prompts;
    const bool is_large = tile < large;
    const unsigned number = is_large ? tile : tile - large;
    const unsigned from_end = number / prompts;
    *owner = number - from_end * prompts;
    *index = (is_large ? count : small) - 1 - from_end;
  }
};

// Whether most of what a prompt's tokens see lies before them, so that all its work tiles take about the same time.
__device__ inline bool IsLateChunk(const Prompt& prompt) { return prompt.q_len <= prompt.context_len / 2; }
// Whether two prompts' work tiles take about the same time.
__device__ inline bool AreAlike(const Prompt& a, const Prompt& b) {
  return a.q_len == b.q_len && a.splits == b.splits && abs(a.context_len - b.context_len) <= a.context_len / 8;
}

// What lane `lane` has, but for split_keys, which Prompt::Tile does not read.
__device__ inline Prompt PromptOfLane(const Prompt& mine, int lane) {
  const auto of_lane = [lane](int value) { return __shfl_sync(~0u, value, lane); };
  return {of_lane(mine.seq),         of_lane(mine.q_begin),     of_lane(mine.q_len),
          of_lane(mine.context_len), of_lane(mine.splits),      0,
          of_lane(mine.accum_begin), of_lane(mine.first_splits)};
}

// The sum of the values in this lane and those before it.
__device__ inline unsigned SumUpToLane(unsigned value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// By a warp, each lane of which has the tiles [first, last) of a prompt. Finds tile number `*left` of all of them: its
// lane in `*owner` and its index in `*index`. If there are not as many, returns false and takes them off `*left`. The
// last tile of a lane comes first.
__device__ inline bool FindAmongLanes(unsigned first, unsigned last, unsigned* left, int* owner, unsigned* index) {
  const unsigned sum = SumUpToLane(last - first);
  const unsigned all = __shfl_sync(~0u, sum, 31);
  if (*left >= all) {
    *left -= all;
    return false;
  }
  *owner = __popc(__ballot_sync(~0u, sum <= *left));
  *index = __shfl_sync(~0u, last - 1 + (sum - (last - first)), *owner) - *left;
  return true;
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PROMPT_TILES_CUH_
