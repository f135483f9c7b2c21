// From the partial sums of a cluster's CTAs to results.
#ifndef XLA_GPU_OPS_LINEAR_SM90_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/cluster.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// Four neighbouring columns of a row, added over the cluster's CTAs in the order of k.
__device__ inline void AddPartials(const float* sums, int cluster, float (&total)[4]) {
  float4 parts[8];
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

// Finishes this CTA's share of its cluster's work tile. `sums`: [rows][SumPitch] in each CTA's shared memory.
// Not inlined: it is compiled once for many kernels.
template <typename T, int kTileFeatures>
__device__ __noinline__ void FinishTileOfCluster(const LinearArgs& args, int tile, const float* sums, int cluster,
                                                 int rank) {
  constexpr int kSumPitch = SumPitch(kTileFeatures), kThreads = kSm90Threads;
  using Four = AlignedVector<T, 4>;
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int tile_features = gated ? kTileFeatures / 2 : kTileFeatures;
  const int first_four = tile_features / 4 * rank / cluster;
  const int fours = tile_features / 4 * (rank + 1) / cluster - first_four;  // of a row
  for (int i = static_cast<int>(threadIdx.x); i < args.rows * fours; i += kThreads) {
    const int row = i / fours, column = (first_four + i % fours) * 4;
    const int feature = tile * tile_features + column;
    if (feature >= out_features) continue;
    const int64_t at = static_cast<int64_t>(row) * out_features + feature;
    Four residual = {};
    if (args.residual != nullptr) residual = *reinterpret_cast<const Four*>(static_cast<const T*>(args.residual) + at);
    const float* from = sums + row * kSumPitch + column;
    float values[4], factors[4];
    AddPartials(from, cluster, values);
    if (gated) AddPartials(from + kTileFeatures / 2, cluster, factors);
    Four out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float value = Feature<T>(args, values[j], feature + j);
      if (gated) {
        const float factor = Feature<T>(args, factors[j], out_features + feature + j);
        value = Round<T>(ActivationOf<T>(args.activation, value) * factor);
      }
      if (args.residual != nullptr) value += static_cast<float>(residual.values[j]);
      out.values[j] = static_cast<T>(value);
    }
    *reinterpret_cast<Four*>(static_cast<T*>(args.out) + at) = out;
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_EPILOGUE_CUH_
