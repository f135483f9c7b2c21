// From the partial sums of a cluster's CTAs to results, for the kernel of sm_90a that converts weights.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/cluster.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_epilogue.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// Finishes this CTA's share of its cluster's work tile, by the kThreads threads that have written `sums`,
// [rows][SumPitch] in each CTA's shared memory. A thread keeps its four columns.
template <typename T, int kTileFeatures, int kThreads>
__device__ __forceinline__ void FinishWorkTile(const Sm90Args& sm90, int tile, const float* sums, int rank) {
  const LinearArgs& args = sm90.linear;
  const int cluster = sm90.cluster;
  using Four = AlignedVector<T, 4>;
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int tile_features = gated ? kTileFeatures / 2 : kTileFeatures;
  const ShareOfThread share(sm90, rank, kThreads);
  const int rows_at_once = share.rows_at_once, column = share.column, feature = tile * tile_features + column;
  const int first_row = feature < out_features ? share.row : args.rows;
  // What does not depend on other threads is loaded before the barrier.
  const int read = feature < out_features ? feature : 0;
  const FourFeatures<T> first(args, read), second(args, gated ? out_features + read : read);
  Four residual = {};
  const auto load_residual = [&](int row) {
    if (args.residual == nullptr || row >= args.rows) return;
    const auto* const from = static_cast<const T*>(args.residual) + static_cast<int64_t>(row) * out_features + feature;
    residual = *reinterpret_cast<const Four*>(from);
  };
  load_residual(first_row);
  if (cluster > 1) {
    ClusterSyncOwnShared();
  } else {
    NamedBarrierSync(1, kThreads);
  }
#pragma unroll 1
  for (int row = first_row; row < args.rows; row += rows_at_once) {
    const Four residual_of_row = residual;
    load_residual(row + rows_at_once);
    const float* const from = sums + row * SumPitch(kTileFeatures) + column;
    float values[4], factors[4];
    AddPartials(from, cluster, values);
    if (gated) AddPartials(from + kTileFeatures / 2, cluster, factors);
    first.Finish(values);
    if (gated) {
      second.Finish(factors);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = Round<T>(ActivationOf<T>(args.activation, values[i]) * factors[i]);
    }
    const int64_t at = static_cast<int64_t>(row) * out_features + feature;
    StoreFour<T>(args, at, values, factors, /*gated=*/false, residual_of_row);
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_EPILOGUE_CUH_
