// The second kernel of the decode path: merges the partial results of the units that several workers computed.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_unowned.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineRows = 4;  // at a time

// The sizes that the split kernel's shape has.
template <int kDim, int kRows, int kBlockKeys>
struct CombineShared {
  using P = Plan<kCombineThreads, kBlockKeys, kRows>;
  alignas(16) float4 out[kMaxGroups][kCombineRows][kDim / 4];
  Softmax softmax[kMaxGroups][kCombineRows];
  typename P::Shared plan;
};

// The job of a block where there are few units, one for each block: found while the kernel before still runs.
template <typename P>
__device__ inline MergeJob PlanJob(const DecodeArgs& args, typename P::Shared& shared) {
  P plan(args, shared);
  const unsigned per_head = static_cast<unsigned>(args.units_per_head);
  const unsigned per_sequence = per_head * static_cast<unsigned>(args.params.num_kv_heads);
  const int entry = plan.FindSequence(static_cast<int>(blockIdx.x / per_sequence));
  const unsigned unit = blockIdx.x % per_sequence;
  if (entry < 0 || plan.At(entry).chunks == 0) return {};
  const unsigned units = static_cast<unsigned>(plan.At(entry).units);
  if (unit % per_head >= units) return {};
  return plan.Job(plan.At(entry), plan.SequenceOf(entry), unit / per_head * units + unit % per_head);
}

// With slots by unit block i merges unit i, else the unit that worker i has described.
template <int kDim, int kRows, int kBlockKeys>
__global__ void __launch_bounds__(kCombineThreads) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  using Shared = CombineShared<kDim, kRows, kBlockKeys>;
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (args.fill_unowned && blockIdx.x == 0) {
    if (args.params.dtype == DType::kBF16) {
      FillUnownedRows<__nv_bfloat16>(args.params, 0, 1);
    } else {
      FillUnownedRows<__half>(args.params, 0, 1);
    }
  }
  MergeJob job;
  if (args.slots_by_unit) job = PlanJob<typename Shared::P>(args, shared.plan);
  // All blocks wait: when this kernel has ended, so has the one before.
  WaitForPreviousKernel();
  if (!args.slots_by_unit) job = *Scratch::Job(args, blockIdx.x);
  if (job.chunks == 0) return;
  const auto owner = [&](int chunk) {
    const uint64_t position = job.begin + static_cast<unsigned>(chunk * job.blocks);
    if ((position | job.per_worker) >> 32) return static_cast<unsigned>(position / job.per_worker);
    return static_cast<uint32_t>(position) / static_cast<uint32_t>(job.per_worker);
  };
  const unsigned unit_owner = owner(0);
  if (unit_owner == owner(job.chunks - 1)) return;  // it had all chunks, and has written the rows

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head_dim = static_cast<int>(args.params.head_dim);
  const int groups = (job.chunks + kGroupChunks - 1) / kGroupChunks;
  const int rows = min(job.q_len * args.group - job.row_tile * kRows, kRows);
  for (int begin = 0; begin < rows; begin += kCombineRows) {
    const int now = min(kCombineRows, rows - begin);
    if (begin > 0) __syncthreads();  // what stands there is no longer read
    for (int task = warp; task < now * groups; task += kCombineThreads / 32) {
      const int group = task / now;
      const int row = task - group * now;
      const int first = group * kGroupChunks;
      const int last = min(first + kGroupChunks, job.chunks) - 1;
      const GroupPlace place = {unit_owner, owner(first), owner(last)};
      const int parts = place.Whole() ? 1 : last - first + 1;
      // Lane i finds the i-th part.
      const int my_chunk = min(first + lane, last);
      const int64_t my_slot = place.Slot(args, job.unit, my_chunk, owner(my_chunk));
      int64_t slots[kGroupChunks];
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) slots[i] = __shfl_sync(0xffffffffu, my_slot, i);
      for (int column = lane * 4; column < head_dim; column += 128) {
        Partial part[kGroupChunks];
#pragma unroll
        for (int i = 0; i < kGroupChunks; ++i) {
          if (i >= parts) break;
          part[i].softmax = *Scratch::Of(args, slots[i], begin + row);
          part[i].out = *reinterpret_cast<const float4*>(Scratch::Out(args, slots[i], begin + row) + column);
        }
        MergeParts(part, parts);
        shared.out[group][row][column / 4] = part[0].out;
        if (column == 0) shared.softmax[group][row] = part[0].softmax;
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < now * (kDim / 4); i += kCombineThreads) {
      const int row = i / (kDim / 4);
      const int column = i % (kDim / 4) * 4;
      if (column >= head_dim) continue;
      Partial result = {shared.softmax[0][row], shared.out[0][row][column / 4]};
      for (int group = 1; group < groups; ++group) {
        result.Add({shared.softmax[group][row], shared.out[group][row][column / 4]});
      }
      const int unit_row = job.row_tile * kRows + begin + row;
      StoreRow(args, RowPlace::Of(args, job.q_begin, job.kv_head, unit_row), column, result);
    }
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
