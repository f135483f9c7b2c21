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
// [rows][SumPitch] in each CTA's shared memory.
template <typename T, int kTileFeatures, int kThreads>
__device__ __forceinline__ void FinishWorkTile(const Sm90Args& sm90, int tile, const float* sums, int rank) {
  const bool gated = sm90.linear.activation != Activation::kNone;
  const int tile_features = gated ? kTileFeatures / 2 : kTileFeatures;
  const ShareOfThread share(sm90, rank, kThreads);
  const auto wait = [&] { WaitForSums(sm90.cluster, kThreads); };
  const auto sums_of_columns = [&] { return sums + share.column; };
  const auto add = [&](const float* from, float(&total)[4]) { AddPartials(from, sm90.cluster, total); };
  FinishRows<T, /*kHasScale=*/true>(sm90.linear, share, tile * tile_features + share.column, SumPitch(kTileFeatures),
                                    kTileFeatures / 2, wait, sums_of_columns, add);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_EPILOGUE_CUH_
