// From the partial sums of a cluster's CTAs to results.
#ifndef XLA_GPU_OPS_LINEAR_SM90_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/cluster.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// Four neighbouring columns of a row, added over the cluster's CTAs in the order of k. Where one CTA has all of k,
// which need not be a cluster of its own, those in its own shared memory.
__device__ inline void AddPartials(const float* sums, int cluster, float (&total)[4]) {
  if (cluster == 1) {
    const float4 four = *reinterpret_cast<const float4*>(sums);
    total[0] = four.x, total[1] = four.y, total[2] = four.z, total[3] = four.w;
    return;
  }
  // NOTE: what is not loaded is 0. The compiler would keep registers of undefined values for a whole loop around this.
  float4 parts[8] = {};
#pragma unroll
  for (int rank = 0; rank < 8; ++rank) {
    if (rank < cluster) parts[rank] = *reinterpret_cast<const float4*>(SharedOf(sums, rank));
  }
#pragma unroll
  for (int rank = 0; rank < 8; ++rank) {
    if (rank >= cluster) continue;
    total[0] = rank == 0 ? parts[rank].x : total[0] + parts[rank].x;
    total[1] = rank == 0 ? parts[rank].y : total[1] + parts[rank].y;
    total[2] = rank == 0 ? parts[rank].z : total[2] + parts[rank].z;
    total[3] = rank == 0 ? parts[rank].w : total[3] + parts[rank].w;
  }
}

// One column of a row, in the same order.
__device__ inline float AddPartial(const float* sums, int cluster) {
  if (cluster == 1) return *sums;
  float parts[8] = {};
#pragma unroll
  for (int rank = 0; rank < 8; ++rank) {
    if (rank < cluster) parts[rank] = *SharedOf(sums, rank);
  }
  float total = parts[0];
#pragma unroll
  for (int rank = 1; rank < 8; ++rank) {
    if (rank < cluster) total += parts[rank];
  }
  return total;
}

// What a thread finishes of its CTA's share of a work tile: four columns, of each `rows_at_once`-th row. Nothing is
// divided as whole numbers, which would be a hundred instructions that run once and come from L2.
struct ShareOfThread {
  int column;
  int row;
  int rows_at_once;

  __device__ ShareOfThread(const Sm90Args& args, int rank, int threads) {
    const int begin = args.column_begin[rank], fours = (args.column_begin[rank + 1] - begin) / 4;  // of a row
    const int thread = static_cast<int>(threadIdx.x);
    // Of numbers far below 2^20: rounded down.
    const auto divided = [fours](int value) { return static_cast<int>(__fdividef(value + 0.5f, fours)); };
    rows_at_once = divided(threads), row = divided(thread);
    column = begin + (thread - row * fours) * 4;
    if (row >= rows_at_once) row = kLinearMaxRows;
  }
};

// By the `threads` threads that write partial sums: until those of all CTAs of the cluster are written.
__device__ __forceinline__ void WaitForSums(int cluster, int threads) {
  if (cluster > 1) {
    ClusterSyncOwnShared();
  } else {
    NamedBarrierSync(1, threads);
  }
}

// From sums to results of the four columns from `feature` on, in the rows of `share`. wait(): until the sums are
// written; what depends on no other thread is read before. sums_of_columns(): then, where those of the first row are;
// those of the next row are `pitch` behind, and with an activation those of what the columns are multiplied by
// `to_factors`. add(from, total): adds the sums of four columns. Inlined: a function of its own reads the kernel's
// arguments by generic loads, each turn anew.
template <typename T, bool kHasScale, typename Wait, typename SumsOfColumns, typename Add>
__device__ __forceinline__ void FinishRows(const LinearArgs& args, const ShareOfThread& share, int feature, int pitch,
                                           int to_factors, Wait wait, SumsOfColumns sums_of_columns, Add add) {
  using Four = AlignedVector<T, 4>;
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int first_row = feature < out_features ? share.row : args.rows;
  const int read = feature < out_features ? feature : 0;
  const FourFeatures<T, kHasScale> values_of(args, read), factors_of(args, gated ? out_features + read : read);
  Four residual = {};
  const auto load_residual = [&](int row) {
    if (args.residual == nullptr || row >= args.rows) return;
    const auto* const from = static_cast<const T*>(args.residual) + static_cast<int64_t>(row) * out_features + feature;
    residual = *reinterpret_cast<const Four*>(from);
  };
  load_residual(first_row);
  wait();
  const float* const sums = sums_of_columns();
#pragma unroll 1  // its instructions come from L2
  for (int row = first_row; row < args.rows; row += share.rows_at_once) {
    const Four residual_of_row = residual;
    load_residual(row + share.rows_at_once);
    float values[4], factors[4];
    const float* const from = sums + row * pitch;
    add(from, values);
    if (gated) add(from + to_factors, factors);
    values_of.Finish(values);
    if (gated) {
      factors_of.Finish(factors);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = Round<T>(ActivationOf<T>(args.activation, values[i]) * factors[i]);
    }
    const int64_t at = static_cast<int64_t>(row) * out_features + feature;
    StoreFour<T>(args, at, values, factors, /*gated=*/false, residual_of_row);
  }
}

// Finishes this CTA's share of its cluster's work tile, by all threads. `sums`: [rows][SumPitch] in each CTA's shared
// memory, written before.
template <typename T, int kTileFeatures, int kThreads>
__device__ __forceinline__ void FinishTileOfCluster(const Sm90Args& sm90, int tile, const float* sums, int rank) {
  const bool gated = sm90.linear.activation != Activation::kNone;
  const int tile_features = gated ? sm90.box_rows : sm90.boxes * sm90.box_rows;
  const ShareOfThread share(sm90, rank, kThreads);
  const int column = share.column;
  WaitForPreviousKernel();  // which may have written what is read here
  const auto wait = [&] {
    __syncwarp();  // the barrier of a cluster is for whole warps
    if (sm90.cluster > 1) {
      ClusterSyncOwnShared();
    } else {
      __syncthreads();
    }
  };
  const auto sums_of_columns = [&] {
    const int second_box = !gated && column >= sm90.box_rows;
    return sums + column + second_box * (kTileFeatures / 2 - sm90.box_rows);
  };
  const auto add = [&](const float* from, float(&total)[4]) { AddPartials(from, sm90.cluster, total); };
  FinishRows<T, /*kHasScale=*/false>(sm90.linear, share, tile * tile_features + column, SumPitch(kTileFeatures),
                                     kTileFeatures / 2, wait, sums_of_columns, add);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_EPILOGUE_CUH_
