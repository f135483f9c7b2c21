// The split accumulators of the sm_90a prefill kernel, and the combine kernel, which merges them.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/longest_first_plan.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::prefill {

// Where the split accumulators lie: see SplitAccumulatorLayout.
struct SplitAccumulators {
  float* o_accum;  // [total_rows, head_dim]: sum of values, relative to the row's largest score, not normalised
  float2*
      max_sum_accum;  // [total_rows]: (largest score in LogitTransform's units, softmax sum); (-inf, 0): no key seen
  int64_t part_rows;  // of a row of the grid
};

// What a CTA does with the results of one KV split of its work tile. Bits; 0: the work tile is not split.
using SplitMode = unsigned;
inline constexpr SplitMode kAccumulate = 1;  // merges what this CTA has spilled of the splits before
inline constexpr SplitMode kSpill = 2;       // stores the result to a split accumulator instead of `out`
inline constexpr SplitMode kCrossCta = 4;    // with kSpill: for the combine kernel, since other CTAs have other splits

// Merges the states and accumulators of a row over two KV splits. The CTA and the combine kernel merge alike, in the
// same order.
struct SplitMerge {
  AttentionState state;  // of both
  MergeWeights weights;
  int only;  // the one that sees keys, if not both do; else -1. The other's o_accum may be undefined

  __device__ SplitMerge(AttentionState first, AttentionState second, float to_log2) : state(second) {
    only = second.sum == 0.0f ? 0 : first.sum == 0.0f ? 1 : -1;
    // NOTE: the second is the one whose product is rounded by itself.
    weights = state.Merge(first, ScaledScores{to_log2});
    if (only >= 0) state = only == 0 ? first : second;
  }
  // Merges an element of the accumulators.
  __device__ float Merge(float first, float second) const {
    const float both = weights.Merge(second, first);
    return only == 0 ? first : only == 1 ? second : both;
  }
};

// The weights of SplitMerge for the splits of a row, which merge one after the other. By a warp: lane j computes those
// of split j, with the same bits.
struct MergeChainWeights {
  unsigned seen;  // a bit for each split that sees keys
  float max;      // over all splits
  float before;   // the weight of the splits before this lane's
  float mine;

  // max_sum: of this lane's split; (-inf, 0) past the last one.
  __device__ MergeChainWeights(float2 max_sum, int lane, float to_log2) {
    seen = __ballot_sync(~0u, max_sum.y != 0.0f);
    max = max_sum.x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, max, step);
      if (lane >= step) max = fmaxf(max, other);
    }
    const float max_before = __shfl_up_sync(~0u, max, 1);
    const float shift = max == -INFINITY ? 0.0f : max;
    const ScaledScores scores{to_log2};
    before = scores.Exp(max_before - shift);
    mine = scores.Exp(max_sum.x - shift);
    max = __shfl_sync(~0u, max, 31);
  }
  // As SplitMerge's: the first weight is the split's own.
  __device__ MergeWeights Of(int split) const {
    return {__shfl_sync(~0u, mine, split), __shfl_sync(~0u, before, split)};
  }
};

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineCtasPerSm = 9;  // for which there are registers
// CTAs on an SM where there is probably nothing to combine, behind the decode path.
inline constexpr int kIdleCombineCtasPerSm = 3;

// Of all sequences of a row of the grid, of which `base` is the first; without kSharesLastRound only the rows. By all
// threads.
template <int kPlanned, bool kSharesLastRound>
__device__ CrossCtaSums SumOfSequences(const PagedAttentionParams& params, const SplitKvPolicy& policy, int base,
                                       int num_live, bool in_order) {
  __shared__ CrossCtaSums warps[kCombineThreads / 32];
  CrossCtaSums mine{};
  for (int s = base + static_cast<int>(threadIdx.x); s < min(base + kPlanned, num_live); s += kCombineThreads) {
    const SequenceInfo info = LoadSequence(params, s, in_order);
    const int splits = info.valid ? policy.Of(info.q_len, info.context_len).count : 1;
    if constexpr (kSharesLastRound) {
      const int q_len = info.q_len > policy.max_decode_tokens ? info.q_len : 0;
      mine.Add(policy.SumsOf(q_len, info.valid ? info.context_len : -1, splits));
    } else {
      mine.rows += policy.RowsOf(splits, info.q_len);
    }
  }
  if constexpr (kSharesLastRound) {
    mine = mine.OfWarp();
  } else {
    mine.rows = __reduce_add_sync(~0u, mine.rows);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  CrossCtaSums all = warps[0];
#pragma unroll
  for (int i = 1; i < kCombineThreads / 32; ++i) all.Add(warps[i]);
  return all;
}

// Merges cross-CTA splits: each warp takes one row of `out` after the other. By CTA `cta` of `ctas`.
// kSharesLastRound: policy.last_round_ctas is set. kLongestFirst: as SplitAccumulatorLayout's. The dtype is an
// argument: it matters where a row is stored, and nowhere else.
template <int kDim, bool kSharesLastRound, bool kLongestFirst = false>
__device__ __forceinline__ void CombinePrefillSplits(const PagedAttentionParams& params, const SplitKvPolicy& policy,
                                                     const SplitAccumulators& accumulators, unsigned cta,
                                                     unsigned ctas) {
  // Splits of a row whose accumulators a warp loads at once, as registers allow.
  constexpr int kAtOnce = kDim <= 128 ? 8 : 4;
  AllowDependentLaunch();  // of the decode path, if that comes second
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(cta * (kCombineThreads / 32) + threadIdx.x / 32);
  const int warps = static_cast<int>(ctas * (kCombineThreads / 32));
  const int num_live = LiveSequences(params);
  // Entries past num_seqs are loaded with the others, in one latency, and ignored.
  bool ok = true, has_prompt = false;
  for (int s = static_cast<int>(threadIdx.x); s < params.max_seqs; s += kCombineThreads) {
    const int begin = __ldg(params.query_start_loc + s);
    const int end = __ldg(params.query_start_loc + s + 1);
    const bool in_bounds = 0 <= begin && begin <= end && end <= params.num_tokens;
    ok = ok && (s >= num_live || in_bounds);
    has_prompt = has_prompt || (s < num_live && in_bounds && end - begin > policy.max_decode_tokens);
  }
  const bool in_order = __syncthreads_and(ok);
  if (!__syncthreads_or(has_prompt)) {
    if (cta == 0) WaitForPreviousKernel();
    return;
  }
  LogitTransform transform(params, /*kv_head=*/0);
  // Whether the sequences of a row of the grid have cross-CTA splits, and the rows of those before.
  constexpr int kPlanned = static_cast<int>(SplitAccumulatorLayout::SequencesPerGridRow(kDim));
  bool fits = policy.always_fits;
  unsigned rows_before = 0;
  unsigned crossing_tiles = 0, tiles_before = 0;  // see SplitKvPolicy::CrossCtaRowTiles
  bool waited = false;
  // A warp takes every `warps`-th of the rows that are split. It knows the first one before it waits.
  auto next = static_cast<unsigned>(warp);
  unsigned rows_up_to_here = 0;  // that are split, of the sequences so far
  for (int base = 0; base < num_live; base += 32) {
    SequenceInfo info{};
    if (base + lane < num_live) info = LoadSequence(params, base + lane, in_order);
    const KvSplits mine = info.valid ? policy.Of(info.q_len, info.context_len) : KvSplits{1, 0, 0};
    int my_splits = mine.count;
    if constexpr (kDim != 256 && !kSharesLastRound && !kLongestFirst) {  // the first ones count as one
      const int q_len = info.q_len > policy.max_decode_tokens ? info.q_len : 0;
      if (base == 0) my_splits -= policy.FirstSplits(q_len, info.valid ? info.context_len : 0, mine) - 1;
    }
    const unsigned rows = policy.RowsOf(my_splits, info.q_len);
    const unsigned rows_up_to = SumUpToLane(rows);
    if (!kLongestFirst && base % kPlanned == 0) {
      rows_before = 0;
      if (kSharesLastRound || !policy.always_fits) {
        CrossCtaSums all{__shfl_sync(~0u, rows_up_to, 31), 0, 0, 0, 0};
        if (kSharesLastRound || num_live > 32) {
          all = SumOfSequences<kPlanned, kSharesLastRound>(params, policy, base, num_live, in_order);
        }
        fits = policy.Fits(all.rows);
        if constexpr (kSharesLastRound) {
          crossing_tiles = policy.CrossCtaRowTiles(all);
          fits = crossing_tiles == SplitKvPolicy::kAllRowTiles;
        }
      }
    }
    int64_t my_accum_begin = base / kPlanned * accumulators.part_rows + rows_before + rows_up_to - rows;
    bool crosses = fits;
    if constexpr (kLongestFirst) {
      const int32_t* const begin = params.query_start_loc + min(lane, max(num_live - 1, 0));
      const bool has_decode_rows =
          __any_sync(~0u, lane < num_live && HasDecodeRows(__ldg(begin), __ldg(begin + 1), policy.max_decode_tokens));
      const int q_len = info.q_len > policy.max_decode_tokens ? info.q_len : 0;
      LongestFirstPlan<> plan(policy, accumulators.part_rows, q_len, info.valid ? info.context_len : 0);
      const SplitPlacement placed = plan.Place(has_decode_rows);
      my_splits -= placed.first - 1;
      my_accum_begin = placed.accum_begin;
      crosses = true;
    }
    if (kSharesLastRound && !fits && crossing_tiles > 0) {
      const int q_len = info.q_len > policy.max_decode_tokens ? info.q_len : 0;
      const unsigned tiles = policy.SumsOf(q_len, 0, 1).row_tiles;
      const unsigned tiles_up_to = tiles_before + SumUpToLane(tiles);
      crosses = tiles_up_to - tiles < crossing_tiles && policy.Fits(rows_before + rows_up_to);
      tiles_before = __shfl_sync(~0u, tiles_up_to, 31);
    }
    rows_before += __shfl_sync(~0u, rows_up_to, 31);
    if (!crosses) my_splits = 1;
    const int my_begin = info.q_begin * static_cast<int>(params.num_heads);  // row of `out`
    const int my_rows = my_splits > 1 ? info.q_len * static_cast<int>(params.num_heads) : 0;
    const unsigned my_end = rows_up_to_here + SumUpToLane(static_cast<unsigned>(my_rows));
    rows_up_to_here = __shfl_sync(~0u, my_end, 31);
    for (; next < rows_up_to_here; next += warps) {
      const int owner = __popc(__ballot_sync(~0u, my_end <= next));
      const int splits = __shfl_sync(~0u, my_splits, owner);
      const int seq_rows = __shfl_sync(~0u, my_rows, owner);
      const int row_of_seq = static_cast<int>(next - __shfl_sync(~0u, my_end, owner)) + seq_rows;
      const int row = __shfl_sync(~0u, my_begin, owner) + row_of_seq;
      const int64_t accum_row = __shfl_sync(~0u, my_accum_begin, owner) + row_of_seq;
      const int head = row % static_cast<int>(params.num_heads);
      if (!waited) WaitForPreviousKernel();
      waited = true;
      if (params.scale_per_head) {
        transform = LogitTransform(params, head / static_cast<int>(params.num_heads / params.num_kv_heads));
      }
      // NOTE: __ldcg, since the kernel before has just written them: the read-only cache may be stale.
      float2 max_sum = make_float2(-INFINITY, 0.0f);
      if (lane < splits) max_sum = __ldcg(accumulators.max_sum_accum + accum_row + lane * seq_rows);
      const float2* const o_accum = reinterpret_cast<const float2*>(accumulators.o_accum + accum_row * kDim) + lane;
      float2 loaded[kAtOnce][kDim / 64];
      const auto load = [&](int first) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int64_t split_row = min(first + j, splits - 1) * seq_rows;
#pragma unroll
          for (int i = 0; i < kDim / 64; ++i) {
            loaded[j][i] = __ldcg(o_accum + split_row * (kDim / 2) + i * 32);
          }
        }
      };
      load(0);
      // All weights at once: lane j has those with which split j joins the ones before.
      const MergeChainWeights weights(max_sum, lane, transform.to_log2);
      float sum = 0.0f;
      float2 o[kDim / 64] = {};
      bool any = false;
#pragma unroll 1
      for (int first = 0;;) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if ((weights.seen >> (first + j) & 1) == 0) continue;
          const MergeWeights both = weights.Of(first + j);
          const float split_sum = __shfl_sync(~0u, max_sum.y, first + j);
          sum = any ? both.Merge(split_sum, sum) : split_sum;
#pragma unroll
          for (int i = 0; i < kDim / 64; ++i) {
            o[i].x = any ? both.Merge(loaded[j][i].x, o[i].x) : loaded[j][i].x;
            o[i].y = any ? both.Merge(loaded[j][i].y, o[i].y) : loaded[j][i].y;
          }
          any = true;
        }
        first += kAtOnce;
        if (first >= splits) break;
        load(first);
      }
      const AttentionState state = {weights.max, sum};
      const RowNormalization norm = transform.NormalizeFast(state, head);
      if (params.lse != nullptr && lane == 0) params.lse[row] = norm.lse;
      uint32_t* const out = static_cast<uint32_t*>(params.out) + int64_t{row} * (kDim / 2) + lane;
#pragma unroll
      for (int i = 0; i < kDim / 64; ++i) {
        const float low = o[i].x * norm.factor, high = o[i].y * norm.factor;
        out[i * 32] = params.dtype == DType::kBF16 ? Pack<__nv_bfloat16>(low, high) : Pack<__half>(low, high);
      }
    }
  }
  // One CTA is enough: this kernel ends after the one before has ended.
  if (!waited && cta == 0) WaitForPreviousKernel();
}

template <int kDim, bool kSharesLastRound>
__global__ void __launch_bounds__(kCombineThreads, kCombineCtasPerSm)
    PrefillCombineKernel(const __grid_constant__ PagedAttentionParams params,
                         const __grid_constant__ SplitKvPolicy policy,
                         const __grid_constant__ SplitAccumulators accumulators) {
  CombinePrefillSplits<kDim, kSharesLastRound>(params, policy, accumulators, blockIdx.x, gridDim.x);
}

// The same for SplitAccumulatorLayout::longest_first.
template <int kDim>
__global__ void __launch_bounds__(kCombineThreads, kCombineCtasPerSm)
    PrefillCombineLongestFirstKernel(const __grid_constant__ PagedAttentionParams params,
                                     const __grid_constant__ SplitKvPolicy policy,
                                     const __grid_constant__ SplitAccumulators accumulators) {
  CombinePrefillSplits<kDim, false, /*kLongestFirst=*/true>(params, policy, accumulators, blockIdx.x, gridDim.x);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_CUH_
