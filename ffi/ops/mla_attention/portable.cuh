// The frame of mla_attention's kernels for every GPU: work tiles, padding rows and wrong metadata are those of
// paged_attention's prefill kernels. A CTA keeps the Q of a work tile in shared memory and walks over the key tiles
// with an online softmax; keys, of which the first columns are the values too, are loaded once.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_PORTABLE_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_PORTABLE_CUH_

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/math_constants.h"
#include "ffi/ops/mla_attention/kernels.h"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

namespace xla_gpu::mla {

struct PortableParams {
  PagedAttentionParams attention;  // head_dim is that of `out`
  int key_dim;
  float scale_log2;  // scale · log2(e)
};

inline PortableParams MakePortableParams(const MlaAttentionParams& params) {
  PortableParams portable{MetadataOf(params), static_cast<int>(params.head_dim), params.scale * kLog2E};
  portable.attention.query = params.query;
  portable.attention.k_cache = params.kv_cache;
  portable.attention.page_stride = params.page_size * params.head_dim;
  portable.attention.slot_stride = params.head_dim;
  portable.attention.max_decode_tokens = 0;  // all sequences are prompts
  return portable;
}

// A row's softmax, the same in all lanes that share the row. Scores in units of log2.
struct RowSoftmax {
  AttentionState state{-INFINITY, 0.0f};

  // Takes a score of each of `kLanes` lanes. Returns its numerator; *rescale: the factor of the results so far.
  template <int kLanes>
  __device__ float Update(float score, float* rescale) {
    float largest = score;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    largest = fmaxf(largest, state.max);
    const float shift = largest == -INFINITY ? 0.0f : largest;
    const float numerator = Exp2(score - shift);
    float sum = numerator;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    *rescale = state.max == largest ? 1.0f : Exp2(state.max - shift);
    state = {largest, state.sum * *rescale + sum};
    return numerator;
  }
  // What the results are to be multiplied by.
  __device__ float Factor() const { return state.sum == 0.0f ? 0.0f : 1.0f / state.sum; }
};

// A CTA computes its work tile, or, without one, fills its share of the padding rows. There is always such a CTA: the
// grid has one more than there can be work tiles.
template <typename Computation, typename T>
__device__ void RunPortableTile(const PortableParams& params, char* shared) {
  using Scheduler = typename Computation::Scheduler;
  const PagedAttentionParams& attention = params.attention;
  Scheduler scheduler(attention, *reinterpret_cast<typename Scheduler::Storage*>(shared));
  unsigned total = 0;
  prefill::WorkTile tile;
  if (!scheduler.Find(blockIdx.x, &tile, &total)) {
    FillPaddingRows<T>(attention, blockIdx.x - total, gridDim.x - total);
    return;
  }
  // The barrier frees the scheduler's shared memory.
  const bool wrong = __syncthreads_or(prefill::FindsInvalidPage(attention, tile, threadIdx.x, blockDim.x));
  prefill::TileRows<> rows(attention, tile, prefill::PlainDivisor{static_cast<unsigned>(attention.num_heads)});
  rows.FindKeys();
  if (tile.valid && !wrong) {
    Computation(params, shared).Run(rows);
  } else {
    prefill::FillTileRows<T>(rows, attention, static_cast<int>(threadIdx.x) / 32, static_cast<int>(blockDim.x) / 32,
                             CUDART_NAN_F, CUDART_NAN_F);
  }
}

template <typename Computation>
Status LaunchPortable(void (*kernel)(PortableParams), const MlaAttentionParams& params, Stream stream) {
  const int64_t rows = params.num_tokens * params.num_heads;  // fewer than 2^31
  // A work tile less than full for each sequence, and a CTA for the padding rows.
  const int64_t ctas = std::min(rows, rows / Computation::kRows + std::min(params.max_seqs, params.num_tokens)) + 1;
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Computation::kSharedBytes));
  kernel<<<static_cast<unsigned>(ctas), Computation::kThreads, Computation::kSharedBytes, stream>>>(
      MakePortableParams(params));
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_PORTABLE_CUH_
