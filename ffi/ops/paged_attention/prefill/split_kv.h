// Split-KV for prefill: few query rows behind a long context are too few work tiles to fill the GPU, so their keys are
// split. A cross-CTA split has one CTA of the sm_90a kernel per KV split; a combine kernel merges their results. How a
// sequence is split follows from the sequence and from what all sequences of a call share, so its bits do not depend on
// its neighbours: where the workspace has no room for the cross-CTA splits of all sequences, one CTA takes the KV
// splits of its rows one after the other and merges them in the same order.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SPLIT_KV_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SPLIT_KV_H_

#include <algorithm>
#include <cstdint>

#include "ffi/device/fast_divisor.h"
#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"

#ifdef __CUDACC__
#define XLA_GPU_HOST_DEVICE __host__ __device__
#else
#define XLA_GPU_HOST_DEVICE
#endif

namespace xla_gpu::prefill {

// Of calls of up to so many sequences each warp plans alone, a sequence to a lane.
inline constexpr int kWarpPlannedSequences = 32;

// The KV splits of one sequence: as long as each other, but for a key tile.
struct KvSplits {
  int count;
  int tiles;   // key tiles of a split; 0: the sequence is not split
  int longer;  // the first splits, so many, have one more

  // The first key tile of a split; of split `count`, the end of the last one.
  XLA_GPU_HOST_DEVICE int Begin(int split) const { return split * tiles + (split < longer ? split : longer); }

  // In one register, without the count: 0 where the sequence is not split. There are at most kMaxSplits, and a key tile
  // has more than 64 keys, of fewer than 2^31.
  XLA_GPU_HOST_DEVICE int Packed() const { return tiles * 32 + longer; }
  XLA_GPU_HOST_DEVICE static KvSplits Unpacked(int packed) {
    return {0, static_cast<int>(static_cast<unsigned>(packed) / 32), packed & 31};
  }
};

// How a plan divides: any numbers.
struct PlainDivision {
  unsigned tile_rows, ctas;  // SplitKvPolicy's
  XLA_GPU_HOST_DEVICE unsigned ByTileRows(unsigned x) const { return x / tile_rows; }
  XLA_GPU_HOST_DEVICE unsigned ByCtas(unsigned x) const { return x / ctas; }
  template <typename Number>
  XLA_GPU_HOST_DEVICE static Number Quotient(Number x, Number y) {
    return x / y;
  }
};
#ifdef __CUDACC__
// In few instructions, for a plan that CTAs wait for before their first load. Quotients as SmallQuotient's, of numbers
// that are not negative.
template <int kTileRows>
struct ShortDivision {
  FastDivisor ctas;
  __device__ unsigned ByTileRows(unsigned x) const { return x / kTileRows; }
  __device__ unsigned ByCtas(unsigned x) const { return ctas.Divide(x); }
  template <typename Number>
  __device__ static Number Quotient(Number x, Number y) {
    return static_cast<Number>(SmallQuotient(static_cast<unsigned>(x), static_cast<unsigned>(y)));
  }
};
#endif

// What sequences would have with cross-CTA splits, or without: sums over the sequences.
struct CrossCtaSums {
  unsigned rows;                     // of split accumulators
  unsigned row_tiles, splits, work;  // of a kv head: row tiles, their splits, and their key tiles
  unsigned longest;                  // not a sum: the key tiles of the longest sequence

#ifdef __CUDACC__
  __device__ void Add(const CrossCtaSums& other) {
    rows += other.rows;
    row_tiles += other.row_tiles;
    splits += other.splits;
    work += other.work;
    longest = max(longest, other.longest);
  }
  // Over the lanes of a warp.
  __device__ CrossCtaSums OfWarp() const {
    return {__reduce_add_sync(~0u, rows), __reduce_add_sync(~0u, row_tiles), __reduce_add_sync(~0u, splits),
            __reduce_add_sync(~0u, work), __reduce_max_sync(~0u, longest)};
  }
#endif
};

// How sequences are split.
struct SplitKvPolicy {
  // Work tiles of a sequence over all kv heads and KV splits: one for each SM of an H100 or H200.
  static constexpr int kTargetWorkTiles = 132;
  static constexpr int kMostTokens = kTargetWorkTiles / 2 * 192;  // new tokens of a sequence that is split
  static constexpr int kMaxSplits = 32;                           // KV splits of a sequence
  static constexpr int kMinTilesPerSplit = 8;                     // key tiles
  // The same with so few tokens that a split is done when its keys have arrived: eight splits, which even out the load,
  // but not so short that starting and ending them takes longer than their keys; more where each has many key tiles.
  // Four or two where eight would have less than three each: with as many sequences and kv heads as there
  // usually are, work tiles are then a multiple of 128, just less than there are SMs.
  static constexpr int kMinTilesOfFewTokens = 4;
  static constexpr int kSplitsOfFewTokens = 8;
  static constexpr int kMinTilesOfMoreSplits = 16;
  // With many tokens, of which one CTA may have to take all splits.
  static constexpr int kMinTilesOfManyTokens = 20;
  // Behind so many key tiles, large work tiles that would leave a tenth of the SMs idle are split for two rounds.
  static constexpr unsigned kManyKeyTiles = 256;
  // The splits that `tiles` key tiles allow; `large`: of large work tiles.
  XLA_GPU_HOST_DEVICE static unsigned MostSplits(unsigned tiles, int q_len, bool large) {
    if (large) return tiles / kMinTilesOfManyTokens;
    if (q_len > kMaxDecodeRows) return tiles / kMinTilesPerSplit;
    const unsigned most = tiles / kMinTilesOfMoreSplits;
    if (most >= kSplitsOfFewTokens) return most;
    if (tiles >= 3 * kSplitsOfFewTokens) return kSplitsOfFewTokens;
    return tiles >= 3 * 4 ? 4 : tiles / kMinTilesOfFewTokens;
  }
  // Rows of a work tile, as kTargetWorkTiles counts them: small ones for up to kSmallTileTokens new tokens, where these
  // can be split at all. A large one takes 1.4 times as long.
  static constexpr int kSmallTileTokens = 128;
  static constexpr int kSmallTileRows = 64;
  static constexpr int LargeTileRows(int64_t head_dim) { return head_dim == 64 ? 192 : 128; }

  // Keys of a key tile.
  static constexpr int TileKeys(int64_t head_dim) { return head_dim == 64 ? 128 : head_dim == 128 ? 112 : 80; }

  bool enabled;  // false: no sequence of the call is split
  // Rows of split accumulators for the sequences that a row of the grid plans; 0: no cross-CTA splits.
  unsigned pool_rows;
  bool always_fits;  // they are enough whatever the sequences are
  int window;        // sliding window in keys, 0: none
  int group;         // query heads of a kv head
  int kv_heads;
  int large_tile_rows;       // LargeTileRows
  FastDivisor tile_keys;     // keys of a key tile
  unsigned one_tile_splits;  // SplitsFor(1, kv_heads)
  int max_decode_tokens;
  int max_tokens;  // new tokens of a sequence; longer ones are invalid, as trees may be
  // For FirstSplits; `ctas` is 0 where it does not apply: with more than kWarpPlannedSequences, or without room for
  // a work tile's accumulator for each CTA.
  unsigned ctas;            // of the persistent kernel
  unsigned tile_rows;       // of its work tiles
  bool takes_first_splits;  // whether its CTAs can take some splits of their rows, beside cross-CTA splits
  // For LongestFirstPlan, which needs `ctas` everywhere: whether FirstSplits applies, and whether CTAs keep their own
  // accumulators of up to 64 rows in shared memory.
  bool asks_first_splits, shares_small_tiles;
  // For CrossCtaRowTiles, of more sequences: CTAs of the persistent kernel; 0 where these keep no accumulators
  // of their own beside cross-CTA splits.
  unsigned last_round_ctas;

  // What the shapes say of it: without tile_rows, ctas and what else the kernel decides.
  static SplitKvPolicy Make(const PagedAttentionCall& shapes);

#ifdef __CUDACC__
  template <typename Division = PlainDivision>
  __device__ KvSplits Of(int q_len, int context_len) const {
    // Each CTA waits for this before its first load: no division that can be avoided.
    const unsigned tiles = context_len > 0 ? tile_keys.Divide(static_cast<unsigned>(context_len) - 1) + 1 : 0;
    const unsigned count = CountOf<Division>(q_len, context_len, tiles);
    if (count < 2) return {1, 0, 0};
    const unsigned length = tiles < 1u << 21 ? Division::Quotient(tiles, count) : tiles / count;
    return {static_cast<int>(count), static_cast<int>(length), static_cast<int>(tiles - length * count)};
  }
  // How many of a row tile's splits one CTA takes, the first ones of `splits`. All, where work tiles that are not split
  // keep all CTAs busy nearly to the end: cross-CTA splits would only cost their accumulators' way through memory.
  // Some, where the row tiles' are a third of the CTAs or more: about a CTA's share of all keys; the other CTAs take
  // the other splits. By a warp, a sequence of the prefill path to a lane, with q_len 0 where it has none.
  __device__ int FirstSplits(int q_len, int context_len, const KvSplits& splits) const {
    return FirstSplits(q_len, context_len, splits, PlainDivision{tile_rows, ctas});
  }
  template <typename Division>
  __device__ int FirstSplits(int q_len, int context_len, const KvSplits& splits, const Division& division) const {
    if (ctas == 0) return 1;
    const unsigned row_tiles = division.ByTileRows(static_cast<unsigned>(q_len * group) + tile_rows - 1) * kv_heads;
    const bool has_keys = row_tiles > 0 && context_len > 0 && q_len <= max_tokens;
    const unsigned tiles = has_keys ? tile_keys.Divide(static_cast<unsigned>(context_len) - 1) + 1 : 0;
    constexpr unsigned kMost = 1u << 18;  // no overflow below
    const unsigned all = __reduce_add_sync(~0u, row_tiles < kMost ? row_tiles : kMost);
    const unsigned longest = __reduce_max_sync(~0u, tiles);
    if (longest >= 1u << 13 || all >= 1u << 13) return 1;
    const unsigned work = __reduce_add_sync(~0u, row_tiles * tiles);
    const unsigned rounds = division.ByCtas(all + ctas - 1);
    if (uint64_t{rounds * longest} * ctas * 7 <= uint64_t{work} * 8) return splits.count;
    if (!takes_first_splits || all >= ctas || all * 3 < ctas) return 1;
    const bool split = splits.count > 1;
    const unsigned share = division.ByCtas(work);
    const int nearest = static_cast<int>(share) + splits.tiles / 2;
    int first = 1;
    if (split) first = min(Division::Quotient(nearest, splits.tiles), splits.count);
    if (split && splits.Begin(first) > nearest) --first;
    first = max(first, 1);
    // The other CTAs have about as much to do, or else all splits are cross-CTA splits, if they fit.
    const unsigned others = __reduce_add_sync(~0u, split ? row_tiles * (tiles - splits.Begin(first)) : 0);
    const unsigned rows = split ? RowsOf(splits.count, q_len) : 0;
    const bool fits = Fits(__reduce_add_sync(~0u, rows < kMost ? rows : kMost));
    if (fits && others * 4 > (ctas - all) * (share + 1) * 5) return 1;
    // The accumulators of the others have to fit, and of all first ones together.
    const unsigned of_split = split ? Division::Quotient(rows, static_cast<unsigned>(splits.count)) : 0;
    const unsigned all_rows = __reduce_add_sync(~0u, of_split < kMost ? of_split : kMost);
    if (all_rows == 0) return 1;
    const int room = static_cast<int>(Division::Quotient(pool_rows, all_rows));
    if (room < 2) return splits.count;
    return max(first, splits.count + 1 - room);
  }
  // What a sequence adds to CrossCtaSums; q_len: 0 where it has no rows of the prefill path.
  __device__ CrossCtaSums SumsOf(int q_len, int context_len, int splits) const {
    return SumsOf(q_len, context_len, splits, PlainDivision{tile_rows, last_round_ctas});
  }
  template <typename Division>
  __device__ CrossCtaSums SumsOf(int q_len, int context_len, int splits, const Division& division) const {
    CrossCtaSums sums{RowsOf(splits, q_len), 0, 0, 0, 0};
    if (last_round_ctas == 0) return sums;
    constexpr unsigned kMostRowTiles = 1u << 10, kMostKeyTiles = 1u << 12;  // no overflow of `work`
    sums.row_tiles = division.ByTileRows(static_cast<unsigned>(q_len * group) + tile_rows - 1);
    sums.splits = sums.row_tiles * static_cast<unsigned>(splits);
    const unsigned tiles = context_len > 0 ? tile_keys.Divide(static_cast<unsigned>(context_len) - 1) + 1 : 0;
    sums.longest = q_len > 0 ? min(tiles, kMostKeyTiles) : 0;
    sums.work = min(sums.row_tiles, kMostRowTiles) * sums.longest;
    return sums;
  }
  static constexpr unsigned kAllRowTiles = ~0u;
  // How many row tiles of a kv head, those of the first sequences, have cross-CTA splits. All of them where these fit,
  // and without them a CTA would have too much to do. Else a CTA takes all splits of its rows, and the row tiles are
  // whole rounds over the CTAs, and a part of one: if few, the row tiles of the last round have cross-CTA splits, in
  // which all CTAs share. `sums`: of the sequences of a row of the grid.
  __device__ unsigned CrossCtaRowTiles(const CrossCtaSums& sums) const {
    return CrossCtaRowTiles(sums, PlainDivision{tile_rows, last_round_ctas});
  }
  template <typename Division>
  __device__ unsigned CrossCtaRowTiles(const CrossCtaSums& sums, const Division& division) const {
    const bool fits = Fits(sums.rows);
    if (last_round_ctas == 0) return fits ? kAllRowTiles : 0;
    const unsigned heads = static_cast<unsigned>(kv_heads), row_tiles = sums.row_tiles * heads;
    const bool even =
        row_tiles >= last_round_ctas && uint64_t{sums.longest} * last_round_ctas <= uint64_t{sums.work} * heads;
    if (fits && !even) return kAllRowTiles;
    if (row_tiles < last_round_ctas) return 0;
    const unsigned left = row_tiles - division.ByCtas(row_tiles) * last_round_ctas;
    const unsigned average = sums.splits / sums.row_tiles;  // splits of a row tile
    const unsigned rounds = division.ByCtas(left * average + last_round_ctas - 1);
    const bool gains = average > 1 && rounds * 5 <= average * 4;
    const bool has_room = uint64_t{sums.rows} * left <= uint64_t{pool_rows} * row_tiles;  // about
    return gains && has_room ? (left + heads - 1) / heads : 0;
  }
#endif
  // The number of splits, 0 or 1 where there are none, of a sequence whose keys are in so many key tiles.
  template <typename Division = PlainDivision>
  XLA_GPU_HOST_DEVICE unsigned CountOf(int q_len, int context_len, unsigned tiles) const {
    if (!enabled || q_len > kMostTokens || q_len > max_tokens || q_len <= max_decode_tokens ||
        (window > 0 && window < context_len)) {
      return 1;
    }
    const auto rows = static_cast<unsigned>(q_len * group);
    unsigned row_tiles = (rows + kSmallTileRows - 1) / kSmallTileRows;
    const bool large = q_len > kSmallTileTokens || row_tiles * kv_heads * 2 > kTargetWorkTiles;
    if (large) row_tiles = large_tile_rows == 128 ? (rows + 127) / 128 : (rows + 191) / 192;
    unsigned count = row_tiles <= 1 ? one_tile_splits : SplitsFor<Division>(static_cast<int>(row_tiles), kv_heads);
    if (large && tiles >= kManyKeyTiles && count * row_tiles * kv_heads * 10 < kTargetWorkTiles * 9) {
      count = SplitsFor<Division>(static_cast<int>(row_tiles), kv_heads, 2 * kTargetWorkTiles);
    }
    const unsigned most = MostSplits(tiles, q_len, large);
    return count < most ? count : most;
  }
  // The splits of a sequence that make so many work tiles.
  template <typename Division = PlainDivision>
  XLA_GPU_HOST_DEVICE static unsigned SplitsFor(int row_tiles, int kv_heads, int work_tiles = kTargetWorkTiles) {
    const int count = Division::Quotient(work_tiles, row_tiles * kv_heads);
    return static_cast<unsigned>(count < kMaxSplits ? count : kMaxSplits);
  }
  // Rows of split accumulators that a sequence needs: MostRows at most, behind kManyKeyTiles twice as many.
  XLA_GPU_HOST_DEVICE unsigned RowsOf(int count, int q_len) const {
    return count > 1 ? static_cast<unsigned>(count * q_len * group * kv_heads) : 0;
  }
  static constexpr int64_t MostRows(int64_t head_dim) { return kTargetWorkTiles * LargeTileRows(head_dim); }
  // Whether sequences that need so many rows in all have cross-CTA splits.
  XLA_GPU_HOST_DEVICE bool Fits(unsigned rows) const { return rows <= pool_rows; }
};

// Whether a call that has split accumulators gives them to the sequences of the longest contexts first, where not all
// fit (LongestFirstPlan): a few sequences with several tokens and room for long contexts. Kernels of their own do that.
bool SuitsLongestFirst(const PagedAttentionCall& shapes);
// Rows of split accumulators of sequences of as many tokens each, a few behind contexts that take all the room; 0 where
// the shapes speak against such sequences: one may be a chunk of a prompt beside decode rows.
int64_t AlikeSplitRows(const PagedAttentionParams& shapes);
// Whether a call whose sequences may be split has split accumulators. Else one CTA takes all splits of its rows.
bool WantsSplitAccumulators(const PagedAttentionCall& shapes);

// The split accumulators' layout in the workspace. A row is head_dim float32 of unscaled output and a pair (largest
// score, sum). Each row of the grid has its part. It holds, one after the other, [split][q_len * num_heads] of every
// sequence that is split; or, where they do not all fit, the rows of one work tile for every CTA, in which it
// accumulates the splits that it takes one after the other. With `longest_first` both, where LongestFirstPlan says.
struct SplitAccumulatorLayout {
  static constexpr int64_t kMaxCtas = 132;  // in x; no more are launched, and no GPU of sm_90a has more SMs
  static constexpr int64_t MaxTileRows(int64_t head_dim) { return head_dim == 256 ? 128 : 192; }
  // Sequences that one row of the grid plans.
  static constexpr int64_t SequencesPerGridRow(int64_t head_dim) {
    return head_dim == 64 ? 1024 : head_dim == 128 ? 512 : 128;
  }

  bool enabled;         // whether any sequence may be split
  int64_t begin_bytes;  // in the scratch: behind the decode path's part; with `longest_first` 0
  bool always_fits;     // as SplitKvPolicy's
  int64_t pool_rows;    // likewise; with `longest_first` those behind the decode path's part
  bool longest_first;   // SuitsLongestFirst, and not all accumulators fit
  int64_t part_rows;    // of a row of the grid
  int64_t total_rows;
  PrefillKernels kernels;           // that are launched now
  decode::SharedCall* decode_work;  // as PagedAttentionCall's, and the next
  decode::RareDecodeRows* rare_decode_rows;

  static SplitAccumulatorLayout Of(const PagedAttentionCall& shapes);
  static int64_t RowBytes(int64_t dim) { return (dim + 2) * int64_t{sizeof(float)}; }
  int64_t Bytes(int64_t dim) const { return total_rows * RowBytes(dim); }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SPLIT_KV_H_
