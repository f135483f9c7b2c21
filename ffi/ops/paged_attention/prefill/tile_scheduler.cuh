// Work tiles of the prefill kernels, and the single-tile scheduler. Scheduling is planned on the device: each CTA finds
// its work tiles from the metadata alone, so that the launch depends on shapes only.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_TILE_SCHEDULER_CUH_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

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
  int split;        // KV split, where these are work tiles of their own (cross-CTA split); else 0
  int accum_begin;  // first row of the sequence's split accumulators; -1 where splits are no work tiles of their own
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
      const unsigned row_tile = index < static_cast<unsigned>(splits) ? 0 : index / splits;
      split = index - row_tile * splits;
      index = row_tile;
    }
    return {seq,
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
  }
};

// How a PromptList learns of KV splits: from a SplitKvPolicy, or not at all.
struct SplitPromptKv {
  static constexpr bool kSplits = true;
  const SplitKvPolicy& policy;
  __device__ void operator()(Prompt* prompt) const {
    if (prompt->q_len > policy.max_tokens) prompt->context_len = -1;
    if (!policy.enabled) return;
    const KvSplits splits = policy.Of(prompt->q_len, prompt->context_len);
    prompt->splits = splits.count;
    prompt->split_keys = splits.Begin(1) * static_cast<int>(policy.tile_keys.divisor);
  }
};
struct WholePromptKv {
  static constexpr bool kSplits = false;
  __device__ void operator()(Prompt* /*prompt*/) const {}
};

// How many work tiles a prompt has, and where they end: one past the position of a tile's last row.
// kShrinksTail: the first row tiles of a prompt, which come last, may have fewer rows.
template <int kRows, bool kShrinksTail = false>
struct PromptTiles {
  unsigned group;
  unsigned tail_tiles = 0;  // with kShrinksTail: number of smaller row tiles at the beginning of a prompt
  unsigned tail_rows = kRows;

  __device__ unsigned Rows(unsigned index) const { return kShrinksTail && index < tail_tiles ? tail_rows : kRows; }
  __device__ unsigned FirstRow(unsigned index) const {
    if constexpr (!kShrinksTail) return index * kRows;
    return index < tail_tiles ? index * tail_rows : tail_tiles * tail_rows + (index - tail_tiles) * kRows;
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

// Prompts, listed by the threads of a CTA together, and their work tiles in the order of the last key that a tile sees,
// latest first: a tile's time grows with it, and longest-first balances the load. The order is by classes of equal
// width in key positions. It decides when a tile is computed, never what it computes.
template <int kThreads, int kRows, int kCapacity, int kClasses, typename Split>
class PromptList {
 public:
  struct Storage {
    int4 prompts[kCapacity];         // Packed(seq, accum_begin), q_begin, q_len, context_len
    unsigned tiles_up_to[kClasses];  // [class] tiles in this class and in the ones before
    int warp_counts[kThreads / 32];
    unsigned warp_rows[Split::kSplits ? kThreads / 32 : 1];  // of split accumulators
    int max_end;
  };

  __device__ PromptList(const PagedAttentionParams& params, unsigned group, Split split_kv, Storage& storage)
      : params_(params), split_kv_(split_kv), storage_(storage), tiles_{group} {}

  // Empties the list. A barrier of the CTA must follow before Collect.
  __device__ void Clear() {
    count_ = 0;
    accum_rows_ = 0;
    if (threadIdx.x == 0) storage_.max_end = 1;
  }

  // Whether kThreads more sequences fit.
  __device__ bool HasRoom() const { return count_ + kThreads <= kCapacity; }

  // Lists the prompts among the sequences [base, min(base + kThreads, last)): those with more rows than the decode path
  // takes. `in_order` is what QueryStartsInOrder returned.
  __device__ void Collect(int base, int last, bool in_order) {
    const int thread = static_cast<int>(threadIdx.x);
    Prompt prompt{base + thread, 0, 0, -1, 1, 0, 0};
    if (prompt.seq < last) {
      const SequenceInfo info = LoadSequence(params_, prompt.seq, in_order);
      prompt = {prompt.seq, info.q_begin, info.q_len, info.valid ? info.context_len : -1, 1, 0, 0};
      split_kv_(&prompt);
    }
    unsigned rows = 0, rows_up_to = 0;
    if constexpr (Split::kSplits) {
      rows = split_kv_.policy.RowsOf(prompt.splits, prompt.q_len);
      rows_up_to = SumUpToLane(rows);
    }
    const bool mine = prompt.q_len > params_.max_decode_tokens;
    if (!__syncthreads_or(mine)) return;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (thread % 32 == 0) storage_.warp_counts[thread / 32] = __popc(votes);
    if (Split::kSplits && thread % 32 == 31) storage_.warp_rows[thread / 32] = rows_up_to;
    __syncthreads();
    int position = count_ + __popc(votes & ((1u << thread % 32) - 1));
    unsigned accum_begin = accum_rows_ + rows_up_to - rows;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      if (warp < thread / 32) position += storage_.warp_counts[warp];
      count_ += storage_.warp_counts[warp];
      if constexpr (Split::kSplits) {
        if (warp < thread / 32) accum_begin += storage_.warp_rows[warp];
        accum_rows_ += storage_.warp_rows[warp];
      }
    }
    if (mine) {
      const int seq = Split::kSplits ? Packed(prompt.seq, accum_begin) : prompt.seq;
      storage_.prompts[position] = make_int4(seq, prompt.q_begin, prompt.q_len, prompt.context_len);
      // Where splits do not fit, it ends there; else this is later than any tile, which does no harm.
      atomicMax(&storage_.max_end, max(prompt.context_len, prompt.q_len));
    }
    __syncthreads();
  }

  // Counts the tiles of the listed prompts, and prepares Find.
  __device__ unsigned CountTiles() {
    static_assert(kClasses <= kThreads && kClasses % 32 == 0);
    if (count_ == 0) return 0;
    if (threadIdx.x < kClasses) {
      const int end = ClassEnd(static_cast<int>(threadIdx.x));
      unsigned tiles = 0;
      for (int i = 0; i < count_; ++i) {
        const Prompt prompt = At(i);
        tiles += tiles_.Count(prompt) - tiles_.FirstEndingAt(prompt, end);
      }
      storage_.tiles_up_to[threadIdx.x] = tiles;
    }
    __syncthreads();
    return storage_.tiles_up_to[kClasses - 1];
  }

  // Tile number `row_tile`, which must be below CountTiles(). By a warp; the result is the same in all lanes.
  __device__ WorkTile Find(unsigned row_tile, unsigned kv_head) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int found = 0;  // the tile's class
#pragma unroll
    for (int i = 0; i < kClasses / 32; ++i) {
      found += __popc(__ballot_sync(~0u, storage_.tiles_up_to[i * 32 + lane] <= row_tile));
    }
    unsigned left = row_tile - (found == 0 ? 0 : storage_.tiles_up_to[found - 1]);
    int owner = 0;
    unsigned index = 0;
    int base = 0;
    for (;; base += 32) {
      unsigned first = 0, last = 0;  // this lane's prompt has tiles [first, last) in the class
      if (base + lane < count_) {
        const Prompt prompt = At(base + lane);
        first = tiles_.FirstEndingAt(prompt, ClassEnd(found));
        last = found == 0 ? tiles_.Count(prompt) : tiles_.FirstEndingAt(prompt, ClassEnd(found - 1));
      }
      if (FindAmongLanes(first, last, &left, &owner, &index)) break;
    }
    return At(base + owner).Tile(tiles_, index, kv_head);
  }

 private:
  __device__ Prompt At(int index) const {
    const int4 stored = storage_.prompts[index];
    Prompt prompt{stored.x, stored.y, stored.z, stored.w, 1, 0, 0};
    split_kv_(&prompt);
    if constexpr (Split::kSplits) {
      prompt.seq =
          static_cast<int>(blockIdx.y) * kCapacity + static_cast<int>(static_cast<unsigned>(stored.x) % kCapacity);
      prompt.accum_begin = static_cast<int>(static_cast<unsigned>(stored.x) / kCapacity);
      if (!split_kv_.policy.Fits(accum_rows_)) prompt.splits = 1;
    }
    return prompt;
  }
  // A sequence of this row of the grid, which are kCapacity, and a row of the split accumulators: both fit 32 bits, or
  // there are more rows than room, and the second is not used.
  static __device__ int Packed(int seq, unsigned accum_begin) {
    return static_cast<int>(accum_begin * kCapacity + static_cast<unsigned>(seq) % kCapacity);
  }

  // The smallest end of a tile in class `index`.
  __device__ int ClassEnd(int index) const {
    const int width = (storage_.max_end + kClasses - 1) / kClasses;
    return storage_.max_end - (index + 1) * width + 1;
  }

  const PagedAttentionParams& params_;
  const Split split_kv_;
  Storage& storage_;
  const PromptTiles<kRows> tiles_;
  int count_ = 0;
  unsigned accum_rows_ = 0;  // of the split accumulators of all prompts
};

// The scheduler of a kernel whose CTAs have one work tile each. CTAs start in the order of their number, so that the
// last ones to start are the short ones.
template <int kThreads, int kRows>
class SingleTileScheduler {
 public:
  // Up to 1024 prompts are listed at once; a call with more is scheduled in several batches.
  using List = PromptList<kThreads, kRows, 1024, std::min(kThreads, 256), WholePromptKv>;
  struct Storage {
    typename List::Storage list;
    WorkTile tile;
  };

  // By all threads of the CTA together.
  __device__ SingleTileScheduler(const PagedAttentionParams& params, Storage& storage)
      : params_(params),
        storage_(storage),
        list_(params, static_cast<unsigned>(params.num_heads / params.num_kv_heads), WholePromptKv(), storage.list) {}

  // The work tile of the given rank, over all sequences and kv heads; kv heads are next to each other, since they read
  // the same pages. False if there are only `*total` tiles. By all threads of the CTA, with a barrier before the
  // storage is used for something else.
  __device__ bool Find(unsigned rank, WorkTile* tile, unsigned* total) {
    const int num_live = LiveSequences(params_);
    const bool in_order = QueryStartsInOrder(params_, num_live);
    const auto kv_heads = static_cast<unsigned>(params_.num_kv_heads);
    const unsigned row_tile = rank / kv_heads;
    unsigned before = 0;  // tiles of the batches so far
    for (int next = 0; next < num_live;) {
      list_.Clear();
      __syncthreads();
      for (; next < num_live && list_.HasRoom(); next += kThreads) list_.Collect(next, num_live, in_order);
      const unsigned in_batch = list_.CountTiles();
      if (row_tile < before + in_batch) {
        if (threadIdx.x < 32) {
          const WorkTile found = list_.Find(row_tile - before, rank - row_tile * kv_heads);
          if (threadIdx.x == 0) storage_.tile = found;
        }
        __syncthreads();
        // NOTE: loaded from one address, so that the compiler knows it to be uniform.
        *tile = storage_.tile;
        return true;
      }
      before += in_batch;
      __syncthreads();
    }
    *total = before * kv_heads;
    return false;
  }

 private:
  const PagedAttentionParams& params_;
  Storage& storage_;
  List list_;
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_TILE_SCHEDULER_CUH_
