// The second kernel of the decode path: merges the partial results of the units that several workers computed.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"
#include "ffi/ops/paged_attention/paged_attention_unowned.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineThreads = 256;

// The sizes that the split kernel's shape has.
template <int kDim, int kRows, int kBlockKeys>
struct CombineShared {
  using P = Plan<kCombineThreads, kBlockKeys, kRows>;
  alignas(16) float4 out[kMaxGroups][kRows][kDim / 4];
  Softmax softmax[kMaxGroups][kRows];
  typename P::Shared plan;
};

// The unit that this block merges, if any.
struct CombineWork {
  int entry;  // -1: none
  unsigned unit;

  // With slots by unit there is a block for each unit; else one for each worker, for the unit of which the worker
  // before has the first chunks.
  template <typename P>
  __device__ static CombineWork Of(const DecodeArgs& args, P& plan) {
    const unsigned block = blockIdx.x;
    if (args.slots_by_unit) {
      const unsigned per_head = static_cast<unsigned>(args.units_per_head);
      const unsigned per_sequence = per_head * static_cast<unsigned>(args.params.num_kv_heads);
      const int entry = plan.FindSequence(static_cast<int>(block / per_sequence));
      if (entry < 0) return {-1, 0};
      const unsigned in_sequence = block % per_sequence;
      const unsigned units = static_cast<unsigned>(plan.At(entry).units);
      if (in_sequence % per_head >= units) return {-1, 0};
      return {entry, in_sequence / per_head * units + in_sequence % per_head};
    }
    const uint64_t position = plan.WorkerBegin(block);
    if (block == 0 || position >= plan.Total()) return {-1, 0};
    const int index = plan.Find(position);
    const PlanEntry& entry = plan.At(index);
    const unsigned length = static_cast<unsigned>(entry.chunks * entry.blocks);
    const uint64_t into = position - entry.begin;
    const unsigned unit = static_cast<unsigned>(into >> 32 ? into / length : static_cast<uint32_t>(into) / length);
    const uint64_t begin = entry.begin + uint64_t{unit} * length;
    return begin < position && plan.WorkerBegin(block - 1) <= begin ? CombineWork{index, unit} : CombineWork{-1, 0};
  }
};

template <int kDim, int kRows, int kBlockKeys>
__global__ void __launch_bounds__(kCombineThreads) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  using Shared = CombineShared<kDim, kRows, kBlockKeys>;
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const PagedAttentionParams& params = args.params;
  typename Shared::P plan(args, shared.plan);
  const CombineWork work = CombineWork::Of(args, plan);
  if (args.fill_unowned && blockIdx.x == 0) {
    if (params.dtype == DType::kBF16) {
      FillUnownedRows<__nv_bfloat16>(params, 0, 1);
    } else {
      FillUnownedRows<__half>(params, 0, 1);
    }
  }
  // Blocks without work wait too: when this kernel has ended, so has the one before.
  if (work.entry < 0 || plan.At(work.entry).chunks == 0) return WaitForPreviousKernel();
  const PlanEntry& entry = plan.At(work.entry);
  const UnitPlace place = UnitPlace::Of(entry, work.unit);
  const auto owner = [&](int chunk) { return plan.Owner(place.begin + static_cast<uint64_t>(chunk) * entry.blocks); };
  const unsigned unit_owner = owner(0);
  if (unit_owner == owner(entry.chunks - 1)) return WaitForPreviousKernel();  // the worker has written the rows

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head_dim = static_cast<int>(params.head_dim);
  const int rows = min(entry.q_len * args.group - place.row_tile * kRows, kRows);
  const int groups = (entry.chunks + kGroupChunks - 1) / kGroupChunks;
  const int64_t unit_index =
      (int64_t{plan.SequenceOf(work.entry)} * params.num_kv_heads + place.kv_head) * args.units_per_head +
      place.row_tile;

  for (int task = warp; task < rows * groups; task += kCombineThreads / 32) {
    const int row = task / groups;
    const int group = task - row * groups;
    const int first = group * kGroupChunks;
    const int last = min(first + kGroupChunks, entry.chunks) - 1;
    const GroupPlace group_place = {unit_owner, owner(first), owner(last)};
    const int parts = group_place.Whole() ? 1 : last - first + 1;
    // Lane i finds the i-th part.
    const int my_chunk = min(first + lane, last);
    const int64_t my_slot = group_place.Slot(args, unit_index, my_chunk, owner(my_chunk));
    int64_t slot[kGroupChunks];
#pragma unroll
    for (int i = 0; i < kGroupChunks; ++i) slot[i] = __shfl_sync(0xffffffffu, my_slot, i);
    if (task == warp) WaitForPreviousKernel();
    for (int column = lane * 4; column < head_dim; column += 128) {
      Partial part[kGroupChunks];
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) {
        if (i >= parts) break;
        part[i].softmax = *Slots::Of(args, slot[i], row);
        part[i].out = *reinterpret_cast<const float4*>(Slots::Out(args, slot[i], row) + column);
      }
      MergeParts(part, parts);
      shared.out[group][row][column / 4] = part[0].out;
      if (column == 0) shared.softmax[group][row] = part[0].softmax;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows * (kDim / 4); i += kCombineThreads) {
    const int row = i / (kDim / 4);
    const int column = i % (kDim / 4) * 4;
    if (column >= head_dim) continue;
    Partial result = {shared.softmax[0][row], shared.out[0][row][column / 4]};
    for (int group = 1; group < groups; ++group) {
      result.Add({shared.softmax[group][row], shared.out[group][row][column / 4]});
    }
    StoreRow(args, RowPlace::Of(args, entry.q_begin, place.kv_head, place.row_tile * kRows + row), column, result);
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
