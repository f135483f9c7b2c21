// The frame of the kernels for every GPU: which rows a CTA computes, by the work tiles of paged_attention's prefill
// kernels. Keys and values are read where they lie (as_paged_attention.h).
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_PORTABLE_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_PORTABLE_CUH_

#include <math_constants.h>

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/ops/bidirectional_attention/as_paged_attention.h"
#include "ffi/ops/paged_attention/padding_rows.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::bidirectional {

// The rows of a work tile. A key's position is its token's place in the sequence.
struct Rows : prefill::TileRows<> {
  __device__ Rows(const PagedAttentionParams& params, const prefill::WorkTile& tile, prefill::PlainDivisor group)
      : TileRows<>(params, tile, group) {
    if (window >= q_len) window = 0;  // hides nothing
    VisibleKeys(0, &key_begin, &first_row_last_key);
    VisibleKeys(count - 1, &last_row_first_key, &key_end);
    ++key_end;
  }

  // The keys [*first_key, *last_key] that a row sees; none if *last_key < 0.
  __device__ void VisibleKeys(int row, int* first_key, int* last_key) const {
    const int position = static_cast<int>(group.Divide(first + row));
    const int behind = q_len - 1 - position;
    *first_key = window == 0 ? 0 : max(position - window + 1, 0);
    *last_key = row < count ? position + (window == 0 ? behind : min(window - 1, behind)) : -1;
  }
};

// Finds work tiles of kRows rows in sound metadata. A tile's rows and keys follow from its sequence alone.
template <int kThreads, int kRows>
class TileSearch {
 public:
  struct Storage {
    unsigned warp_tiles[kThreads / 32];
    prefill::WorkTile tile;
  };

  // The work tile of the given rank; kv heads are next to each other. False if there are only *total tiles. By all
  // threads of the CTA. Frees the storage.
  static __device__ bool Find(const PagedAttentionParams& params, int num_live, unsigned rank, Storage& storage,
                              prefill::WorkTile* tile, unsigned* total) {
    const auto kv_heads = static_cast<unsigned>(params.num_kv_heads);
    const auto group = static_cast<unsigned>(params.num_heads / params.num_kv_heads);
    const unsigned row_tile = rank / kv_heads;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    unsigned before = 0;  // tiles of the sequences so far
    for (int first = 0; first < num_live; first += kThreads) {
      const int seq = first + static_cast<int>(threadIdx.x);
      int begin = 0, length = 0;
      if (seq < num_live) {
        begin = __ldg(params.query_start_loc + seq);
        length = __ldg(params.query_start_loc + seq + 1) - begin;
      }
      const unsigned tiles = (static_cast<unsigned>(length) * group + kRows - 1) / kRows;
      unsigned up_to = tiles;  // inclusive sum over the warp
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
      }
      if (lane == 31) storage.warp_tiles[warp] = up_to;
      __syncthreads();
      unsigned base = before, batch = 0;
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) {
        if (w < warp) base += storage.warp_tiles[w];
        batch += storage.warp_tiles[w];
      }
      const bool found = row_tile < before + batch;
      if (row_tile >= base + up_to - tiles && row_tile < base + up_to) {
        prefill::WorkTile mine{};
        mine.seq = seq;
        mine.q_begin = begin;
        mine.q_len = length;
        mine.context_len = length;
        mine.valid = true;
        mine.first_row = (row_tile - (base + up_to - tiles)) * kRows;
        mine.rows = kRows;
        mine.kv_head = static_cast<int>(rank - row_tile * kv_heads);
        storage.tile = mine;
      }
      __syncthreads();
      if (found) {
        *tile = storage.tile;
        __syncthreads();
        return true;
      }
      before += batch;
    }
    *total = before * kv_heads;
    return false;
  }
};

// Makes all rows NaN, together with the other CTAs.
template <typename T>
__device__ void FillAllRows(const PagedAttentionParams& params) {
  const auto warps = static_cast<int64_t>(blockDim.x / 32);
  for (int64_t token = blockIdx.x * warps + threadIdx.x / 32; token < params.num_tokens; token += gridDim.x * warps) {
    FillHeads<T>(params, token * params.num_heads, params.num_heads, CUDART_NAN_F, CUDART_NAN_F);
  }
}

// A CTA computes its work tile, or, without one, fills its share of the padding rows. There is always such a CTA where
// there are padding rows: see LaunchPortable.
template <typename Computation, typename T>
__device__ void RunTile(const PagedAttentionParams& params, char* shared) {
  using Search = TileSearch<Computation::kThreads, Computation::kRows>;
  static_assert(sizeof(typename Search::Storage) <= Computation::kSharedBytes);
  const int num_live = LiveSequences(params);
  if (!QueryStartsInOrder(params, num_live) || num_live < 0) return FillAllRows<T>(params);
  prefill::WorkTile tile;
  unsigned total = 0;
  auto& storage = *reinterpret_cast<typename Search::Storage*>(shared);
  if (!Search::Find(params, num_live, blockIdx.x, storage, &tile, &total)) {
    return FillPaddingRows<T>(params, blockIdx.x - total, gridDim.x - total);
  }
  const prefill::PlainDivisor group{static_cast<unsigned>(params.num_heads / params.num_kv_heads)};
  Computation(params, shared).Run(tile, Rows(params, tile, group));
}

// Whether the current device runs code that holds `kernel`; where it is not compiled, it is empty and of one warp.
template <typename Computation>
Status HasKernel(void (*kernel)(PagedAttentionParams), bool* has) {
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kernel));
  *has = code.maxThreadsPerBlock >= Computation::kThreads;
  return Status::Ok();
}

template <typename Computation>
Status LaunchPortable(void (*kernel)(PagedAttentionParams), const BidirectionalAttentionParams& params, Stream stream) {
  // Kernels use no context_lens: a work tile has the length of its sequence.
  const PagedAttentionParams call = AsPagedAttention(params, params.query_start_loc);
  const int64_t rows = params.num_tokens * params.num_heads;  // fewer than 2^31
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t row_tiles =
      params.num_tokens * group / Computation::kRows + std::min(params.max_seqs, params.num_tokens);
  // Each work tile has a row at least, so that a grid of 2^31 - 1 CTAs leaves none over where every row is a tile's
  // only one, and no row is padding.
  const int64_t ctas = std::min(std::min(row_tiles * params.num_kv_heads, rows) + 1, (int64_t{1} << 31) - 1);
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Computation::kSharedBytes));
  kernel<<<static_cast<unsigned>(ctas), Computation::kThreads, Computation::kSharedBytes, stream>>>(call);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_PORTABLE_CUH_
