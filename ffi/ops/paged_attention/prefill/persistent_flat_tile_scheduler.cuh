// The persistent tile scheduler of the sm_90a prefill kernel for many short prompts.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PERSISTENT_FLAT_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PERSISTENT_FLAT_TILE_SCHEDULER_CUH_

#include <cstdint>

#include "ffi/device/fast_divisor.h"
#include "ffi/ops/paged_attention/prefill/persistent_tile_scheduler.cuh"
#include "ffi/ops/paged_attention/prefill/prompt_tiles.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::prefill {

// A persistent scheduler for work tiles that all take about the same time: in the order of the sequences. By the
// threads of a CTA together.
template <int kThreads, int kRows, int kMaxSequences>
class PersistentFlatTileScheduler {
 public:
  static constexpr int kSequences = kMaxSequences;  // of one row of the grid
  struct Storage {
    unsigned tiles_up_to[kMaxSequences];  // [sequence] row tiles in this sequence and in the ones before
    unsigned warp_tiles[kThreads / 32];
    int first_start;  // of the first sequence's rows
    int last_end;     // of the last one's
  };

  __device__ PersistentFlatTileScheduler(const PagedAttentionParams& params, unsigned group, FastDivisor kv_heads,
                                         Storage& storage)
      : params_(params), storage_(storage), kv_heads_(kv_heads) {
    const int thread = static_cast<int>(threadIdx.x);
    first_ = static_cast<int>(blockIdx.y) * kMaxSequences;
    const int num_live = LiveSequences(params);
    // Entries past num_seqs are loaded with the others, in one latency, and ignored. The context's length is loaded
    // here too, so that it is in L1 when it is wanted.
    const int context_len = first_ + thread < params.max_seqs ? __ldg(params.context_lens + first_ + thread) : 0;
    bool ok = true;
    for (int s = thread; s < params.max_seqs; s += kThreads) {
      const int begin = __ldg(params.query_start_loc + s);
      const int end = __ldg(params.query_start_loc + s + 1);
      ok = ok && (s >= num_live || (0 <= begin && begin <= end && end <= params.num_tokens));
      if (s == 0) storage.first_start = begin;
      if (s == num_live - 1) storage.last_end = end;
    }
    asm volatile("" ::"r"(context_len));
    in_order_ = __syncthreads_and(ok);
    count_ = max(min(num_live - first_, kMaxSequences), 0);
    unsigned total = 0;
    for (int base = 0; base < count_; base += kThreads) {
      unsigned tiles = 0;
      if (base + thread < count_) {
        const SequenceInfo info = LoadSequence(params, first_ + base + thread, in_order_);
        if (info.q_len > params.max_decode_tokens)
          tiles = (static_cast<unsigned>(info.q_len) * group + kRows - 1) / kRows;
      }
      unsigned up_to = SumUpToLane(tiles);
      if (thread % 32 == 31) storage.warp_tiles[thread / 32] = up_to;
      __syncthreads();
      for (int warp = 0; warp < kThreads / 32; ++warp) {
        if (warp == thread / 32) up_to += total;
        if (warp < thread / 32) up_to += storage.warp_tiles[warp];
      }
      for (int warp = 0; warp < kThreads / 32; ++warp) total += storage.warp_tiles[warp];
      if (base + thread < count_) storage.tiles_up_to[base + thread] = up_to;
      __syncthreads();
    }
    total_ = total * kv_heads.divisor;
    has_padding_rows_ = !in_order_ || num_live <= 0 || storage.first_start > 0 || storage.last_end < params.num_tokens;
  }

  __device__ bool IsEmpty() const { return blockIdx.x >= total_; }
  __device__ bool HasPaddingRows() const { return has_padding_rows_; }
  // Whether some sequence has as few tokens as the decode path takes. By all threads.
  __device__ bool HasDecodeRows() const {
    bool any = false;
    const int num_live = LiveSequences(params_);
    for (int s = static_cast<int>(threadIdx.x); s < num_live; s += kThreads) {
      const unsigned tokens = static_cast<unsigned>(__ldg(params_.query_start_loc + s + 1)) -
                              static_cast<unsigned>(__ldg(params_.query_start_loc + s));
      any = any || tokens - 1 < static_cast<unsigned>(params_.max_decode_tokens);
    }
    return __syncthreads_or(any);
  }

  // The `n`th work tile of this CTA; false if it has no more. By one warp; the result is the same in all lanes.
  __device__ bool Find(unsigned n, WorkTile* tile) const {
    const unsigned rank = PersistentRank(n);
    if (rank >= total_) return false;
    const unsigned row_tile = kv_heads_.Divide(rank);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int found = 0;
    for (int base = 0; base < count_; base += 32) {
      const bool before = base + lane < count_ && storage_.tiles_up_to[base + lane] <= row_tile;
      found += __popc(__ballot_sync(~0u, before));
    }
    const unsigned begin = found == 0 ? 0 : storage_.tiles_up_to[found - 1];
    const SequenceInfo info = LoadSequence(params_, first_ + found, in_order_);
    *tile = {first_ + found,
             info.q_begin,
             info.q_len,
             info.context_len,
             info.valid,
             (row_tile - begin) * kRows,
             kRows,
             static_cast<int>(rank - row_tile * kv_heads_.divisor),
             0,
             -1};
    return true;
  }

 private:
  const PagedAttentionParams& params_;
  Storage& storage_;
  const FastDivisor kv_heads_;
  int first_ = 0, count_ = 0;  // the sequences of this row of the grid
  unsigned total_ = 0;         // work tiles of all kv heads
  bool in_order_ = false;
  bool has_padding_rows_ = false;
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PERSISTENT_FLAT_TILE_SCHEDULER_CUH_
