// Who computes what in the decode path, worked out by every block for itself from the metadata.
//
// A unit is a sequence, a kv head and a tile of query rows. The keys that a sequence's queries see are cut into chunks,
// at most kMaxChunks of them, whose length is a function of the number of keys alone. The chunks of all units, one
// after the other, are laid out on a line, each as long as its blocks of keys, and every worker (a block of the split
// kernel) owns those that begin in its part of the line. So the load is even whatever the lengths are, while a chunk's
// bits, and how chunks are merged (eight to a group, then the groups, from left to right), depend on the sequence
// alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_PLAN_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_PLAN_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"
#include "ffi/ops/paged_attention/paged_attention_metadata.cuh"

namespace xla_gpu::decode {

// A sequence of the plan's window. One without chunks is not of the decode path.
struct PlanEntry {
  uint64_t begin;  // of its first unit, on the line
  int32_t q_begin;
  int32_t first_key;  // keys before it are hidden from all of the sequence's queries
  int32_t end_key;
  int32_t blocks;  // of a chunk, each of kBlockKeys keys
  int32_t units;   // row tiles of a kv head
  uint8_t q_len;
  uint8_t chunks;  // of a unit
  bool valid;      // context_len is; if not, there are no keys

  __device__ unsigned UnitLength() const { return static_cast<unsigned>(chunks * blocks); }
  // The unit that is `into` the entry's part of the line.
  __device__ unsigned UnitAt(uint64_t into) const {
    const unsigned length = UnitLength();
    return static_cast<unsigned>(into >> 32 ? into / length : static_cast<uint32_t>(into) / length);
  }
  __device__ uint64_t End(const DecodeArgs& args) const {
    return begin + static_cast<uint64_t>(UnitLength()) * (units * args.params.num_kv_heads);
  }
};
static_assert(sizeof(PlanEntry) == 32 && kMaxChunks < 256 && kMaxDecodeRows < 256);

// kBlockKeys, kRows: the shape's.
template <int kThreads, int kBlockKeys, int kRows>
struct PlanShared {
  PlanEntry entries[kThreads];  // the window, in order; those past the live ones are empty
  uint64_t warp_sums[kThreads / 32];
  uint64_t window_end;  // on the line
  int window;           // its first sequence
};

// This thread's entry of a window, given what the metadata says of its sequence; without `owned` an empty one.
template <int kBlockKeys, int kRows>
__device__ inline PlanEntry MakePlanEntry(const DecodeArgs& args, bool owned, int q_begin, int q_len, int context_len) {
  PlanEntry entry = {};
  if (!owned || q_len < 1 || q_len > kMaxDecodeRows) return entry;
  const bool valid = context_len >= 0 && context_len <= args.params.pages_per_seq * args.params.page_size &&
                     (context_len == 0 || args.num_pages > 0);
  entry.q_begin = q_begin;
  entry.q_len = static_cast<uint8_t>(q_len);
  entry.valid = valid;
  entry.end_key = valid ? context_len : 0;
  if (args.window > 0) {
    const int64_t hidden = int64_t{entry.end_key} - q_len - args.window + 1;
    entry.first_key = hidden > 0 ? static_cast<int>(hidden) : 0;
  }
  // An empty sequence has one empty chunk: somebody has to write its rows.
  const unsigned blocks = static_cast<unsigned>(max((entry.end_key - entry.first_key - 1) / kBlockKeys + 1, 1));
  const unsigned least = blocks >= 8192 / kBlockKeys ? 4 : blocks >= 2048 / kBlockKeys ? 2 : 1;
  const unsigned per_chunk = max((blocks + kMaxChunks - 1) / kMaxChunks, least);
  entry.blocks = static_cast<int>(per_chunk);
  entry.chunks = static_cast<uint8_t>((blocks + per_chunk - 1) / per_chunk);
  entry.units = (q_len * args.group + kRows - 1) / kRows;
  return entry;
}

// Gives the window's entries, one of each thread, their places on the line, from `start` on.
template <int kThreads, int kBlockKeys, int kRows>
__device__ inline void FillWindow(const DecodeArgs& args, PlanShared<kThreads, kBlockKeys, kRows>& shared,
                                  PlanEntry entry, int window, uint64_t start) {
  const uint64_t length = entry.End(args);  // its `begin` is 0
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  uint64_t end = length;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint64_t before = __shfl_up_sync(0xffffffffu, end, i);
    if (lane >= i) end += before;
  }
  if (lane == 31) shared.warp_sums[warp] = end;
  __syncthreads();
  uint64_t all = start;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i == warp) end += all;
    all += shared.warp_sums[i];
  }
  entry.begin = end - length;
  shared.entries[threadIdx.x] = entry;
  if (threadIdx.x == 0) {
    shared.window = window;
    shared.window_end = all;
  }
  __syncthreads();
}

// NOTE: not inlined, since only batches of many sequences and wrong metadata need it.
template <int kThreads, int kBlockKeys, int kRows>
__device__ __noinline__ void LoadWindow(const DecodeArgs& args, PlanShared<kThreads, kBlockKeys, kRows>& shared,
                                        int window, uint64_t start, int live, bool in_order) {
  const int s = window + static_cast<int>(threadIdx.x);
  PlanEntry entry = {};
  if (s < live) {
    const SequenceInfo info = LoadSequence(args.params, s, in_order);
    entry = MakePlanEntry<kBlockKeys, kRows>(args, info.owned, info.q_begin, info.q_len,
                                             info.valid ? info.context_len : -1);
  }
  __syncthreads();  // the last window is no longer read
  FillWindow(args, shared, entry, window, start);
}

// Where a unit is.
struct UnitPlace {
  int kv_head;
  int row_tile;
  uint64_t begin;  // on the line

  __device__ static UnitPlace Of(const PlanEntry& entry, unsigned unit) {
    const unsigned head = unit / static_cast<unsigned>(entry.units);
    return {static_cast<int>(head), static_cast<int>(unit - head * static_cast<unsigned>(entry.units)),
            entry.begin + static_cast<uint64_t>(unit) * entry.UnitLength()};
  }
};

// Its index among all that the call may have: sequences' tokens are their own, and a token begins at most
// tiles_per_token row tiles.
__device__ inline int64_t UnitIndex(const DecodeArgs& args, int q_begin, int kv_head, int row_tile) {
  return (int64_t{q_begin} * args.tiles_per_token + row_tile) * args.params.num_kv_heads + kv_head;
}
// The other way round: the kv head, and what is left of the index.
struct UnitOfIndex {
  int kv_head;
  int64_t tile;

  __device__ UnitOfIndex(const DecodeArgs& args, unsigned index) {
    const unsigned heads = static_cast<unsigned>(args.params.num_kv_heads);
    tile = index / heads;
    kv_head = static_cast<int>(index - static_cast<unsigned>(tile) * heads);
  }
  // The row tile if it is one of a sequence with these tokens, or -1.
  __device__ int RowTile(const DecodeArgs& args, int q_begin, int tiles) const {
    const int64_t row_tile = tile - int64_t{q_begin} * args.tiles_per_token;
    return 0 <= row_tile && row_tile < tiles ? static_cast<int>(row_tile) : -1;
  }
};

// A unit of which several workers have chunks, for those that merge their results.
struct MergeJob {
  uint64_t begin;       // of the unit, on the line
  uint64_t per_worker;  // of the line
  int32_t chunks;       // 0: no such unit
  int32_t blocks;       // of a chunk
  int32_t q_begin;
  int32_t q_len;
  int32_t kv_head;
  int32_t row_tile;
};

// False if no sequence can be of the decode path; asked only where that is likely. By all threads of a block together.
__device__ inline bool MayHaveDecodeRows(const DecodeArgs& args) {
  const PagedAttentionParams& params = args.params;
  if (params.num_tokens <= params.max_seqs * kMaxDecodeRows) return true;
  bool any = false;
  for (int64_t s = threadIdx.x; s < params.max_seqs; s += blockDim.x) {
    const int64_t rows = int64_t{__ldg(params.query_start_loc + s + 1)} - __ldg(params.query_start_loc + s);
    any = any || (1 <= rows && rows <= kMaxDecodeRows);
  }
  return __syncthreads_or(any);
}

// All threads of a block build the plan, and call its functions that are not const, together.
template <int kThreads, int kBlockKeys, int kRows>
class Plan {
 public:
  using Shared = PlanShared<kThreads, kBlockKeys, kRows>;

  __device__ Plan(const DecodeArgs& args, Shared& shared) : args_(args), shared_(shared) {
    const PagedAttentionParams& params = args.params;
    // The entries of this thread are fetched before num_seqs is known; those that are not live are not looked at.
    const int s = static_cast<int>(threadIdx.x);
    int begin = 0, end = 0, context_len = 0;
    if (s < params.max_seqs) {
      begin = __ldg(params.query_start_loc + s);
      end = __ldg(params.query_start_loc + s + 1);
      context_len = __ldg(params.context_lens + s);
    }
    live_ = max(LiveSequences(params), 0);
    bool ok = s >= live_ || (0 <= begin && begin <= end && end <= params.num_tokens);
    if (live_ > kThreads) ok = QueryStartsInOrder(params, live_);
    in_order_ = __syncthreads_and(ok);
    if (in_order_) {
      FillWindow(args, shared, MakePlanEntry<kBlockKeys, kRows>(args, s < live_, begin, end - begin, context_len), 0,
                 0);
    } else {
      LoadWindow(args, shared, 0, 0, live_, in_order_);
    }
    if (live_ > kThreads) {
      while (shared.window + kThreads < live_) NextWindow();
      total_ = shared.window_end;
      LoadWindow(args, shared, 0, 0, live_, in_order_);
    } else {
      total_ = shared.window_end;
    }
    const uint64_t rounded = total_ + args.workers - 1;
    const uint32_t workers = static_cast<uint32_t>(args.workers);
    per_worker_ = rounded >> 32 ? rounded / workers : static_cast<uint32_t>(rounded) / workers;
    if (per_worker_ == 0) per_worker_ = 1;
    if (live_ <= kThreads && per_worker_ >> 31 == 0) Align();
  }

  __device__ uint64_t Total() const { return total_; }
  __device__ uint64_t WorkerBegin(unsigned worker) const { return worker * per_worker_; }
  // The entry of the window that holds `position`, which lies in the window.
  __device__ int Search(uint64_t position) const {
    int low = 0, high = kThreads;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (shared_.entries[middle].begin <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  // Of a unit of an entry.
  __device__ MergeJob Job(const PlanEntry& entry, unsigned unit) const {
    const UnitPlace place = UnitPlace::Of(entry, unit);
    return {place.begin,   per_worker_, entry.chunks,  entry.blocks,
            entry.q_begin, entry.q_len, place.kv_head, place.row_tile};
  }

  // The entry that holds `position` < Total(), which does not lie before the window.
  __device__ int Find(uint64_t position) {
    while (position >= shared_.window_end) NextWindow();
    return Search(position);
  }

  // The next entry with chunks, which must exist.
  __device__ int Next(int entry) {
    do {
      if (++entry == kThreads) {
        NextWindow();
        entry = 0;
      }
    } while (shared_.entries[entry].chunks == 0);
    return entry;
  }

  // The window: of the live sequences those from Window() on, its part of the line up to WindowEnd().
  __device__ int Window() const { return shared_.window; }
  __device__ uint64_t WindowEnd() const { return shared_.window_end; }
  __device__ bool LastWindow() const { return shared_.window + kThreads >= live_; }
  __device__ void FirstWindow() { LoadWindow(args_, shared_, 0, 0, live_, in_order_); }
  __device__ void NextWindow() {
    LoadWindow(args_, shared_, shared_.window + kThreads, shared_.window_end, live_, in_order_);
  }

  __device__ const PlanEntry& At(int entry) const { return shared_.entries[entry]; }
  __device__ int SequenceOf(int entry) const { return shared_.window + entry; }

 private:
  // Where all units are of a length, a little more for each worker may save much merging: whole units, or an equal part
  // of a unit.
  __device__ void Align() {
    const PlanEntry& mine = shared_.entries[threadIdx.x];
    const PlanEntry& other = shared_.entries[0];
    const unsigned length = other.UnitLength();
    const bool alike = mine.chunks == 0 || mine.UnitLength() == length;
    if (!__syncthreads_and(alike) || length == 0) return;
    const unsigned share = static_cast<unsigned>(per_worker_);
    const unsigned most = share + share / 16;
    const unsigned units = (share + length - 1) / length;
    if (units * uint64_t{length} <= most) {
      per_worker_ = units * uint64_t{length};
      return;
    }
    const unsigned blocks = static_cast<unsigned>(other.blocks);
    for (unsigned parts = length / share; parts > 1 && length / parts <= most; --parts) {
      if (length % (parts * blocks) != 0) continue;
      per_worker_ = length / parts;
      return;
    }
  }

  const DecodeArgs& args_;
  Shared& shared_;
  int live_;
  bool in_order_;
  uint64_t total_;
  uint64_t per_worker_;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_PLAN_CUH_
