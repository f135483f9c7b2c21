// Which tile of query rows a block of the prefill kernels works on. Planned on the device: each block finds its tiles
// from the metadata alone, so that the launch depends on shapes only.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_SCHEDULE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_SCHEDULE_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/paged_attention_decode.h"
#include "ffi/ops/paged_attention/paged_attention_metadata.cuh"

namespace xla_gpu {

// The query heads of one kv head share a pass over K and V: their rows of one sequence are counted together, packed row
// r being token r / group of the sequence and head r % group of the kv head. A tile is kRows consecutive packed rows.
struct PrefillTile {
  int seq;
  int q_begin;  // row of `query` where the sequence begins
  int q_len;
  int context_len;
  bool valid;  // false: the rows become NaN
  int index;   // the tile covers packed rows [index * kRows, (index + 1) * kRows) of the sequence
  int kv_head;
};

// Finds tiles by rank, in the order of the last key that a tile sees, latest first: a tile's time grows with it, and
// blocks start in the order of their number, so that the last ones to start are short. The order is by classes, as many
// as the block has threads, of equal width in key positions; it decides when a tile is done, never what it computes.
template <int kThreads, int kRows>
class PrefillSchedule {
 public:
  // Sequences that are looked at together; more of them (over kCapacity prompts in one call) follow in further batches.
  static constexpr int kCapacity = 1024;
  struct Sequence {
    int seq;
    int q_begin;
    int q_len;
    int end;  // position after the last row's; at least q_len, so that all tiles end at positive positions
  };
  struct Storage {
    Sequence sequences[kCapacity];
    unsigned tiles_up_to[kThreads];  // [class] tiles in this class and in the ones before
    int warp_counts[kThreads / 32];
    int max_end;
    PrefillTile tile;
  };

  // By all threads of the block together.
  __device__ PrefillSchedule(const PagedAttentionParams& params, Storage& storage)
      : params_(params),
        storage_(storage),
        group_(static_cast<unsigned>(params.num_heads / params.num_kv_heads)),
        num_live_(LiveSequences(params)),
        in_order_(QueryStartsInOrder(params, num_live_)) {}

  // The tile of the given rank (over all sequences and kv heads; kv heads next to each other), read by all threads; or
  // false, if there are no more than `*total`. To be called by the whole block, with a barrier before the storage is
  // used for something else.
  __device__ bool Find(unsigned rank, PrefillTile* tile, unsigned* total) {
    const auto kv_heads = static_cast<unsigned>(params_.num_kv_heads);
    const unsigned row_tile = rank / kv_heads;
    unsigned before = 0;  // tiles of the batches so far
    for (int next = 0; next < num_live_;) {
      int count = 0;
      next = Collect(next, &count);
      const unsigned in_batch = CountTiles(count);
      if (row_tile < before + in_batch) {
        Search(row_tile - before, count);
        *tile = storage_.tile;
        tile->kv_head = static_cast<int>(rank - row_tile * kv_heads);
        return true;
      }
      before += in_batch;
      __syncthreads();
    }
    *total = before * kv_heads;
    return false;
  }

 private:
  __device__ unsigned NumTiles(const Sequence& s) const {
    return (static_cast<unsigned>(s.q_len) * group_ + kRows - 1) / kRows;
  }

  // The first tile of `s` whose end, one past the position of its last row, is `end` or later.
  __device__ unsigned FirstTileEndingAt(const Sequence& s, int end) const {
    const int tokens = end - (s.end - s.q_len);
    if (tokens > s.q_len) return NumTiles(s);
    return tokens <= 1 ? 0 : static_cast<unsigned>(tokens - 1) * group_ / kRows;
  }

  // The smallest end of a tile in class `index`.
  __device__ int ClassEnd(int index) const {
    const int width = (storage_.max_end + kThreads - 1) / kThreads;
    return storage_.max_end - (index + 1) * width + 1;
  }

  // Lists the sequences from `first` on that have more rows than the decode path takes. Returns where to go on.
  __device__ int Collect(int first, int* count) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) storage_.max_end = 1;
    __syncthreads();
    int listed = 0;
    for (; first < num_live_ && listed + kThreads <= kCapacity; first += kThreads) {
      const int seq = first + thread;
      SequenceInfo info{};
      if (seq < num_live_) info = LoadSequence(params_, seq, in_order_);
      const bool mine = info.q_len > kMaxDecodeRows;
      const unsigned votes = __ballot_sync(~0u, mine);
      if (thread % 32 == 0) storage_.warp_counts[thread / 32] = __popc(votes);
      __syncthreads();
      int position = listed + __popc(votes & ((1u << thread % 32) - 1));
      for (int warp = 0; warp < kThreads / 32; ++warp) {
        if (warp < thread / 32) position += storage_.warp_counts[warp];
        listed += storage_.warp_counts[warp];
      }
      if (mine) {
        const int end = info.valid ? max(info.context_len, info.q_len) : info.q_len;
        storage_.sequences[position] = {seq, info.q_begin, info.q_len, end};
        atomicMax(&storage_.max_end, end);
      }
      __syncthreads();
    }
    *count = listed;
    return first;
  }

  // Fills tiles_up_to; returns the number of tiles of the listed sequences.
  __device__ unsigned CountTiles(int count) {
    const int end = ClassEnd(static_cast<int>(threadIdx.x));
    unsigned tiles = 0;
    for (int i = 0; i < count; ++i) {
      const Sequence& s = storage_.sequences[i];
      tiles += NumTiles(s) - FirstTileEndingAt(s, end);
    }
    storage_.tiles_up_to[threadIdx.x] = tiles;
    __syncthreads();
    return storage_.tiles_up_to[kThreads - 1];
  }

  __device__ void Search(unsigned rank, int count) {
    const int found = __syncthreads_count(storage_.tiles_up_to[threadIdx.x] <= rank);  // the class
    if (threadIdx.x < 32) {
      unsigned left = rank - (found == 0 ? 0 : storage_.tiles_up_to[found - 1]);
      const int lane = static_cast<int>(threadIdx.x);
      for (int base = 0; base < count; base += 32) {
        unsigned first = 0, last = 0;  // this lane's sequence has tiles [first, last) in the class
        if (base + lane < count) {
          const Sequence& s = storage_.sequences[base + lane];
          first = FirstTileEndingAt(s, ClassEnd(found));
          last = found == 0 ? NumTiles(s) : FirstTileEndingAt(s, ClassEnd(found - 1));
        }
        unsigned sum = last - first;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const unsigned other = __shfl_up_sync(~0u, sum, step);
          if (lane >= step) sum += other;
        }
        const unsigned all = __shfl_sync(~0u, sum, 31);
        if (left < all) {
          const unsigned excluded = sum - (last - first);
          if (left >= excluded && left < sum) {
            const SequenceInfo info = LoadSequence(params_, storage_.sequences[base + lane].seq, in_order_);
            storage_.tile = {storage_.sequences[base + lane].seq,
                             info.q_begin,
                             info.q_len,
                             info.context_len,
                             info.valid,
                             static_cast<int>(last - 1 - (left - excluded)),
                             /*kv_head=*/0};
          }
          break;
        }
        left -= all;
      }
    }
    __syncthreads();
  }

  const PagedAttentionParams& params_;
  Storage& storage_;
  const unsigned group_;
  const int num_live_;
  const bool in_order_;
};

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_SCHEDULE_CUH_
