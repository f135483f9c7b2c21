// Which work a CTA of the sm_90a kernels takes. Units, the row tiles of a sequence that a CTA group takes at a time,
// lie behind each other in a linearised space of key tiles, sequence by sequence; a unit is as long as its key tiles
// and unit_cost. Each CTA group takes an equal share of the space, so that a unit may belong to several, which then
// share its keys; or as many whole units as any other, where sharing keys would cost more than it saves; or one of as
// many equal parts of a unit as there are CTA groups for, where units are about equally long.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_SCHEDULE_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_SCHEDULE_CUH_

#include <cstdint>

#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/mla_attention/sm90_units.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::mla {

// In the time of a key tile: to begin and to end a unit (unit_cost), and to share its keys.
inline constexpr int kUnitCost = 3, kFewRowsUnitCost = 1;
inline constexpr int kSplitCost = 5;
// And for a CTA to take the end of a unit and the begin of another instead of one part.
inline constexpr int kSecondUnitCost = 2;
// The least key tiles of equal parts. With fewer the parts would be more, and merging them dearer, than with shares.
inline constexpr int kMinEqualPart = 2;

template <typename Int>
__device__ inline Int InclusiveWarpSum(Int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Int before = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// Asks for the page numbers of sequence s to come to L2. Each CTA does so for other sequences.
__device__ inline void PrefetchPages(const Sm90Params& params, int s, int context_len) {
  constexpr int kLine = 128, kMaxLines = 16;
  if (static_cast<unsigned>(s) % gridDim.x != blockIdx.x) return;
  const int64_t slots = params.attention.pages_per_seq * params.attention.page_size;
  if (context_len <= 0 || context_len > slots) return;
  const int pages = static_cast<int>(params.page.Divide(static_cast<uint32_t>(context_len - 1))) + 1;
  const auto* const table =
      reinterpret_cast<const char*>(params.attention.block_tables + s * params.attention.pages_per_seq);
  const int bytes = min(pages * 4, kMaxLines * kLine);
#pragma unroll 1
  for (int at = 0; at < bytes; at += kLine) asm volatile("prefetch.global.L2 [%0];" ::"l"(table + at));
}

// What follows from the metadata as such. A thread's first sequence is read before it is known how many are live, so
// that what follows finds all of it in L1, and does not wait for memory several times. By all threads of the CTA.
struct LiveMetadata {
  int num_live;  // -1: no sequence is live, since num_seqs is wrong
  bool in_order;

  __device__ explicit LiveMetadata(const Sm90Params& params) {
    const PagedAttentionParams& attention = params.attention;
    auto s = static_cast<int>(threadIdx.x);
    int begin = 0, end = 0, context_len = 0;
    if (s < attention.max_seqs) {
      begin = LoadBehindWait(attention.query_start_loc + s);
      end = LoadBehindWait(attention.query_start_loc + s + 1);
      context_len = LoadBehindWait(attention.context_lens + s);
    }
    num_live = LiveSequences(attention);
    bool ok = true;
    if (s < num_live) {
      ok = 0 <= begin && begin <= end && end <= attention.num_tokens;
      PrefetchPages(params, s, context_len);
    }
    for (s += static_cast<int>(blockDim.x); s < num_live; s += static_cast<int>(blockDim.x)) {
      begin = __ldg(attention.query_start_loc + s);
      end = __ldg(attention.query_start_loc + s + 1);
      ok = ok && 0 <= begin && begin <= end && end <= attention.num_tokens;
    }
    in_order = __syncthreads_and(ok);
  }
};

class Schedule : public LiveMetadata {
 public:
  UnitLength length;
  int64_t share;       // of a CTA group
  int64_t begin, end;  // this CTA group's; nothing to do where begin >= end
  int sequence;        // in which `begin` lies
  int64_t start;       // of that sequence

  // By all threads of the CTA. Contains barriers of all of them.
  __device__ Schedule(const Sm90Params& params, ScheduleStorage& shared)
      : LiveMetadata(params), length{1, params.unit_cost} {
    const int threads = static_cast<int>(blockDim.x), warps = threads / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;

    // ---- How much there is
    int64_t cost = 0, units = 0;  // of this thread's sequences, then up to them in the warp
    int longest = 0;
    for (int s = static_cast<int>(threadIdx.x); s < num_live; s += threads) {
      const SequenceUnits mine(params, LoadSequenceInline(params.attention, s, in_order));
      if (mine.count == 0) continue;
      cost += mine.Length(length);
      units += mine.count;
      longest = max(longest, length.Of(mine.last_key_tiles));
    }
    const int64_t own_cost = cost, own_units = units;
    cost = InclusiveWarpSum(cost, lane);
    units = InclusiveWarpSum(units, lane);
    longest = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(longest)));
    if (lane == 31) {
      shared.warp_costs[warp] = cost;
      shared.warp_units[warp] = units;
      shared.warp_longest[warp] = longest;
    }
    __syncthreads();
    int64_t total = 0, all_units = 0;
    int64_t cost_before = 0, units_before = 0;  // of the warps before this one
    longest = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      const bool there = w < warps, before = w < warp;
      const int64_t warp_cost = shared.warp_costs[w], warp_units = shared.warp_units[w];
      total += there ? warp_cost : 0;
      all_units += there ? warp_units : 0;
      cost_before += before ? warp_cost : 0;
      units_before += before ? warp_units : 0;
      longest = max(longest, there ? shared.warp_longest[w] : 0);
    }

    // ---- This CTA group's share
    const int groups = static_cast<int>(gridDim.x) / params.group_ctas;
    const int group = static_cast<int>(blockIdx.x) / params.group_ctas;
    share = (total + groups - 1) / groups;
    const int64_t whole_units = (all_units + groups - 1) / groups;
    if (whole_units * longest <= share + kSplitCost) {
      length = {0, 1};
      total = all_units;
      share = whole_units;
    } else if (all_units > 0 && all_units <= groups) {
      const int parts = groups / static_cast<int>(all_units);
      const int longest_part = (longest - params.unit_cost + parts - 1) / parts;  // key tiles
      if (parts > 1 && longest_part >= kMinEqualPart && longest_part + params.unit_cost <= share + kSecondUnitCost) {
        length = {0, parts};
        total = all_units * parts;
        share = 1;
      }
    }
    begin = group * share;
    end = min(begin + share, total);
    sequence = 0;
    start = 0;
    if (begin >= end) return;

    // ---- The sequence in which it begins
    if (num_live <= threads) {
      const bool by_cost = length.per_key_tile != 0;
      const int64_t up_to = by_cost ? cost_before + cost : (units_before + units) * length.constant;
      const int64_t mine = by_cost ? own_cost : own_units * length.constant;
      FindHere(static_cast<int>(threadIdx.x), up_to - mine, up_to, shared);
    } else {
      FindInBatches(params, threads, shared);
    }
    __syncthreads();
    sequence = shared.found_sequence;
    start = shared.found_start;
  }

 private:
  // Sequence s lies at [first, end).
  __device__ void FindHere(int s, int64_t first, int64_t end, ScheduleStorage& shared) const {
    if (begin < first || begin >= end) return;
    shared.found_sequence = s;
    shared.found_start = first;
  }

  // Where there are more sequences than threads. By all threads of the CTA.
  __device__ void FindInBatches(const Sm90Params& params, int threads, ScheduleStorage& shared) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int64_t before = 0;
    for (int first = 0; first < num_live; first += threads) {
      const int s = first + static_cast<int>(threadIdx.x);
      int64_t mine = 0;
      if (s < num_live) mine = SequenceUnits(params, LoadSequenceInline(params.attention, s, in_order)).Length(length);
      const int64_t up_to = InclusiveWarpSum(mine, lane);
      __syncthreads();
      if (lane == 31) shared.warp_costs[warp] = up_to;
      __syncthreads();
      int64_t base = before;
      for (int w = 0; w < threads / 32; ++w) {
        if (w < warp) base += shared.warp_costs[w];
        before += shared.warp_costs[w];
      }
      FindHere(s, base + up_to - mine, base + up_to, shared);
      if (begin < before) return;  // the same in all threads
    }
  }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_SCHEDULE_CUH_
