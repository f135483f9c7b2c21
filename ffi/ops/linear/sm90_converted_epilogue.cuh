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
__device__ __forceinline__ void FinishWorkTile(const LinearArgs& args, int tile, const float* sums, int cluster,
                                               int rank) {
  using Four = AlignedVector<T, 4>;
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int tile_features = gated ? kTileFeatures / 2 : kTileFeatures;
  const int first_four = tile_features / 4 * rank / cluster;
  const int fours = tile_features / 4 * (rank + 1) / cluster - first_four;  // of a row
  const int rows_at_once = kThreads / fours;
  const int column = (first_four + static_cast<int>(threadIdx.x) % fours) * 4, feature = tile * tile_features + column;
  int row = static_cast<int>(threadIdx.x) / fours;
  if (row >= rows_at_once || feature >= out_features) row = args.rows;
  // What does not depend on other threads is loaded before the barrier.
  const int read = feature < out_features ? feature : 0;
  const FourFeatures<T> first(args, read), second(args, gated ? out_features + read : read);
  if (cluster > 1) {
    ClusterSync();
  } else {
    NamedBarrierSync(1, kThreads);
  }
#pragma unroll 2
  for (; row < args.rows; row += rows_at_once) {
    const int64_t at = static_cast<int64_t>(row) * out_features + feature;
    Four residual = {};
    if (args.residual != nullptr) residual = *reinterpret_cast<const Four*>(static_cast<const T*>(args.residual) + at);
    const float* const from = sums + row * SumPitch(kTileFeatures) + column;
    float values[4], factors[4];
    AddPartials(from, cluster, values);
    first.Finish(values);
    if (gated) {
      AddPartials(from + kTileFeatures / 2, cluster, factors);
      second.Finish(factors);
    }
    StoreFour<T>(args, at, values, factors, gated, residual);
  }
}

// Compiled once for many kernels. Not for those that move registers between their threads: a function has to do with
// the fewest that any of them has.
template <typename T, int kTileFeatures, int kThreads>
__device__ __noinline__ void FinishWorkTileOnce(const LinearArgs& args, int tile, const float* sums, int cluster,
                                                int rank) {
  FinishWorkTile<T, kTileFeatures, kThreads>(args, tile, sums, cluster, rank);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_EPILOGUE_CUH_
