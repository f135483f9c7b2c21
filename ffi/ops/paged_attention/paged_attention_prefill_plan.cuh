// Which tiles of query rows a resident block of the sm_90a prefill kernel works on, one after the other. Made by each
// block from the metadata alone, so that the launch depends on shapes only and no memory holds a counter. Tiles and
// their order are those of paged_attention_prefill_schedule.cuh.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_PLAN_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_PLAN_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention_metadata.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_schedule.cuh"

namespace xla_gpu {

// Ranks go by the last key that a tile sees, latest first, in kClasses classes of equal width in key positions. Block b
// of n takes the ranks b, 2n - 1 - b, 2n + b, …: there and back, which gives all blocks about the same sum.
template <int kThreads, int kRows, int kMaxSequences, int kNumClasses>
class PrefillPlan {
 public:
  // Sequences of one row of blocks: row y has those from y * kSequences on.
  static constexpr int kSequences = kMaxSequences;
  static constexpr int kClasses = kNumClasses;
  struct Prompt {
    int seq;
    int q_begin;
    int q_len;
    int context_len;  // -1 where it is wrong
  };
  struct Storage {
    Prompt prompts[kSequences];
    unsigned tiles_up_to[kClasses];  // [class] tiles in this class and in the ones before
    int warp_counts[kThreads / 32];
    int max_end;
    int first_start;  // of the first sequence's rows
    int last_end;     // of the last one's
  };

  // By all threads of the block together, with a barrier before `Find`.
  __device__ PrefillPlan(const PagedAttentionParams& params, unsigned group, Storage& storage)
      : params_(params), storage_(storage), group_(group), num_live_(LiveSequences(params)) {
    const int thread = static_cast<int>(threadIdx.x);
    const int first = static_cast<int>(blockIdx.y) * kSequences;
    if (thread == 0) storage_.max_end = 1;
    // One latency for all that most calls need: entries past num_seqs are loaded with the others, and ignored.
    const int context_len = first + thread < params.max_seqs ? __ldg(params.context_lens + first + thread) : 0;
    bool ok = true;
    for (int s = thread; s < params.max_seqs; s += kThreads) {
      const int begin = __ldg(params.query_start_loc + s);
      const int end = __ldg(params.query_start_loc + s + 1);
      ok = ok && (s >= num_live_ || (0 <= begin && begin <= end && end <= params.num_tokens));
      if (s == 0) storage_.first_start = begin;
      if (s == num_live_ - 1) storage_.last_end = end;
    }
    in_order_ = __syncthreads_and(ok);
    count_ = 0;
    const int last = min(num_live_, first + kSequences);
    for (int base = first; base < last; base += kThreads) {
      Collect(base, last, base == first ? context_len : -1, base == first);
    }
    total_ = count_ == 0 ? 0 : CountTiles() * static_cast<unsigned>(params.num_kv_heads);
  }

  // Tiles of all kv heads.
  __device__ unsigned Total() const { return total_; }

  // Whether there may be rows that no sequence owns.
  __device__ bool HasUnownedRows() const {
    return !in_order_ || num_live_ <= 0 || storage_.first_start > 0 || storage_.last_end < params_.num_tokens;
  }

  // The `n`th tile of this block; false if it has no more than that. By one warp; the result is the same in all lanes.
  __device__ bool Find(unsigned n, PrefillTile* tile) const {
    const unsigned rank = n * gridDim.x + (n % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    if (rank >= total_) return false;
    const auto kv_heads = static_cast<unsigned>(params_.num_kv_heads);
    const unsigned row_tile = rank / kv_heads;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int found = 0;  // the class
#pragma unroll
    for (int i = 0; i < kClasses / 32; ++i) {
      found += __popc(__ballot_sync(~0u, storage_.tiles_up_to[i * 32 + lane] <= row_tile));
    }
    unsigned left = row_tile - (found == 0 ? 0 : storage_.tiles_up_to[found - 1]);
    for (int base = 0; base < count_; base += 32) {
      unsigned first = 0, last = 0;  // this lane's prompt has tiles [first, last) in the class
      if (base + lane < count_) {
        const Prompt& prompt = storage_.prompts[base + lane];
        first = FirstTileEndingAt(prompt, ClassEnd(found));
        last = found == 0 ? NumTiles(prompt) : FirstTileEndingAt(prompt, ClassEnd(found - 1));
      }
      unsigned sum = last - first;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const unsigned all = __shfl_sync(~0u, sum, 31);
      if (left < all) {
        const int owner = __popc(__ballot_sync(~0u, sum <= left));
        const unsigned before = __shfl_sync(~0u, sum - (last - first), owner);
        const unsigned end = __shfl_sync(~0u, last, owner);
        const Prompt& prompt = storage_.prompts[base + owner];
        const bool valid = prompt.context_len >= 0;
        *tile = {prompt.seq,
                 prompt.q_begin,
                 prompt.q_len,
                 valid ? prompt.context_len : 0,
                 valid,
                 static_cast<int>(end - 1 - (left - before)),
                 static_cast<int>(rank - row_tile * kv_heads)};
        return true;
      }
      left -= all;
    }
    return false;  // never: `left` is smaller than the tiles of the class
  }

 private:
  // Position after the last row's; at least q_len, so that all tiles end at positive positions.
  static __device__ int End(const Prompt& prompt) { return max(prompt.context_len, prompt.q_len); }

  __device__ unsigned NumTiles(const Prompt& prompt) const {
    return (static_cast<unsigned>(prompt.q_len) * group_ + kRows - 1) / kRows;
  }

  // The first tile whose end, one past the position of its last row, is `end` or later.
  __device__ unsigned FirstTileEndingAt(const Prompt& prompt, int end) const {
    const int tokens = end - (End(prompt) - prompt.q_len);
    if (tokens > prompt.q_len) return NumTiles(prompt);
    return tokens <= 1 ? 0 : static_cast<unsigned>(tokens - 1) * group_ / kRows;
  }

  // The smallest end of a tile in class `index`.
  __device__ int ClassEnd(int index) const {
    const int width = (storage_.max_end + kClasses - 1) / kClasses;
    return storage_.max_end - (index + 1) * width + 1;
  }

  // Lists those of the sequences [base, base + kThreads) and below `last` that have more rows than the decode path
  // takes. `context_len`: this thread's sequence's, if `loaded`.
  __device__ void Collect(int base, int last, int context_len, bool loaded) {
    const int thread = static_cast<int>(threadIdx.x);
    Prompt prompt{base + thread, 0, 0, -1};
    if (prompt.seq < last) {
      const int begin = __ldg(params_.query_start_loc + prompt.seq);
      const int end = __ldg(params_.query_start_loc + prompt.seq + 1);
      if (!loaded) context_len = __ldg(params_.context_lens + prompt.seq);
      bool owns = 0 <= begin && begin <= end && end <= params_.num_tokens;
      if (!in_order_) {
        owns = owns && NoEarlierStartAbove(params_.query_start_loc, params_.num_tokens, prompt.seq, begin);
      }
      prompt.q_begin = begin;
      prompt.q_len = owns ? end - begin : 0;
      if (context_len >= 0 && context_len <= params_.pages_per_seq * params_.page_size) {
        prompt.context_len = context_len;
      }
    }
    const bool mine = prompt.q_len > kMaxDecodeRows;
    if (!__syncthreads_or(mine)) return;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (thread % 32 == 0) storage_.warp_counts[thread / 32] = __popc(votes);
    __syncthreads();
    int position = count_ + __popc(votes & ((1u << thread % 32) - 1));
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      if (warp < thread / 32) position += storage_.warp_counts[warp];
      count_ += storage_.warp_counts[warp];
    }
    if (mine) {
      storage_.prompts[position] = prompt;
      atomicMax(&storage_.max_end, End(prompt));
    }
    __syncthreads();
  }

  // Fills tiles_up_to; returns the number of tiles of the listed sequences.
  __device__ unsigned CountTiles() {
    static_assert(kClasses <= kThreads);
    if (threadIdx.x < kClasses) {
      const int end = ClassEnd(static_cast<int>(threadIdx.x));
      unsigned tiles = 0;
      for (int i = 0; i < count_; ++i) {
        const Prompt& prompt = storage_.prompts[i];
        tiles += NumTiles(prompt) - FirstTileEndingAt(prompt, end);
      }
      storage_.tiles_up_to[threadIdx.x] = tiles;
    }
    __syncthreads();
    return storage_.tiles_up_to[kClasses - 1];
  }

  const PagedAttentionParams& params_;
  Storage& storage_;
  const unsigned group_;
  const int num_live_;
  int count_;  // prompts listed
  unsigned total_;
  bool in_order_;
};

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_PLAN_CUH_
