// The prompts of a call, listed in shared memory, and their work tiles in order.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PROMPT_LIST_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PROMPT_LIST_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/prompt_tiles.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::prefill {

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
    // Rows of split accumulators, and with Split::kSharesRound what else CrossCtaSums has.
    std::conditional_t<Split::kSharesRound, CrossCtaSums, unsigned> warp_sums[Split::kSplits ? kThreads / 32 : 1];
    int max_end;
  };

  __device__ PromptList(const PagedAttentionParams& params, unsigned group, Split split_kv, Storage& storage)
      : params_(params), split_kv_(split_kv), storage_(storage), tiles_{group} {}

  // Empties the list. A barrier of the CTA must follow before Collect.
  __device__ void Clear() {
    count_ = 0;
    all_ = {};
    if (threadIdx.x == 0) storage_.max_end = 1;
    if (threadIdx.x < kClasses) storage_.tiles_up_to[threadIdx.x] = 0;
  }

  // Whether kThreads more sequences fit.
  __device__ bool HasRoom() const { return count_ + kThreads <= kCapacity; }

  // Lists the prompts among the sequences [base, min(base + kThreads, last)): those with more rows than the decode path
  // takes. `in_order` is what QueryStartsInOrder returned.
  __device__ void Collect(int base, int last, bool in_order) {
    const int seq = base + static_cast<int>(threadIdx.x);
    SequenceInfo info{};
    if (seq < last) info = LoadSequence(params_, seq, in_order);
    Collect(seq, seq < last, info);
  }
  // The same for a sequence of each thread, where it has one.
  __device__ void Collect(int seq, bool has_one, const SequenceInfo& info) {
    const int thread = static_cast<int>(threadIdx.x);
    Prompt prompt{seq, 0, 0, -1, 1, 0, 0};
    if (has_one) {
      prompt = {seq, info.q_begin, info.q_len, info.valid ? info.context_len : -1, 1, 0, 0};
      split_kv_(&prompt);
    }
    const bool mine = prompt.q_len > params_.max_decode_tokens;
    unsigned rows = 0, rows_up_to = 0;
    CrossCtaSums sums{};
    if constexpr (Split::kSplits) {
      rows = split_kv_.policy.RowsOf(prompt.splits, prompt.q_len);
      rows_up_to = SumUpToLane(rows);
    }
    if constexpr (Split::kSharesRound) {
      const int q_len = mine ? prompt.q_len : 0;
      sums = split_kv_.policy.SumsOf(q_len, prompt.context_len, prompt.splits, split_kv_.division).OfWarp();
    }
    if (!__syncthreads_or(mine)) return;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (thread % 32 == 0) storage_.warp_counts[thread / 32] = __popc(votes);
    if constexpr (Split::kSharesRound) {
      if (thread % 32 == 31) storage_.warp_sums[thread / 32] = sums;
    } else if constexpr (Split::kSplits) {
      if (thread % 32 == 31) storage_.warp_sums[thread / 32] = rows_up_to;
    }
    __syncthreads();
    int position = count_ + __popc(votes & ((1u << thread % 32) - 1));
    unsigned accum_begin = all_.rows + rows_up_to - rows;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      if (warp < thread / 32) position += storage_.warp_counts[warp];
      count_ += storage_.warp_counts[warp];
      if constexpr (Split::kSplits) {
        CrossCtaSums others{};
        if constexpr (Split::kSharesRound) {
          others = storage_.warp_sums[warp];
        } else {
          others.rows = storage_.warp_sums[warp];
        }
        if (warp < thread / 32) accum_begin += others.rows;
        all_.Add(others);
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
    if constexpr (Split::kSplits) crossing_ = CountCrossing();
    // Each warp counts some of the prompts, up to 32 at a time: each lane reads and splits one, then each counts the
    // work tiles of all of them in its classes.
    constexpr int kWarps = kThreads / 32, kLaneClasses = kClasses / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    unsigned tiles[kLaneClasses] = {};
    for (int base = warp; base < count_; base += kThreads) {
      const int index = base + lane * kWarps;
      Prompt mine{0, 0, 0, -1, 1, 0, 0};
      if (index < count_) mine = At(index);
      const int listed = min((count_ - base + kWarps - 1) / kWarps, 32);
#pragma unroll 1
      for (int i = 0; i < listed; ++i) {
        Prompt prompt{0, 0, 0, -1, 1, 0, 0};
        prompt.q_len = __shfl_sync(~0u, mine.q_len, i);
        prompt.context_len = __shfl_sync(~0u, mine.context_len, i);
        prompt.splits = __shfl_sync(~0u, mine.splits, i);
        prompt.split_keys = __shfl_sync(~0u, mine.split_keys, i);
        const unsigned all = tiles_.Count(prompt);
#pragma unroll
        for (int j = 0; j < kLaneClasses; ++j) tiles[j] += all - tiles_.FirstEndingAt(prompt, ClassEnd(j * 32 + lane));
      }
    }
#pragma unroll
    for (int j = 0; j < kLaneClasses; ++j) {
      if (tiles[j] > 0) atomicAdd(&storage_.tiles_up_to[j * 32 + lane], tiles[j]);
    }
    __syncthreads();
    return storage_.tiles_up_to[kClasses - 1];
  }

  // Tile number `row_tile`, which must be below CountTiles(). By a warp; the result is the same in all lanes.
  // kCarriesSplits: also KvSplits::Packed of its sequence.
  template <bool kCarriesSplits = false>
  __device__ WorkTile Find(unsigned row_tile, unsigned kv_head, int* packed_splits = nullptr) const {
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
    Prompt mine{};  // with kCarriesSplits
    KvSplits my_splits{1, 0, 0};
    for (;; base += 32) {
      unsigned first = 0, last = 0;  // this lane's prompt has tiles [first, last) in the class
      if (base + lane < count_) {
        Prompt prompt;
        if constexpr (kCarriesSplits) {
          prompt = mine = At(base + lane, &my_splits);
        } else {
          prompt = At(base + lane);
        }
        first = tiles_.FirstEndingAt(prompt, ClassEnd(found));
        last = found == 0 ? tiles_.Count(prompt) : tiles_.FirstEndingAt(prompt, ClassEnd(found - 1));
      }
      if (FindAmongLanes(first, last, &left, &owner, &index)) break;
    }
    if constexpr (kCarriesSplits) {
      *packed_splits = __shfl_sync(~0u, my_splits.Packed(), owner);
      return PromptOfLane(mine, owner).Tile(tiles_, index, kv_head);
    }
    return At(base + owner).Tile(tiles_, index, kv_head);
  }

 private:
  // How many of the prompts, the first ones, have cross-CTA splits.
  __device__ int CountCrossing() const {
    const SplitKvPolicy& policy = split_kv_.policy;
    if constexpr (!Split::kSharesRound) return policy.Fits(all_.rows) ? count_ : 0;
    const unsigned row_tiles = policy.CrossCtaRowTiles(all_, split_kv_.division);
    if (row_tiles == 0) return 0;
    if (row_tiles == SplitKvPolicy::kAllRowTiles) return count_;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned tiles_before = 0, rows_before = 0;
    for (int base = 0; base < count_; base += 32) {
      Prompt prompt{0, 0, 0, -1, 1, 0, 0};
      if (base + lane < count_) {
        const int4 stored = storage_.prompts[base + lane];
        prompt = {stored.x, stored.y, stored.z, stored.w, 1, 0, 0};
      }
      const unsigned tiles = tiles_.Count(prompt);
      split_kv_(&prompt);
      const unsigned tiles_up_to = tiles_before + SumUpToLane(tiles);
      const unsigned rows_up_to = rows_before + SumUpToLane(policy.RowsOf(prompt.splits, prompt.q_len));
      const bool crosses = base + lane < count_ && tiles_up_to - tiles < row_tiles && policy.Fits(rows_up_to);
      const unsigned votes = __ballot_sync(~0u, crosses);
      if (votes != ~0u) return base + __popc(votes);
      tiles_before = __shfl_sync(~0u, tiles_up_to, 31);
      rows_before = __shfl_sync(~0u, rows_up_to, 31);
    }
    return count_;
  }

  // `splits`: null, or for the sequence's KV splits, also where these are no work tiles of their own.
  __device__ Prompt At(int index, KvSplits* splits = nullptr) const {
    const int4 stored = storage_.prompts[index];
    Prompt prompt{stored.x, stored.y, stored.z, stored.w, 1, 0, 0};
    if constexpr (Split::kSplits) {
      // NOTE: where it has too many tokens, Collect has already stored that it is invalid.
      if (splits != nullptr) {
        *splits = split_kv_(&prompt);
        if (index >= crossing_) prompt.splits = 1;
      } else if (index < crossing_) {
        split_kv_(&prompt);
      }
      prompt.seq =
          static_cast<int>(blockIdx.y) * kCapacity + static_cast<int>(static_cast<unsigned>(stored.x) % kCapacity);
      prompt.accum_begin = static_cast<int>(static_cast<unsigned>(stored.x) / kCapacity);
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
  const PromptTiles<kRows, /*kShrinksTail=*/false, /*kOwnRows=*/false, Split::kShortPlan> tiles_;
  int count_ = 0;
  int crossing_ = 0;       // prompts with cross-CTA splits
  CrossCtaSums all_ = {};  // of all prompts
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PROMPT_LIST_CUH_
