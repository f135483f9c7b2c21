// The persistent tile schedulers of the sm_90a prefill kernel: a resident CTA takes one work tile after the other. Each
// CTA plans from the metadata alone, so that the launch depends on shapes only and no counter in memory must be reset.
// Work tiles are ranked by the last key that they see, latest first; CTA b of n takes the ranks b, 2n - 1 - b, 2n + b,
// …: back and forth, which gives all CTAs about the same sum.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PERSISTENT_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PERSISTENT_TILE_SCHEDULER_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/prefill/longest_first_plan.cuh"
#include "ffi/ops/paged_attention/prefill/prompt_list.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::prefill {

// The rank of the `n`th work tile of this CTA.
__device__ inline unsigned PersistentRank(unsigned n) {
  return n * gridDim.x + (n % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

// What the metadata say of a sequence, for schedulers that read one in each thread.
struct ThreadMetadata {
  int num_seqs;
  int q_begin, q_end;
  int context_len;

  // `early`: before the launch wait.
  __device__ static ThreadMetadata Load(const PagedAttentionParams& params, int seq, bool early) {
    const auto load = [early](const int32_t* from) { return early ? LoadEarly(from) : LoadBehindWait(from); };
    // In one latency: entries past num_seqs are ignored.
    ThreadMetadata metadata = {load(params.num_seqs), 0, 0, 0};
    if (seq < static_cast<int>(params.max_seqs)) {
      metadata.q_begin = load(params.query_start_loc + seq);
      metadata.q_end = load(params.query_start_loc + seq + 1);
      metadata.context_len = load(params.context_lens + seq);
    }
    return metadata;
  }
  __device__ bool operator==(const ThreadMetadata& other) const {
    return num_seqs == other.num_seqs && q_begin == other.q_begin && q_end == other.q_end &&
           context_len == other.context_len;
  }
};

// For any number of sequences, by the threads of a CTA together, through shared memory.
// kCarriesSplits: Find gives KvSplits::Packed too. Division: how it divides.
template <int kThreads, int kRows, int kMaxSequences, int kClasses, bool kSharesLastRound, bool kCarriesSplits,
          typename Division>
class PersistentTileScheduler {
 public:
  // Sequences of one row of the grid: row y has those from y * kSequences on.
  static constexpr int kSequences = kMaxSequences;
  // Sequences of a call whose metadata Plan is given.
  static constexpr int kEarlySequences = kThreads;
  using Split = SplitPromptKv<kSharesLastRound, Division>;
  using List = PromptList<kThreads, kRows, kSequences, kClasses, Split>;
  struct Storage {
    typename List::Storage list;
    int num_live;          // as one thread has read it
    int first_start;       // of the first sequence's rows
    int last_end;          // of the last one's
    bool has_decode_rows;  // some sequence has as few tokens as the decode path takes
  };

  __device__ PersistentTileScheduler(const PagedAttentionParams& params, unsigned group, FastDivisor kv_heads,
                                     const SplitKvPolicy& policy, const Division& division, Storage& storage)
      : params_(params),
        storage_(storage),
        list_(params, group, Split{policy, division}, storage.list),
        kv_heads_(kv_heads) {}

  // Must come first, by all threads. `metadata`: of sequence threadIdx.x. Returns whether all sequences are in order.
  // If not, there is a plan only if the metadata are `settled`: behind the launch wait. So they have to be with more
  // than kEarlySequences.
  __device__ bool Plan(const ThreadMetadata& metadata, bool settled) {
    const int thread = static_cast<int>(threadIdx.x);
    const int first = static_cast<int>(blockIdx.y) * kSequences;
    const int num_live = metadata.num_seqs >= 0 && metadata.num_seqs <= params_.max_seqs ? metadata.num_seqs : -1;
    total_ = 0;
    list_.Clear();
    bool ok = true, has_prompt = false, has_decode_rows = false;
    if (thread == 0) storage_.has_decode_rows = false;
    for (int s = thread; s < params_.max_seqs; s += kThreads) {
      const int begin = s == thread ? metadata.q_begin : __ldg(params_.query_start_loc + s);
      const int end = s == thread ? metadata.q_end : __ldg(params_.query_start_loc + s + 1);
      const bool in_bounds = 0 <= begin && begin <= end && end <= params_.num_tokens;
      ok = ok && (s >= num_live || in_bounds);
      has_prompt = has_prompt || (s < num_live && in_bounds && end - begin > params_.max_decode_tokens);
      has_decode_rows =
          has_decode_rows || (s < num_live && in_bounds && end > begin && end - begin <= params_.max_decode_tokens);
      if (s == 0) storage_.first_start = begin;
      if (s == num_live - 1) storage_.last_end = end;
    }
    if (thread == 0) storage_.num_live = num_live;
    const bool in_order = __syncthreads_and(ok);
    if (!in_order && !settled) return false;
    if (has_decode_rows) storage_.has_decode_rows = true;
    if (__syncthreads_or(has_prompt)) {
      // NOTE: threads may have read other numbers while the kernel before writes it, but must take as many barriers.
      const int last = min(storage_.num_live, first + kSequences);
#pragma unroll 1
      for (int base = first; base < last; base += kThreads) {
        SequenceInfo info{};
        if (base == 0 && in_order) {
          const int context_len = metadata.context_len;
          const bool valid = context_len >= 0 && context_len <= params_.pages_per_seq * params_.page_size;
          info = {metadata.q_begin, metadata.q_end - metadata.q_begin, context_len, valid, true};
        } else if (base + thread < last) {
          info = LoadSequence(params_, base + thread, in_order);
        }
        list_.Collect(base + thread, base + thread < last, info);
      }
      total_ = list_.CountTiles() * kv_heads_.divisor;
    }
    has_padding_rows_ =
        !in_order || num_live <= 0 || storage_.first_start > 0 || storage_.last_end < params_.num_tokens;
    return in_order;
  }

  __device__ bool IsEmpty() const { return blockIdx.x >= total_; }

  // Whether there may be padding rows: rows that no sequence owns.
  __device__ bool HasPaddingRows() const { return has_padding_rows_; }

  // The `n`th work tile of this CTA; false if it has no more. With kCarriesSplits also KvSplits::Packed of its
  // sequence. By one warp; the result is the same in all lanes.
  __device__ bool Find(unsigned n, WorkTile* tile, int* packed_splits) const {
    const unsigned rank = PersistentRank(n);
    if (rank >= total_) return false;
    const unsigned row_tile = kv_heads_.Divide(rank);
    *tile = list_.template Find<kCarriesSplits>(row_tile, rank - row_tile * kv_heads_.divisor, packed_splits);
    return true;
  }

 private:
  const PagedAttentionParams& params_;
  Storage& storage_;
  List list_;
  const FastDivisor kv_heads_;
  unsigned total_ = 0;  // tiles of all kv heads
  bool has_padding_rows_ = false;
};

// For up to kWarpPlannedSequences: each warp plans on its own, a sequence to a lane. Without the barriers and shared
// memory of PersistentTileScheduler, a prompt of 1024 tokens takes 24 µs instead of 26. kShrinksTail: as PromptTiles'.
// kLongestFirst: splits are placed as LongestFirstPlan says. The others: as PersistentTileScheduler's.
template <int kRows, bool kShrinksTail, bool kLongestFirst, bool kCarriesSplits, typename Division>
class PersistentWarpTileScheduler {
 public:
  static constexpr int kSequences = kWarpPlannedSequences;
  // Large work tiles, whose scheduler warp has few registers: many short prompts would wait for it.
  static constexpr bool kFindsFast = kRows == 192;

  __device__ PersistentWarpTileScheduler(unsigned group, FastDivisor kv_heads) : tiles_{group}, kv_heads_(kv_heads) {}

  // Must come first. max_tokens: of a sequence; longer ones are invalid. Returns whether all sequences are in order. If
  // not, the plan is good only if the metadata are `settled`: behind the launch wait.
  // `metadata`: of this lane's sequence.
  __device__ bool Plan(const PagedAttentionParams& params, const ThreadMetadata& metadata, int max_tokens,
                       bool settled) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int begin = metadata.q_begin, end = metadata.q_end, context_len = metadata.context_len;
    const int num_live = metadata.num_seqs >= 0 && metadata.num_seqs <= params.max_seqs ? metadata.num_seqs : -1;
    prompt_ = {lane, begin, 0, -1, 1, 0, kLongestFirst ? -1 : 0};
    has_first_splits_ = false;
    const bool live = lane < num_live;
    bool owns = live && 0 <= begin && begin <= end && end <= params.num_tokens;
    const bool in_order = __all_sync(~0u, owns || !live);
    has_padding_rows_ = !in_order || num_live <= 0 || __any_sync(~0u, lane == 0 && begin > 0) ||
                        __any_sync(~0u, lane == num_live - 1 && end < params.num_tokens);
    if (!in_order && settled) {
      owns = owns && NoEarlierStartAbove(params.query_start_loc, params.num_tokens, lane, begin);
    }
    if (owns && end - begin > params.max_decode_tokens) prompt_.q_len = end - begin;
    const bool fits = prompt_.q_len <= max_tokens && context_len <= params.pages_per_seq * params.page_size;
    if (context_len >= 0 && fits) prompt_.context_len = context_len;
    prompts_ = __ballot_sync(~0u, prompt_.q_len > 0);
    if constexpr (kLongestFirst) {
      has_decode_rows_ = __any_sync(~0u, live && HasDecodeRows(begin, end, params.max_decode_tokens));
    } else if constexpr (kShrinksTail) {
      has_decode_rows_ = __any_sync(~0u, owns && end > begin && prompt_.q_len == 0);
    }
    return in_order;
  }

  __device__ bool IsEmpty() const { return prompts_ == 0; }

  __device__ bool HasPaddingRows() const { return has_padding_rows_; }

  // Must come before Find where sequences may be split. part_rows: of the split accumulators. kFirstSplits: asks
  // SplitKvPolicy::FirstSplits, of which one CTA takes all, or with kSome also some.
  template <bool kFirstSplits, bool kSome>
  __device__ void Split(const SplitKvPolicy& policy, int64_t part_rows, const Division& division) {
    const KvSplits splits = SplitPromptKv</*kSharesLastRound=*/false, Division>{policy, division}(&prompt_);
    if constexpr (kCarriesSplits) packed_splits_ = splits.Packed();
    if (!__any_sync(~0u, prompt_.splits > 1)) return;
    if constexpr (kLongestFirst) {
      const KvSplits again = kCarriesSplits ? splits : policy.template Of<Division>(prompt_.q_len, prompt_.context_len);
      LongestFirstPlan<Division> plan(policy, part_rows, prompt_.q_len, prompt_.context_len, again, division);
      const SplitPlacement placed = plan.Place(has_decode_rows_);
      prompt_.first_splits = placed.first;
      prompt_.splits -= placed.first - 1;
      prompt_.accum_begin = placed.accum_begin;
      has_first_splits_ = kSome && __any_sync(~0u, prompt_.splits > 1 && prompt_.first_splits > 1);
      return;
    }
    if constexpr (kFirstSplits) {
      const KvSplits again = kCarriesSplits ? splits : policy.template Of<Division>(prompt_.q_len, prompt_.context_len);
      prompt_.first_splits = policy.FirstSplits(prompt_.q_len, prompt_.context_len, again, division);
      prompt_.splits -= prompt_.first_splits - 1;
    }
    const unsigned rows = policy.RowsOf(prompt_.splits, prompt_.q_len);
    const unsigned rows_up_to = SumUpToLane(rows);
    prompt_.accum_begin = static_cast<int>(rows_up_to - rows);
    if (!policy.Fits(__shfl_sync(~0u, rows_up_to, 31))) prompt_.splits = 1;
    has_first_splits_ = kSome && __any_sync(~0u, prompt_.splits > 1 && prompt_.first_splits > 1);
  }

  // Behind Split, by the warp that calls Find. Finds out whether all prompts have the same lengths. See also
  // PromptTiles::ShrinkTail. Decode rows, whose kernels come next, run on the SMs that the last round leaves.
  __device__ void Compare() {
    if constexpr (kFindsFast) {
      const int first = __ffs(static_cast<int>(prompts_)) - 1;
      Prompt other = prompt_;
      other.q_len = __shfl_sync(~0u, prompt_.q_len, first);
      other.context_len = __shfl_sync(~0u, prompt_.context_len, first);
      other.splits = __shfl_sync(~0u, prompt_.splits, first);
      const bool same = prompt_.q_len == other.q_len && prompt_.context_len == other.context_len;
      are_same_ = other.splits == 1 && __all_sync(~0u, prompt_.q_len == 0 || same);
      if constexpr (kShrinksTail) {
        const bool alike = prompt_.q_len == 0 || (IsLateChunk(other) && AreAlike(other, prompt_));
        tiles_.tail_tiles = 0;
        const bool has_own_rows = kLongestFirst && prompt_.splits == 1 && prompt_.accum_begin >= 0;
        if (__all_sync(~0u, alike && !has_own_rows) && !has_decode_rows_) {
          tiles_.ShrinkTail(__popc(prompts_), static_cast<unsigned>(other.q_len) * tiles_.group,
                            kv_heads_.divisor * other.splits);
        }
      }
    }
  }

  // As PersistentTileScheduler::Find.
  __device__ bool Find(unsigned n, WorkTile* tile, int* packed_splits) const {
    if (has_first_splits_) return FindBesideFirstSplits(n, tile, packed_splits);
    const unsigned rank = PersistentRank(n);
    const unsigned row_tile = kv_heads_.Divide(rank);
    const unsigned count = tiles_.Count(prompt_);
    int owner = __ffs(static_cast<int>(prompts_)) - 1;
    unsigned index;
    if ((prompts_ & (prompts_ - 1)) == 0) {  // one prompt: its last tiles first
      const unsigned total = __shfl_sync(~0u, count, owner);
      if (row_tile >= total) return false;
      index = total - 1 - row_tile;
    } else {
      if (row_tile >= __reduce_add_sync(~0u, count)) return false;
      if (kFindsFast && (tiles_.tail_tiles > 0 || are_same_)) {
        unsigned number;
        tiles_.FindAlike(row_tile, __popc(prompts_), __shfl_sync(~0u, prompt_.splits, owner),
                         __shfl_sync(~0u, count, owner), &number, &index);
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const bool is_owner = prompt_.q_len > 0 && __popc(prompts_ & ((1u << lane) - 1)) == number;
        owner = __ffs(static_cast<int>(__ballot_sync(~0u, is_owner))) - 1;
        Take(owner, index, rank - row_tile * kv_heads_.divisor, tile, packed_splits);
        return true;
      }
      // More than row_tile tiles end at `begin` or later, but no more than that at `end` or later.
      int begin = 1;
      int end = __reduce_max_sync(~0u, prompt_.q_len > 0 ? prompt_.End() : 0) + 1;
      // The order need not be exact. Ends of less than a key tile's difference make none.
      const int close_enough = kFindsFast ? max(end / 32, 64) : end / 256 + 1;
      unsigned later = 0;
      // The latest end first: all tiles end there where sequences are of one length and KV is split.
      const unsigned latest = __reduce_add_sync(~0u, count - tiles_.FirstEndingAt(prompt_, end - 1));
      if (latest > row_tile) {
        begin = end - 1;
      } else {
        --end;
        later = latest;
      }
#pragma unroll 1
      while (end - begin > close_enough) {
        const int middle = begin + (end - begin) / 2;
        const unsigned tiles = __reduce_add_sync(~0u, count - tiles_.FirstEndingAt(prompt_, middle));
        if (tiles > row_tile) {
          begin = middle;
        } else {
          end = middle;
          later = tiles;
        }
      }
      unsigned left = row_tile - later;
      FindAmongLanes(tiles_.FirstEndingAt(prompt_, begin), tiles_.FirstEndingAt(prompt_, end), &left, &owner, &index);
    }
    Take(owner, index, rank - row_tile * kv_heads_.divisor, tile, packed_splits);
    return true;
  }

 private:
  __device__ void Take(int owner, unsigned index, unsigned kv_head, WorkTile* tile, int* packed_splits) const {
    *tile = PromptOf(owner).Tile(tiles_, index, kv_head);
    if constexpr (kCarriesSplits) *packed_splits = __shfl_sync(~0u, packed_splits_, owner);
  }

  // Where row tiles' first splits, which are fewer than CTAs, are about a CTA's share: they have a CTA each, and the
  // other CTAs take the other splits.
  __device__ bool FindBesideFirstSplits(unsigned n, WorkTile* tile, int* packed_splits) const {
    const unsigned all = tiles_.Count(prompt_);
    const unsigned row_tiles = Division::Quotient(all, static_cast<unsigned>(prompt_.splits));
    const unsigned first_ctas = __reduce_add_sync(~0u, row_tiles) * kv_heads_.divisor;
    const bool first = blockIdx.x < first_ctas;
    if (first && n > 0) return false;
    const unsigned rank = first ? blockIdx.x : blockIdx.x - first_ctas + n * (gridDim.x - first_ctas);
    unsigned left = kv_heads_.Divide(rank);
    const unsigned kv_head = rank - left * kv_heads_.divisor;
    const unsigned mine = first ? row_tiles : all - row_tiles;
    const unsigned up_to = SumUpToLane(mine);
    if (left >= __shfl_sync(~0u, up_to, 31)) return false;
    const int owner = __popc(__ballot_sync(~0u, up_to <= left));
    left -= __shfl_sync(~0u, up_to - mine, owner);
    const Prompt prompt = PromptOf(owner);
    unsigned index = left * prompt.splits;
    if (!first) {
      const unsigned row_tile = Division::Quotient(left, static_cast<unsigned>(prompt.splits - 1));
      index = left + row_tile + 1;
    }
    *tile = prompt.Tile(tiles_, index, kv_head);
    if constexpr (kCarriesSplits) *packed_splits = __shfl_sync(~0u, packed_splits_, owner);
    return true;
  }

  __device__ Prompt PromptOf(int lane) const {
    return {lane,
            __shfl_sync(~0u, prompt_.q_begin, lane),
            __shfl_sync(~0u, prompt_.q_len, lane),
            __shfl_sync(~0u, prompt_.context_len, lane),
            __shfl_sync(~0u, prompt_.splits, lane),
            0,
            __shfl_sync(~0u, prompt_.accum_begin, lane),
            __shfl_sync(~0u, prompt_.first_splits, lane)};
  }

  PromptTiles<kRows, kShrinksTail, kLongestFirst, !std::is_same_v<Division, PlainDivision>> tiles_;
  const FastDivisor kv_heads_;
  Prompt prompt_ = {0, 0, 0, -1, 1, 0, 0};  // this lane's; no rows where it has none
  int packed_splits_ = 0;                   // its KV splits, with kCarriesSplits
  unsigned prompts_ = 0;                    // bit per lane: it has a prompt
  bool has_padding_rows_ = false;
  bool are_same_ = false;          // with kFindsFast: all prompts have the same lengths, and none is split
  bool has_decode_rows_ = false;   // with kShrinksTail or kLongestFirst
  bool has_first_splits_ = false;  // some, but not all, splits of a row tile have one CTA
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PERSISTENT_TILE_SCHEDULER_CUH_
