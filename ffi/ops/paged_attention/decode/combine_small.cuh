// The second kernel of the decode path where there are few units: every chunk has left its result, unless it is a
// sequence's only one.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_SMALL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_SMALL_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/combine.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineFewThreads = 32 * kMaxGroups;  // a warp for each group of chunks
static_assert(kMaxGroups == MergeChain::kParts && kGroupChunks == MergeChain::kParts);

template <int kDim>
struct CombineFewShared {
  // Of each group, merged:
  float4 out[kMaxGroups][kDim / 4];
  Softmax softmax[kMaxGroups];
  PlanEntry entry[kMaxGroups];  // the unit's sequence, of each warp
};

// The block that merges a row.
template <int kDim, int kBlockKeys, int kRows>
class FewMerger {
 public:
  using Shared = CombineFewShared<kDim>;

  __device__ FewMerger(const DecodeArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  // Block i merges row i % slot_rows of the unit whose UnitIndex is i / slot_rows.
  __device__ void Run() {
    const unsigned rows = static_cast<unsigned>(args_.slot_rows);
    const unsigned unit = blockIdx.x / rows;
    const int row = static_cast<int>(blockIdx.x - unit * rows);
    const unsigned tile = unit / static_cast<unsigned>(args_.params.num_kv_heads);
    const int kv_head = static_cast<int>(unit - tile * static_cast<unsigned>(args_.params.num_kv_heads));
    // The same for all warps.
    if (!FindSequence(static_cast<int>(tile))) return StandIn();
    const PlanEntry& entry = shared_.entry[Warp()];
    const int unit_row = (static_cast<int>(tile) - entry.q_begin * args_.tiles_per_token) * kRows + row;
    if (unit_row >= entry.q_len * args_.group) return StandIn();
    store_ = RowStore::Of(args_, RowPlace::Of(args_, entry.q_begin, kv_head, unit_row));
    groups_ = entry.Groups();
    const int first = Warp() * entry.group_chunks;
    chunks_ = min(entry.chunks - first, int{entry.group_chunks});
    place_ = Scratch::Place(args_, SlotOfFew(unit, first), row);
#pragma unroll 1
    for (bool rehearsal = true;; rehearsal = false) {
      Merge(rehearsal);
      if (!rehearsal) break;
      WaitForPreviousKernel();
    }
  }

 private:
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }

  // By each warp: the sequence of a row tile, if it has several chunks.
  __device__ bool FindSequence(int tile) {
    const typename Plan<kBlockKeys, kRows>::Start start(args_);
    const int live = start.num_seqs <= args_.max_seqs ? start.num_seqs : 0;
    bool ok = true;
    for (int s = Lane(); s < live; s += 32) {
      ok = ok && (s < 32 ? start.metadata : Metadata::Load(args_, s)).InOrder(args_);
    }
    const bool in_order = __all_sync(0xffffffffu, ok);
    bool found = false;
    for (int first = 0; first < live; first += 32) {
      const int s = first + Lane();
      const Metadata metadata = first == 0 ? start.metadata : Metadata::Load(args_, s);
      bool owned = s < live;
      if (!in_order) owned = owned && LoadSequence(args_.params, s, false).owned;
      const PlanEntry entry = MakePlanEntry<kBlockKeys, kRows>(args_, owned, metadata);
      const int row_tile = tile - entry.q_begin * args_.tiles_per_token;
      const bool mine = entry.chunks > 1 && 0 <= row_tile && row_tile < entry.tiles;
      if (mine) shared_.entry[Warp()] = entry;
      found = found || __any_sync(0xffffffffu, mine);
    }
    __syncwarp();
    return found;
  }

  // Merges the row's partial results and writes it. In rehearsal nothing is read or written.
  __device__ void Merge(bool rehearsal) {
    const int head_dim = static_cast<int>(args_.params.head_dim);
    if (Warp() < groups_) {
      // Lane i knows of the i-th chunk.
      const unsigned stride = static_cast<unsigned>(args_.slot_rows) * args_.slot_row;
      const uint32_t mine = place_ + static_cast<unsigned>(Lane()) * stride;
      const Softmax softmax = LoadSoftmax(Scratch::SoftmaxOf(args_, mine), Lane() < chunks_ && !rehearsal);
#pragma unroll 1
      for (int base = 0; base < kDim; base += 128) {
        const int column = base + Lane() * 4;
        float4 outs[kGroupChunks];
#pragma unroll
        for (int i = 0; i < kGroupChunks; ++i) {
          const uint32_t place = place_ + static_cast<unsigned>(i) * stride + static_cast<unsigned>(column / 4);
          outs[i] = LoadColumns(Scratch::Out(args_, place), i < chunks_ && column < head_dim && !rehearsal);
        }
        const Partial group = MergeChain(softmax).Merge(outs, chunks_);
        if (column < kDim) shared_.out[Warp()][column / 4] = group.out;
        if (column == 0) shared_.softmax[Warp()] = group.softmax;
      }
    }
    __syncthreads();
    // A warp for each 128 columns.
    const int column = static_cast<int>(threadIdx.x) * 4;
    if (Warp() * 128 < kDim) {
      Softmax softmax = {-INFINITY, 0.0f};
      if (Lane() < groups_) softmax = shared_.softmax[Lane()];
      float4 outs[kMaxGroups];
#pragma unroll
      for (int i = 0; i < kMaxGroups; ++i) outs[i] = shared_.out[i][min(column, kDim - 4) / 4];
      const Partial result = MergeChain(softmax).Merge(outs, groups_);
      if (column < head_dim) StoreRow(args_, store_, column, result, !rehearsal);
    }
    __syncthreads();
  }

  const DecodeArgs& args_;
  Shared& shared_;
  RowStore store_;
  int groups_;      // that the row has
  int chunks_;      // of this warp's
  uint32_t place_;  // of its first one's partial result
};

template <int kDim, int kBlockKeys, int kRows>
__global__ void __maxnreg__(kCombineRegisters) DecodeCombineFewKernel(const __grid_constant__ DecodeArgs args) {
  using M = FewMerger<kDim, kBlockKeys, kRows>;
  __shared__ typename M::Shared shared;
  AllowDependentLaunch();  // of the prefill path
  FillRowsOfNoSequence(args);
  M(args, shared).Run();
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_SMALL_CUH_
