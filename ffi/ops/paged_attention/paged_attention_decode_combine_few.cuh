// The second kernel of the decode path where there are few units: every chunk has left its result.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_FEW_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_FEW_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention_decode_combine.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineFewThreads = 32 * kMaxGroups;  // a warp for each group of chunks

// Block i merges row i % slot_rows of the unit whose UnitIndex is i / slot_rows.
template <int kDim, int kRows, int kBlockKeys>
__global__ void __launch_bounds__(kCombineFewThreads, 3)
    DecodeCombineFewKernel(const __grid_constant__ DecodeArgs args) {
  __shared__ alignas(16) float4 out[kMaxGroups][kDim / 4];
  __shared__ Softmax softmax[kMaxGroups];
  __shared__ PlanEntry found;  // the unit's sequence; without chunks if there is none
  FillRowsOfNoSequence(args);
  const unsigned rows = static_cast<unsigned>(args.slot_rows);
  const unsigned unit = blockIdx.x / rows;
  const int row = static_cast<int>(blockIdx.x - unit * rows);
  const UnitOfIndex place(args, unit);
  const int live = LiveSequences(args.params);
  const bool in_order = QueryStartsInOrder(args.params, live);
  if (threadIdx.x == 0) found.chunks = 0;
  __syncthreads();
  for (int s = static_cast<int>(threadIdx.x); s < live; s += kCombineFewThreads) {
    const SequenceInfo info = LoadSequence(args.params, s, in_order);
    const PlanEntry mine = MakePlanEntry<kBlockKeys, kRows>(args, info.owned, info.q_begin, info.q_len,
                                                            info.valid ? info.context_len : -1);
    if (mine.chunks > 0 && place.RowTile(args, mine.q_begin, mine.units) >= 0) found = mine;
  }
  __syncthreads();
  const PlanEntry entry = found;
  const int unit_row = place.RowTile(args, entry.q_begin, entry.units) * kRows + row;
  // A single chunk's worker has written the rows.
  const bool exists = entry.chunks > 1 && unit_row < entry.q_len * args.group;
  const int groups = exists ? (entry.chunks + kGroupChunks - 1) / kGroupChunks : 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head_dim = static_cast<int>(args.params.head_dim);
  const int parts = min(int{entry.chunks} - warp * kGroupChunks, kGroupChunks);
  // From slot to slot.
  const unsigned slot = SlotOfFew(unit, warp * kGroupChunks);
  const float* const first_out = Scratch::Out(args, slot, row);
  const int stride = args.slot_rows * (head_dim + kSlotPadding);
  // All blocks wait: when this kernel has ended, so has the one before.
  WaitForPreviousKernel();
  if (warp < groups) {
    for (int column = lane * 4; column < head_dim; column += 128) {
      Partial part[kGroupChunks];
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) {
        const float* const part_out = first_out + i * stride;
        const auto* const part_softmax = reinterpret_cast<const Softmax*>(part_out + head_dim);
        if (i < parts) part[i] = LoadPart(part_softmax, part_out + column, true);
      }
#pragma unroll
      for (int i = 1; i < kGroupChunks; ++i) {
        if (i < parts) part[0].Add(part[i]);
      }
      out[warp][column / 4] = part[0].out;
      if (column == 0) softmax[warp] = part[0].softmax;
    }
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x) * 4;
  if (!exists || column >= head_dim) return;
  Partial result = {softmax[0], out[0][column / 4]};
  for (int group = 1; group < groups; ++group) result.Add({softmax[group], out[group][column / 4]});
  StoreRow(args, RowPlace::Of(args, entry.q_begin, place.kv_head, unit_row), column, result);
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_FEW_CUH_
